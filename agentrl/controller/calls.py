"""Calls to Ray actors and into trio: every wait has a deadline, and what comes back is one of our errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import ray
import trio
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from agentrl.errors import AgentRLError, InfrastructureError

T = TypeVar("T")


def get(refs: ObjectRef | Sequence[ObjectRef], *, timeout_s: float, who: str) -> Any:
    """Wait for `refs` and return their values.

    Raises:
        AgentRLError: the one that the actor raised.
        InfrastructureError: `who` died, did not answer in time, or raised something else.
    """
    try:
        return ray.get(list(refs) if isinstance(refs, Sequence) else refs, timeout=timeout_s)
    except RayError as error:
        raise translate(error, who=who, timeout_s=timeout_s) from error


def translate(error: RayError, *, who: str, timeout_s: float | None = None) -> AgentRLError:
    """Return the error of ours that a Ray error stands for, in one line."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, AgentRLError):
        return cause
    if isinstance(error, GetTimeoutError):
        return InfrastructureError(f"{who} did not answer within {timeout_s:g} s")
    if isinstance(error, RayActorError):
        reason = _creation_cause(error)
        return reason or InfrastructureError(f"{who} died")
    return InfrastructureError(f"{who} failed: {type(cause or error).__name__}: {str(cause or error).strip().splitlines()[-1]}")


def _creation_cause(error: RayActorError) -> AgentRLError | None:
    """Return our own error when it was an actor's constructor that raised it."""
    inner: BaseException | None = error
    while inner is not None:
        cause = getattr(inner, "cause", None)
        if isinstance(cause, AgentRLError):
            return cause
        inner = cause if isinstance(cause, BaseException) else inner.__cause__
    return None


def in_trio(function: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Run `function(*args)` by trio and return its value.

    What its nurseries wrapped is unwrapped: Ctrl-C stays a KeyboardInterrupt, and an error of ours is raised as itself.
    """
    try:
        return trio.run(function, *args)
    except BaseExceptionGroup as group:
        for kind in (KeyboardInterrupt, AgentRLError):
            found = _first_leaf(group, kind)
            if found is not None:
                raise found from group
        raise


def _first_leaf(group: BaseExceptionGroup[BaseException], kind: type[BaseException]) -> BaseException | None:
    matching: BaseException | None = group.subgroup(kind)
    while isinstance(matching, BaseExceptionGroup):
        matching = matching.exceptions[0]
    return matching
