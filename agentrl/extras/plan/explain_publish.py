"""What a publish costs the requests in flight, by pause mode."""

from __future__ import annotations

from agentrl.config.schema import Config


def publish_line(config: Config, *, num_in_flight: int, longest_tokens: int) -> tuple[str, str]:
    """Return label and text: tokens that servers prefill anew after a publish, and what would avoid it.

    Args:
        num_in_flight: trajectories in flight, at most.
        longest_tokens: of a trajectory, at most.
    """
    rollout = config.rollout
    # The kind of attached servers is not known yet.
    kind = "sglang" if rollout.urls else rollout.backend
    mode = rollout.pause_mode_of(kind)
    if config.buffer.max_staleness == 0:
        return "a publish", "no trajectory is in flight, so nothing is prefilled anew"
    if mode == "in_place":
        return "a publish", (
            "in_place: nothing is prefilled anew; contexts keep the keys and values of the old weights"
        )
    text = (
        f"{mode}: at most {num_in_flight * longest_tokens:,} tokens are prefilled anew = "
        f"{num_in_flight:,} trajectories in flight x {longest_tokens:,}"
    )
    # An adapter alone is always published with abort.
    if kind == "sglang" and not rollout.colocated and config.model.lora.rank == 0:
        text += (
            "; rollout.weights.pause_mode=in_place prefills nothing anew: each token keeps its version and "
            "the log-probability that it was sampled with, so corrections also cover the stale cache"
        )
    return "a publish", text
