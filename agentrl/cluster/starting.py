"""Parallel start-up of the parts of a run: all are launched first, then waited for together."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import ray
from ray import ObjectRef
from ray.exceptions import RayError

from agentrl.errors import AgentRLError
from agentrl.servers.startup import Readiness


class Starting(Protocol):
    """A part that was launched and may not be ready yet."""

    @property
    def starting(self) -> Mapping[ObjectRef, float]:
        """References that are still waited for, and their deadlines (monotonic clock)."""

    @property
    def readiness(self) -> Readiness:
        """Progress of the start-up; does not block, callable from any thread."""

    def wait_until_ready(self) -> None:
        """Wait until the part is ready; raise the part's own error if it fails."""


POLL_S = 0.5
"""Seconds between two polls of parts that do not report by themselves."""
FETCH_TIMEOUT_S = 60.0
"""For a result that is ready but may have to be transferred from another machine."""


def wait_until_all_ready(parts: Sequence[Starting], *, table: Callable[[], str] | None = None) -> None:
    """Wait until all parts are ready.

    The first part that fails or is late ends the wait with its own error, however long the others still take.

    Args:
        table: returns one line with the progress of all parts, for the error of a late one.

    Raises:
        AgentRLError: from the part's `wait_until_ready`. The caller must stop the other parts.
    """
    pending = {ref: (deadline, part) for part in parts for ref, deadline in part.starting.items()}
    while pending or any(part.readiness.may_come for part in parts):
        if not pending:
            time.sleep(POLL_S)  # ends: each of these parts has its own deadline
            continue
        deadline, late = min(
            ((deadline, ref) for ref, (deadline, _) in pending.items()), key=lambda pair: pair[0]
        )
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
    """Return how many of the calls have finished, whether they succeeded or not."""
    return len(ray.wait(list(refs), num_returns=len(refs), timeout=0, fetch_local=False)[0]) if refs else 0


def _end_wait(part: Starting, table: Callable[[], str] | None) -> None:
    """Wait for one part; add the progress of all parts to its error."""
    how_far = None if table is None else table()  # before the part stops its unready ranks
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
