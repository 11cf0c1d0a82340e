"""The GPUs of learner and servers: verl's synchronous trainer shares them, with servers of any size."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from agentrl.extras.plan.model_presets import known_size
from agentrl.extras.verl.importing.source import WrittenConfig

MODEL_PATH = "actor_rollout_ref.model.path"
ROLLOUT = "actor_rollout_ref.rollout"
WIDTH, STAGES = f"{ROLLOUT}.tensor_model_parallel_size", f"{ROLLOUT}.pipeline_model_parallel_size"
SIZES = ("trainer.nnodes", "trainer.n_gpus_per_node")
FSDP = "actor_rollout_ref.actor.fsdp_config"

GPU_BYTES = 80e9
"""Memory of the GPUs for which verl's scripts are written."""
USABLE = 0.7
"""Share of it for weights and optimizer; the rest is for the KV cache and activations."""
STATE_BYTES = 16
"""Of a trained parameter in the learner: weight, gradient and two moments in float32."""
SERVED_BYTES = 2
"""Of a parameter in a server: bfloat16."""
MEMORY_SHARE = 0.5
"""verl's default of gpu_memory_utilization."""
_PARAMETERS = re.compile(r"(?<![a-z0-9.])(\d+(?:\.\d+)?)b(?![a-z0-9])")
"""A number of parameters in the name of a model, such as 7b."""


@dataclass(frozen=True, slots=True)
class GPUs:
    """Nodes with the same number of GPUs each."""

    nodes: int
    per_node: int

    @property
    def num(self) -> int:
        return self.nodes * self.per_node

    def as_pool(self) -> dict[str, int]:
        return {"nodes": self.nodes, "gpus_per_node": self.per_node}


@dataclass(frozen=True, slots=True)
class GPULayout:
    """Where learner and servers are.

    Attributes:
        serving: the servers' own GPUs; None: they share those of the learner.
        width: tensor parallel GPUs of a server.
        share: of a GPU's memory for a server, if it needs more here than in verl.
        note: the difference from verl's layout; may be empty.
    """

    learning: GPUs
    serving: GPUs | None
    width: int = 1
    note: str = ""
    share: float | None = None


def pool_of_servers(source: WrittenConfig) -> str | None:
    """Return the section of verl that gives servers their own GPUs; None if they share the learner's."""
    return next((name for name in ("rollout", ROLLOUT) if source.get(f"{name}.nnodes")), None)


def find_layout(source: WrittenConfig) -> GPULayout | None:
    """Return where the config's learner and servers can be; None if no layout of its GPUs has its servers.

    Servers on the learner's GPUs have one GPU each. If a script has larger ones there, they become that small
    where a GPU has the memory, or else half of the GPUs become theirs.
    """
    whole = GPUs(*(int(source.get(key)) for key in SIZES))
    width, stages = (int(source.get(key) or 1) for key in (WIDTH, STAGES))
    if (section := pool_of_servers(source)) is not None:
        own = GPUs(
            int(source.get(f"{section}.nnodes")),
            int(source.get(f"{section}.n_gpus_per_node") or whole.per_node),
        )
        return GPULayout(whole, own, width)
    if width * stages == 1 or source.get("trainer.device") == "cpu":
        return GPULayout(whole, None)
    size = _num_parameters(str(source.get(MODEL_PATH) or ""))
    if size is not None and _fits_beside_the_learner(size, whole.num, source):
        note = f"{width * stages} in verl; a GPU of {GPU_BYTES / 1e9:.0f} GB holds a server of this model"
        needed = math.ceil(20 * SERVED_BYTES * size / (USABLE * GPU_BYTES)) / 20
        given = source.get(f"{ROLLOUT}.gpu_memory_utilization") or MEMORY_SHARE
        return GPULayout(whole, None, 1, note, needed if needed > given else None)
    return _halves(whole, width, source, size) if stages == 1 else None


def _fits_beside_the_learner(size: float, num_ranks: int, source: WrittenConfig) -> bool:
    """Return whether a GPU holds a whole model to serve, and its share of the learner's state."""
    weights = SERVED_BYTES * size
    models = 2 if source.get("algorithm.adv_estimator") == "gae" else 1  # policy and critic
    is_away = source.get(f"{FSDP}.param_offload") and source.get(f"{FSDP}.optimizer_offload")
    state = 0 if is_away else models * STATE_BYTES * size / num_ranks
    return weights + state <= USABLE * GPU_BYTES


def _halves(whole: GPUs, width: int, source: WrittenConfig, size: float | None) -> GPULayout | None:
    """Return the layout in which servers have half of the GPUs; None if they cannot be divided so."""
    if whole.nodes > 1:
        serving = GPUs(whole.nodes // 2, whole.per_node)
        learning = GPUs(whole.nodes - serving.nodes, whole.per_node)
    else:
        most = max(1, whole.per_node // 2)
        serving = GPUs(1, most // min(width, most) * min(width, most))
        learning = GPUs(1, whole.per_node - serving.per_node)
    widest = serving.per_node
    if width > widest and size is not None and SERVED_BYTES * size / widest <= USABLE * GPU_BYTES:
        width = widest
    shared_by = int(source.get("actor_rollout_ref.actor.ulysses_sequence_parallel_size") or 1)
    if widest < width or widest % width or not learning.num or learning.num % shared_by:
        return None
    note = f"servers of {width} GPUs have GPUs of their own here: {serving.num} of the {whole.num}"
    return GPULayout(learning, serving, width, note)


def _num_parameters(path: str) -> float | None:
    """Return the number of parameters of a model by its config.json or name; None if neither says it."""
    if (size := known_size(path)) is not None:
        return float(size.num_parameters)
    found = _PARAMETERS.search(path.rstrip("/").rpartition("/")[2].lower())
    return None if found is None else float(found[1]) * 1e9
