"""Sending of weights to the servers in buckets: while one bucket is sent, the next is gathered."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch.distributed import ProcessGroup

from agentrl.learner.model import Policy
from agentrl.sglang.process_group import Broadcast, flatten
from agentrl.types import SendTimes


class BucketSender:
    """Broadcasts buckets from rank 0, at most two in memory. Other ranks (`group` None) only help to gather."""

    def __init__(self, policy: Policy, group: ProcessGroup | None) -> None:
        self._policy = policy
        self._group = group
        self._travelling: Broadcast | None = None
        self._gather_s = self._wait_s = 0.0

    def send(self, names: Sequence[str]) -> None:
        """Gather the named weights into one flat byte buffer and start broadcasting it. A collective.

        Raises:
            InfrastructureError: the previous bucket did not arrive.
        """
        started = time.perf_counter()
        flat = flatten([self._policy.full_tensor(name) for name in names])
        self._gather_s += time.perf_counter() - started
        # The previous bucket was sent while this one was gathered; wait for it only now.
        self._settle()
        if self._group is not None:
            self._travelling = Broadcast(flat, self._group)

    def finish(self) -> SendTimes:
        """Wait for the last bucket; raise InfrastructureError if it did not arrive."""
        self._settle()
        return SendTimes(self._gather_s, self._wait_s)

    def _settle(self) -> None:
        travelling, self._travelling = self._travelling, None
        if travelling is not None:
            started = time.perf_counter()
            travelling.wait()
            self._wait_s += time.perf_counter() - started
