"""Parts of a run that come up side by side: launched one after the other at once, then waited for together."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import ray
from ray import ObjectRef
from ray.exceptions import RayError


class Starting(Protocol):
    """A part that was launched and may not stand yet."""

    @property
    def starting(self) -> Mapping[ObjectRef, float]:
        """What is still waited for, and until when (of the monotonic clock)."""

    def wait_until_ready(self) -> None:
        """Wait until it stands; raise the part's own error when it does not."""


def wait_until_all_ready(parts: Sequence[Starting]) -> None:
    """Wait until all parts stand. The first that fails, or is late, ends the wait with its own error, however long others still take.

    Raises:
        AgentRLError: what the part's `wait_until_ready` raises. Stopping the others is the caller's.
    """
    pending = {ref: (deadline, part) for part in parts for ref, deadline in part.starting.items()}
    while pending:
        deadline, late = min(((deadline, ref) for ref, (deadline, _) in pending.items()), key=lambda pair: pair[0])
        done, _ = ray.wait(list(pending), timeout=max(0.0, deadline - time.monotonic()), fetch_local=False)
        ref = done[0] if done else late
        _, part = pending.pop(ref)
        if not done or _has_failed(ref):
            part.wait_until_ready()
    for part in parts:
        part.wait_until_ready()


def _has_failed(ref: ObjectRef) -> bool:
    try:
        ray.get(ref)
    except RayError:
        return True
    return False
