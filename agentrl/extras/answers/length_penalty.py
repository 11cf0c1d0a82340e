"""A soft penalty for responses that come close to the token limit."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from agentrl.errors import RewardError
from agentrl.plugins import Attempted, Reward, RewardResult
from agentrl.plugins.options import Options, read_options
from agentrl.plugins.rewards import RunsIn
from agentrl.types import JsonObject

BUFFER_SHARE = 0.2
"""Default buffer, as in the paper: 4096 of 20480 tokens."""


def soft_overlong_punishment(length: int, *, max_length: int, buffer: int) -> float:
    """Return 0 up to max_length - buffer tokens; then it falls linearly to -1 at max_length, and stays at -1.

    Args:
        length, max_length, buffer: in tokens; 0 < buffer <= max_length.

    Source: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 13.
    """
    return max(-1.0, min(0.0, (max_length - buffer - length) / buffer))


class LengthPenaltyOptions(Options):
    """Defaults: `buffer_tokens` a fifth of the limit, `max_tokens` agent.max_response_tokens."""

    buffer_tokens: int | None = Field(None, gt=0)
    max_tokens: int | None = Field(None, gt=0)
    count: Literal["response", "action"] = "response"  # everything after the prompt | what the policy sampled


class LengthPenalty(Reward):
    """0 down to -1 within the buffer before the token limit. Metrics: overlong (the value is below 0)."""

    name: ClassVar[str] = "length_penalty"
    runs_in: RunsIn = "inline"

    def __init__(self, config: JsonObject | None = None) -> None:
        super().__init__(config)
        self._options = read_options(LengthPenaltyOptions, self.config, plugin=f"reward {self.name!r}")

    def score(self, attempt: Attempted) -> RewardResult:
        limit = self._options.max_tokens or attempt.max_response_tokens
        buffer = self._options.buffer_tokens or max(1, round(BUFFER_SHARE * limit))
        if buffer > limit:
            raise RewardError(
                f"buffer_tokens={buffer} exceeds the limit of {limit} tokens; lower it, or raise "
                "agent.max_response_tokens"
            )
        length = (
            attempt.num_response_tokens if self._options.count == "response" else attempt.num_action_tokens
        )
        value = soft_overlong_punishment(length, max_length=limit, buffer=buffer)
        return RewardResult(value, {"overlong": float(value < 0)})
