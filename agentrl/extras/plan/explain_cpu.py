"""Explain what a model costs on CPUs: memory of each process, and seconds per step."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.config.model_size import ModelSize
from agentrl.config.rank_memory import GIB, PROCESS_BYTES
from agentrl.config.rollout import RolloutConfig
from agentrl.config.schema import Config
from agentrl.extras.plan.explain_memory import rank_memory

LEARN_SHARE = 0.8
"""Share of the speed of a large matrix product that an update reaches, measured with SmolLM2-135M."""
SAMPLE_SHARE = 0.2
"""The same for sampling with 32 requests at once."""

Lines = list[tuple[str, str]]


def cpu_model(config: Config) -> ModelSize | None:
    """Return the size of a policy that is trained and served on CPUs.

    None: on GPUs, or the model is not a local folder of a known type.
    """
    layout = config.placement.layout(config.num_ranks)
    if any(spot.num_gpus for spots in layout.spots.values() for spot in spots):
        return None
    return ModelSize.read(config.model.path)


def cpu_lines(config: Config, size: ModelSize, *, flops_per_s: float | None) -> Lines:
    """Return the lines about memory and time.

    flops_per_s: of one thread, in a large matrix product; None: nothing is said about time.
    """
    lines = [("model", f"{size.num_parameters / 1e6:,.1f} million parameters")]
    processes = _processes(config, size)
    for process in processes:
        each = f"{process.num} x " if process.num > 1 else ""
        lines.append((f"memory of {process.who}", f"{each}about {_gib(process.num_bytes)} = {process.parts}"))
    total = sum(process.num * process.num_bytes for process in processes)
    lines.append(("memory of the run", f"about {_gib(total)}"))
    if flops_per_s is not None:
        lines += _time_lines(config, size, flops_per_s)
    return lines


def memory_warning(config: Config, *, granted_bytes: int) -> str | None:
    """Return a warning if the processes of a run on CPUs need more memory than this machine grants.

    None: they fit, or it is not known (see `cpu_model`), or the run joins a cluster.
    """
    size = cpu_model(config) if config.cluster.address is None else None
    if size is None:
        return None
    processes = _processes(config, size)
    total = sum(process.num * process.num_bytes for process in processes)
    if total <= granted_bytes:
        return None
    shares = ", ".join(f"{process.who} {process.num} x {_gib(process.num_bytes)}" for process in processes)
    return (
        f"this run needs about {_gib(total)} of memory: {shares}; but the machine grants "
        f"{_gib(granted_bytes)}: lower learner.microbatch_tokens or rollout.embedded.num_blocks, or set "
        "model.lora.rank"
    )


@dataclass(frozen=True, slots=True)
class _Process:
    """Memory of each of `num` equal processes. parts: what it consists of."""

    who: str
    num: int
    num_bytes: float
    parts: str


def _processes(config: Config, size: ModelSize) -> list[_Process]:
    found = [_learner(config)]
    if config.rollout.backend == "embedded" and config.rollout.num_started:
        found.append(_server("a server", config.rollout, size, _bytes_per_number(config)))
    for plan in config.frozen_plans if config.rollout.backend == "embedded" else ():
        if (frozen := ModelSize.read(plan.model.path)) is not None:
            found.append(_server(f"a server of {plan.name}", plan.rollout, frozen, _bytes_per_number(config)))
    others = 3 + config.rollout.num_actors
    parts = "driver, Ray, replay buffer and rollout actors"
    return [*found, _Process("the others", 1, others * PROCESS_BYTES, parts)]


def _learner(config: Config) -> _Process:
    memory, learner = rank_memory(config, "actor"), config.learner
    assert memory is not None, "cpu_model knows the size"
    longest = config.data.max_prompt_tokens + config.agent.max_response_tokens
    tokens = max(learner.microbatch_tokens, longest)
    parts = memory.parts
    state = sum(parts.pop(name) for name in ("weights", "gradients", "optimizer state"))
    what = "adapter with its gradients and AdamW's moments" if config.model.lora.rank else ""
    named = {what or "weights, gradients, AdamW's moments": state}
    named |= {
        f"{name} of {tokens:,} tokens" if name == "activations" else name: n for name, n in parts.items()
    }
    total = memory.peak_bytes
    if config.has_critic and (critic := rank_memory(config, "critic")) is not None:
        named["critic"] = critic.state_bytes  # its activations and those of the policy are not kept together
        total += critic.state_bytes
    named["process"] = PROCESS_BYTES
    shown = " + ".join(f"{_gib(size)} {name}" for name, size in named.items() if size >= 0.05 * GIB)
    return _Process("a rank", learner.world_size, PROCESS_BYTES + total, shown)


def _server(who: str, rollout: RolloutConfig, size: ModelSize, width: int) -> _Process:
    """Return the memory of an embedded server. width: bytes of a number."""
    server = rollout.embedded
    weights, num_tokens = size.num_parameters * width, server.num_blocks * server.page_size
    cache = num_tokens * size.kv_values_per_token * width
    copies, times = (2, "twice") if server.linear_kernels == "torch" else (3, "up to three times")
    parts = (
        f"{_gib(weights)} weights, {times} in a publish + {_gib(cache)} KV cache of {num_tokens:,} tokens + "
        f"{_gib(PROCESS_BYTES)} process"
    )
    return _Process(who, rollout.num_started, PROCESS_BYTES + copies * weights + cache, parts)


def _time_lines(config: Config, size: ModelSize, flops_per_s: float) -> Lines:
    learner, rollout = config.learner, config.rollout
    trajectories = config.buffer.groups_per_step * config.attempts_per_group
    longest = config.data.max_prompt_tokens + config.agent.max_response_tokens
    passes = (2 if config.model.lora.rank else 3) + learner.gradient_checkpointing
    threads = learner.threads * learner.world_size
    update = 2 * size.num_matrix_parameters * passes / (LEARN_SHARE * flops_per_s * threads)
    lines = [
        (
            "time of the updates",
            f"about {1 / update:,.0f} tokens/s; at most "
            f"{update * learner.epochs_per_step * trajectories * longest:,.0f} s per step, if every "
            "trajectory is full",
        )
    ]
    if rollout.backend == "embedded" and rollout.num_started:
        threads = rollout.embedded.threads * rollout.num_started
        sample = 2 * size.num_matrix_parameters / (SAMPLE_SHARE * flops_per_s * threads)
        lines.append(
            (
                "time of sampling",
                f"about {1 / sample:,.0f} tokens/s; at most "
                f"{sample * trajectories * config.agent.max_response_tokens:,.0f} s per step",
            )
        )
    lines.append(
        (
            "assumed",
            f"{flops_per_s / 1e9:,.0f} GFLOP/s per thread (a matrix product, measured now), a CPU per "
            f"thread; updates reach {LEARN_SHARE:.0%} and sampling {SAMPLE_SHARE:.0%} of it",
        )
    )
    return lines


def _bytes_per_number(config: Config) -> int:
    return 4 if config.model.dtype == "float32" else 2


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
