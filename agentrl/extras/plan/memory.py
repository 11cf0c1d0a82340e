"""Memory of the components of a simulated run, by the formulas of `agentrl config explain`."""

from __future__ import annotations

from agentrl.config.model_size import ModelSize
from agentrl.config.rank_memory import trained_memory
from agentrl.config.schema import Config
from agentrl.extras.plan.gpus import GPUS
from agentrl.extras.plan.measure import Simulated
from agentrl.extras.plan.speeds import WIDTH

_GB = 1e9
_STORED = 17
"""Bytes per token of a stored trajectory: 4.65 GB for 268 million (measured)."""
_PLAYED = 60
"""Bytes per token of an attempt in play: ids as Python integers, log-probabilities and versions."""


def components(config: Config, size: ModelSize | None, simulated: Simulated) -> dict[str, float]:
    """Return GB by component: per GPU for models, in all for processes."""
    in_flight = config.rollout.num_actors * config.rollout.max_concurrent_trajectories
    batches = config.buffer.max_staleness + 2
    sizes = {
        "journal of the buffer": batches * simulated.tokens_per_step * _STORED / _GB,
        "batch in the driver": 2 * simulated.tokens_per_step * _STORED / _GB,
        "attempts in play": in_flight * simulated.mean_tokens * _PLAYED / _GB,
    }
    if size is None:
        return sizes
    longest = config.data.max_prompt_tokens + config.agent.max_response_tokens
    rank = trained_memory(
        size,
        config.model,
        config.learner,
        tokens=max(config.learner.microbatch_tokens, longest),
        is_gpu=True,
        has_reference=config.algorithm.kl.coefficient > 0,
        teacher=None if config.teacher_model is None else ModelSize.read(config.teacher_model.path),
    )
    own = config.simulation.server
    memory = own.gpus * GPUS[config.simulation.gpu].memory_gb * own.memory_share
    weights = WIDTH * size.num_parameters / _GB
    return {
        "a learner's GPU": rank.peak_bytes / _GB,
        "a server's GPU: weights": weights / own.gpus,
        "a server's GPU: KV cache in use": simulated.kv_share * (memory - weights) / own.gpus,
        **sizes,
    }
