"""Interfaces of a session's sampling settings, and of what yields its turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agentrl.servers.streamed import Hear
from agentrl.types import Generation, SamplingParams


class Sampling(Protocol):
    """Sampling settings: the `rollout` config in training, the `eval` config in validation and evaluation.

    A length of None means that the `agent` config decides it.
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
    def replay_experts(self) -> bool: ...
    @property
    def max_response_tokens(self) -> int | None: ...
    @property
    def max_turn_tokens(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class GreedySampling:
    """Sampling settings that always choose the most likely token."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    replay_experts: bool = False
    max_response_tokens: int | None = None
    max_turn_tokens: int | None = None


class Generator(Protocol):
    """Samples turns, as the Router does."""

    @property
    def context_tokens(self) -> int | None:
        """Largest prompt plus answer, in tokens, that every server accepts; None if unknown."""

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        trajectory_key: str,
        hear: Hear | None = None,
    ) -> Generation:
        """Sample one turn; `hear` is told its tokens as they are sampled, if the servers stream."""


class TurnSource(Protocol):
    """Asks servers for turns: `Router` for tokens, `MessageModel` for messages."""

    def set_servers(self, urls: Sequence[str], *, version: int) -> None:
        """Use these servers, once they have weights of at least `version`."""

    async def watch(self) -> None:
        """Watch the servers until cancelled."""

    def places(self) -> dict[str, str]:
        """Return the URL of the server that each requested turn waits for, by attempt key."""

    def forget(self, trajectory_key: str) -> None:
        """Forget an attempt that is over."""

    async def aclose(self) -> None: ...
