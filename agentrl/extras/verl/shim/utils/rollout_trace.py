"""verl's tracing decorator for tools. It does nothing: every attempt is recorded anyway."""

from __future__ import annotations

from typing import TypeVar

F = TypeVar("F")


def rollout_trace_op(func: F) -> F:
    """Return the function unchanged."""
    return func
