"""A rank of the critic in its own process."""

from __future__ import annotations

from agentrl.learner.critic import Critic, CriticSpec
from agentrl.learner.ranks import join_ranks


class CriticWorker(Critic):
    """A critic whose ranks join at address:port, in a process group separate from the policy's."""

    def __init__(self, spec: CriticSpec, *, rank: int, address: str, port: int) -> None:
        super().__init__(spec, join_ranks(spec.learner, rank=rank, address=address, port=port, on=spec.device))
