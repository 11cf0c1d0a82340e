"""Explain what a model costs on CPUs: memory of each process, and seconds per step."""

from __future__ import annotations

from agentrl.config.model_size import ModelSize
from agentrl.config.schema import Config

GIB = 1 << 30
PROCESS_BYTES = 0.45 * GIB
"""Memory of a learner rank and of a server with a model of no size: Python, torch, Ray."""
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
    lines = [
        ("model", f"{size.num_parameters / 1e6:,.1f} million parameters"),
        ("memory of a rank", _learner_memory(config, size)),
    ]
    if config.rollout.backend == "embedded" and config.rollout.num_started:
        lines.append(("memory of a server", _server_memory(config, size)))
    if flops_per_s is not None:
        lines += _time_lines(config, size, flops_per_s)
    return lines


def _learner_memory(config: Config, size: ModelSize) -> str:
    learner, width = config.learner, _bytes_per_number(config)
    longest = config.data.max_prompt_tokens + config.agent.max_response_tokens
    tokens = max(learner.microbatch_tokens, longest)
    activations = tokens * size.activations_per_token * width / learner.num_replicas
    if learner.gradient_checkpointing:
        activations = tokens * size.num_layers * size.hidden_size * width / learner.num_replicas
    if config.model.lora.rank:
        weights, what = 1.0 * size.num_parameters * width, "frozen weights"
    else:
        weights, what = 16 * size.num_parameters / learner.world_size, "weights, gradients, AdamW's moments"
    return (
        f"about {_gib(PROCESS_BYTES + weights + activations)} = {_gib(weights)} {what} + "
        f"{_gib(activations)} activations of {tokens:,} tokens + {_gib(PROCESS_BYTES)} process"
    )


def _server_memory(config: Config, size: ModelSize) -> str:
    server, width = config.rollout.embedded, _bytes_per_number(config)
    weights, num_tokens = size.num_parameters * width, server.num_blocks * server.page_size
    cache = num_tokens * size.kv_values_per_token * width
    return (
        f"about {_gib(PROCESS_BYTES + 2 * weights + cache)} = {_gib(weights)} weights, twice in a publish "
        f"+ {_gib(cache)} KV cache of {num_tokens:,} tokens + {_gib(PROCESS_BYTES)} process"
    )


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
