"""Calls to Ray actors and into trio: every wait has a deadline, and every error is an AgentRLError."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from agentrl.errors import AgentRLError, InfrastructureError
from agentrl.rollout.trio_run import in_trio as in_trio


def get(refs: ObjectRef | Sequence[ObjectRef], *, timeout_s: float, who: str) -> Any:
    """Wait for `refs` and return their values.

    Raises:
        AgentRLError: as the actor raised it.
        InfrastructureError: `who` died, did not answer in time, or raised something else.
    """
    try:
        return ray.get(list(refs) if isinstance(refs, Sequence) else refs, timeout=timeout_s)
    except RayError as error:
        raise translate(error, who=who, timeout_s=timeout_s) from error


def translate(error: RayError, *, who: str, timeout_s: float | None = None) -> AgentRLError:
    """Return the AgentRLError for a Ray error: the one that the actor raised, else an InfrastructureError."""
    cause = getattr(error, "cause", None)
    if (ours := _ours(cause)) is not None:
        return ours
    if isinstance(error, GetTimeoutError):
        return InfrastructureError(f"{who} did not answer within {timeout_s:g} s")
    if isinstance(error, RayActorError):
        return _creation_cause(error, who) or InfrastructureError(f"{who} died")
    return InfrastructureError(f"{who} failed: {type(cause or error).__name__}: {str(cause or error).strip().splitlines()[-1]}")


def _ours(cause: object) -> AgentRLError | None:
    """Return the AgentRLError that a task raised, also one in an exception group of a nursery, or None."""
    if isinstance(cause, BaseExceptionGroup):
        return next((ours for inner in cause.exceptions if (ours := _ours(inner)) is not None), None)
    return cause if isinstance(cause, AgentRLError) else None


def _creation_cause(error: RayActorError, who: str) -> AgentRLError | None:
    """Return the error that an actor's constructor raised, or None.

    A foreign one is an InfrastructureError.
    """
    inner: BaseException | None = error
    while inner is not None:
        cause = getattr(inner, "cause", None)
        if isinstance(cause, AgentRLError):
            return cause
        inner = cause if isinstance(cause, BaseException) else inner.__cause__
    if "creation task" in str(error):  # Ray keeps only the text of a foreign error
        return InfrastructureError(f"{who} could not be made: {str(error).strip().splitlines()[-1].strip()}")
    return None
