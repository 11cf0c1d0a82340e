"""The teacher of on-policy distillation on servers: scores finished attempts where they are played.

A teacher that does not answer gives the outcome `model_error`: the attempt is played again, and nothing is
learned from it without a teacher.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import trio
from numpy.typing import NDArray

from agentrl.config.distillation import DistillationConfig
from agentrl.errors import RequestRefused, ServerError
from agentrl.rollout.frozen_servers import FrozenServers
from agentrl.rollout.limits import server_key
from agentrl.sglang.client import SGLangClient
from agentrl.types import Trajectory

KEY = "algorithm.distillation.servers"


class ScoringClient(Protocol):
    """The part of SGLangClient that a teacher needs."""

    async def prompt_logprobs(
        self, input_ids: Sequence[int], *, first: int, rid: str
    ) -> NDArray[np.float32]: ...

    async def aclose(self) -> None: ...


class Teacher:
    """Asks the teacher's servers for the log-probabilities of what the policy sampled."""

    def __init__(self, connect: Callable[[], Sequence[ScoringClient]], *, timeout_s: float) -> None:
        """connect: returns the clients of its servers, at the first attempt.

        timeout_s: deadline of one attempt.
        """
        self._connect = connect
        self._timeout_s = timeout_s
        self._servers: FrozenServers[ScoringClient] | None = None

    @classmethod
    def of(cls, config: DistillationConfig) -> Teacher | None:
        """Return the teacher of the config; None if no servers have one.

        Raises:
            ConfigError: the variable with the servers' key is not set.
        """
        if not config.asks_servers:
            return None
        key = server_key(config.servers.api_key_env, f"{KEY}.api_key_env")
        return cls(
            lambda: [SGLangClient(url, api_key=key) for url in config.servers.urls],
            timeout_s=config.timeout_s,
        )

    async def taught(self, trajectory: Trajectory, *, key: str) -> Trajectory:
        """Return the trajectory with the teacher's log-probabilities of its action tokens.

        Raises:
            RequestRefused: a server calls the tokens invalid.
            ServerError: servers failed repeatedly, or the deadline passed.
        """
        if trajectory.images:
            raise RequestRefused(
                "the teacher's servers score only text, and the attempt shows images; give "
                "algorithm.distillation a model instead of servers"
            )
        servers = self._servers = self._servers or FrozenServers(self._connect())
        mask = trajectory.action_mask
        scores_T = np.zeros(len(mask), np.float32)

        async def score(number: int, start: int, end: int) -> None:
            first = int(mask[start:end].argmax())
            ids = trajectory.token_ids[start:end].tolist()
            scores_T[start + first : end] = await servers.ask(
                lambda client: client.prompt_logprobs(ids, first=first, rid=f"{key}-t{number}")
            )

        bounds = itertools.pairwise((*trajectory.segment_starts, trajectory.num_tokens))
        with trio.move_on_after(self._timeout_s) as deadline:
            for number, (start, end) in enumerate(bounds):
                if mask[start:end].any():
                    await score(number, start, end)
        if deadline.cancelled_caught:
            raise ServerError(
                f"the teacher did not answer within algorithm.distillation.timeout_s={self._timeout_s:g}"
            )
        return trajectory.replace(teacher_logprobs=scores_T[mask])

    async def aclose(self) -> None:
        """Close all connections."""
        servers, self._servers = self._servers, None
        if servers is not None:
            await servers.aclose()
