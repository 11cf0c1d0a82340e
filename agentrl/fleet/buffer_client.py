"""`BufferClient`: typed calls to the replay buffer's actor, with deadlines, and retries on a full disk.

If the actor is killed, Ray restarts it, the actor reads its journal, and Ray retries the calls in flight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray.actor import ActorHandle

from agentrl.buffer.actor import BufferActor, BufferPlan
from agentrl.buffer.lineage import Lineage
from agentrl.config.schema import Config
from agentrl.errors import JournalError
from agentrl.fleet.calls import get
from agentrl.types import BufferCounts, Task
from agentrl.workers.pools import beside_driver

CALL_TIMEOUT_S = 60.0
"""Timeout of a call; after a restart, the buffer needs seconds to read its journal."""
DATA_TIMEOUT_S = 3600.0
"""Reading and tokenizing a large training set takes minutes; this timeout only catches a hang."""
PAUSE_S = 1.0


class BufferClient:
    """Calls `BufferActor`; see `ReplayBuffer` for what each method does."""

    def __init__(self, actor: ActorHandle, *, patience_s: float, say: Callable[[str], None]) -> None:
        """`patience_s`: seconds to retry while the journal cannot be written."""
        self.actor = actor
        self._patience_s = patience_s
        self._say = say

    @classmethod
    def launch(cls, config: Config, folder: str, *, is_new: bool, say: Callable[[str], None]) -> BufferClient:
        """Start the actor, with its journal in `folder`."""
        options = {"max_restarts": -1, "max_task_retries": -1, "scheduling_strategy": beside_driver()}
        actor = BufferActor.options(**options).remote(config, folder, is_new=is_new)  # type: ignore[attr-defined]  # ray's stubs
        return cls(actor, patience_s=config.buffer.disk_patience_s, say=say)

    def open(self) -> BufferPlan:
        plan: BufferPlan = self._call(self.actor.open, timeout_s=DATA_TIMEOUT_S)
        return plan

    def resume(self, step: int, state: bytes | None) -> None:
        self._call(self.actor.resume, step, state, timeout_s=DATA_TIMEOUT_S)

    def take(self, num_groups: int, wait_s: float, *, step: int) -> bytes | None:
        batch: bytes | None = self._call(self.actor.take, num_groups, wait_s, step)
        return batch

    def reject(self, step: int, reason: str) -> None:
        self._call(self.actor.reject, step, reason)

    def tasks(self, group_ids: Sequence[int]) -> list[Task]:
        tasks: list[Task] = self._call(self.actor.tasks, group_ids)
        return tasks

    def advance(self, version: int, *, step: int) -> Lineage:
        """Announce that `version` is served, and return the lineage up to it."""
        self._call(self.actor.advance, version, step)
        lineage: Lineage = self._call(self.actor.lineage)
        return lineage

    def settle(self, step: int) -> None:
        self._call(self.actor.settle, step)

    def roll_back(self, step: int) -> None:
        self._call(self.actor.roll_back, step)

    def release(self, owner: str) -> int:
        num_groups: int = self._call(self.actor.release, owner)
        return num_groups

    def state(self) -> bytes:
        state: bytes = self._call(self.actor.state)
        return state

    def counts(self) -> BufferCounts:
        counts: BufferCounts = self._call(self.actor.counts)
        return counts

    def stats(self) -> Mapping[str, float]:
        stats: Mapping[str, float] = self._call(self.actor.stats)
        return stats

    def curriculum(self) -> Mapping[str, float]:
        metrics: Mapping[str, float] = self._call(self.actor.curriculum)
        return metrics

    def _call(self, method: Any, *args: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        since: float | None = None
        while True:
            try:
                return get(method.remote(*args), timeout_s=timeout_s, who="the replay buffer")
            except JournalError as error:
                if since is None:
                    since = time.monotonic()
                    self._say(f"{error} (waiting for up to {self._patience_s:g} s)")
                if time.monotonic() - since > self._patience_s:
                    raise
                time.sleep(PAUSE_S)
