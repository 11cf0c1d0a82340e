"""What a session samples by, and from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agentrl.types import Generation, SamplingParams


class Sampling(Protocol):
    """How to sample: the `rollout` config in training, the `eval` config in validation and evaluation.

    Lengths are None where `agent` decides them.
    """

    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def min_p(self) -> float: ...
    @property
    def stop(self) -> tuple[str, ...]: ...
    @property
    def ignore_eos(self) -> bool: ...
    @property
    def max_response_tokens(self) -> int | None: ...
    @property
    def max_turn_tokens(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class GreedySampling:
    """Always the most likely token."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    max_response_tokens: int | None = None
    max_turn_tokens: int | None = None


class Generator(Protocol):
    """Samples turns: the Router."""

    @property
    def context_tokens(self) -> int | None:
        """Largest prompt plus answer that every server takes; None while unknown."""

    async def generate(self, input_ids: Sequence[int], params: SamplingParams, *, trajectory_key: str) -> Generation: ...
