"""Parts of a run that come up side by side: launched one after the other at once, then waited for together."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import ray
from ray import ObjectRef
from ray.exceptions import RayError

from agentrl.errors import AgentRLError

LOOK_S = 0.5
"""Between two looks at parts that nothing but a look says of whether they stand."""
FETCH_TIMEOUT_S = 60.0
"""A result that is there may still have to come from another machine."""


@dataclass(frozen=True, slots=True)
class Readiness:
    """How far a part has come: `num_ready` of `num_parts` stand. may_come: some of the others may still come up."""

    name: str
    num_ready: int
    num_parts: int
    may_come: bool = False

    @property
    def is_ready(self) -> bool:
        return self.num_ready == self.num_parts


class Starting(Protocol):
    """A part that was launched and may not stand yet."""

    @property
    def starting(self) -> Mapping[ObjectRef, float]:
        """What is still waited for, and until when (of the monotonic clock)."""

    @property
    def readiness(self) -> Readiness:
        """How far it has come; returns at once, in any thread."""

    def wait_until_ready(self) -> None:
        """Wait until it stands; raise the part's own error when it does not."""


def wait_until_all_ready(parts: Sequence[Starting], *, table: Callable[[], str] | None = None) -> None:
    """Wait until all parts stand. The first that fails, or is late, ends the wait with its own error, however long others still take.

    Args:
        table: says in one line how far all parts are, for the error of one that is late.

    Raises:
        AgentRLError: what the part's `wait_until_ready` raises. Stopping the others is the caller's.
    """
    pending = {ref: (deadline, part) for part in parts for ref, deadline in part.starting.items()}
    while pending or any(part.readiness.may_come for part in parts):
        if not pending:
            time.sleep(LOOK_S)  # each of these parts ends its wait by a deadline of its own
            continue
        deadline, late = min(((deadline, ref) for ref, (deadline, _) in pending.items()), key=lambda pair: pair[0])
        done, _ = ray.wait(list(pending), timeout=max(0.0, deadline - time.monotonic()), fetch_local=False)
        ref = done[0] if done else late
        _, part = pending.pop(ref)
        if not done:
            _end_wait(part, table)
        elif _has_failed(ref):
            part.wait_until_ready()
    for part in parts:
        _end_wait(part, table)


def num_done(refs: Collection[ObjectRef]) -> int:
    """Return how many of the calls have ended, in whatever way."""
    return len(ray.wait(list(refs), num_returns=len(refs), timeout=0, fetch_local=False)[0]) if refs else 0


def _end_wait(part: Starting, table: Callable[[], str] | None) -> None:
    """Have the part raise its error, which gets the table of all parts, or return."""
    how_far = None if table is None else table()  # before it stops what has not come up
    try:
        part.wait_until_ready()
    except AgentRLError as error:
        if how_far is not None:
            error.args = (f"{error}; start-up: {how_far}", *error.args[1:])
        raise


def _has_failed(ref: ObjectRef) -> bool:
    try:
        ray.get(ref, timeout=FETCH_TIMEOUT_S)
    except RayError:
        return True
    return False
