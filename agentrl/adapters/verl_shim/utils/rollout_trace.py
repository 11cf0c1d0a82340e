"""verl traces the calls of its tools; here every trajectory is recorded anyway."""

from __future__ import annotations

from typing import TypeVar

F = TypeVar("F")


def rollout_trace_op(func: F) -> F:
    """Return the function as it is."""
    return func
