"""What a session samples by, and from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agentrl.types import Generation, SamplingParams


class Sampling(Protocol):
    """How to sample: the `rollout` config in training, the `eval` config in validation."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def min_p(self) -> float: ...


@dataclass(frozen=True, slots=True)
class GreedySampling:
    """Always the most likely token."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0


class Generator(Protocol):
    """Samples turns: the Router."""

    @property
    def context_tokens(self) -> int | None:
        """Largest prompt plus answer that every server takes; None while unknown."""

    async def generate(self, input_ids: Sequence[int], params: SamplingParams, *, trajectory_key: str) -> Generation: ...
