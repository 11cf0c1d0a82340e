"""`Actor`: an object in a Ray process of its own, called by the methods of its class.

`actor.run(ReplayBuffer.take, 8, 5.0)` corresponds to `buffer.take(8, 5.0)`. Every wait has a deadline, and
every error is an AgentRLError. The object itself is a plain class, which knows nothing of Ray.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import ray
import trio
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayError
from trio.lowlevel import RunVar

from agentrl.cluster import call_events
from agentrl.cluster.host import ActorHost
from agentrl.errors import ActorDied, AgentRLError, InfrastructureError

W = TypeVar("W")
W_co = TypeVar("W_co", covariant=True)
P = ParamSpec("P")
R = TypeVar("R")

PAUSE_S = 1.0
"""Between two tries of a call."""
DEATHS = (RayActorError, OutOfMemoryError)
"""How Ray reports the death of an actor's process."""
MAX_ASYNC_CALLS = 4
"""Calls in flight per event loop; each holds a thread."""

_threads: RunVar[trio.CapacityLimiter] = RunVar("threads that wait for actors")


@dataclass(frozen=True, slots=True)
class ActorKind:
    """How Ray runs one kind of object, and how its callers name it.

    title: name of the process in `ps` and in Ray's tools.
    who: name in error messages.
    timeout_s: of a call.
    num_threads: number of calls that can run at the same time.
    long_polls: threads of the methods that wait long, by method. In their own pools they cannot starve the
        calls that wake them up.
    """

    title: str
    who: str
    timeout_s: float
    num_threads: int
    long_polls: Mapping[str, int] = field(default_factory=dict)

    def launch(
        self, options: Mapping[str, Any], make: Callable[P, W], /, *args: P.args, **kwargs: P.kwargs
    ) -> Actor[W]:
        """Start a process that makes its object by `make(*args, **kwargs)`, without waiting for it.

        An AgentRLError of `make` is raised by the calls.

        Args:
            options: of Ray's `actor.options(...)`.
        """
        host = type(self.title, (ActorHost,), {})  # Ray names the process after the class
        remote: Any = ray.remote(
            num_cpus=0,
            max_concurrency=self.num_threads,
            concurrency_groups=dict(self.long_polls),
            enable_task_events=call_events.are_kept(),
        )(host)  # type: ignore[call-overload]  # not in ray's stubs
        return Actor(remote.options(**options).remote(make, *args, **kwargs), self)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Which errors a caller waits out: those of `errors` are retried for `for_s` seconds since the first.

    The methods must be idempotent. say: called with the first error of a call.
    """

    errors: tuple[type[AgentRLError], ...] = ()
    for_s: float = 0.0
    say: Callable[[str], None] | None = None


@dataclass(frozen=True, slots=True)
class Actor(Generic[W_co]):
    """An object of class `W_co` in a process of its own.

    Can be sent to other processes; there, its retries are silent.
    """

    handle: ActorHandle
    kind: ActorKind
    retry: RetryPolicy = RetryPolicy()

    def __reduce__(self) -> tuple[Any, ...]:
        return Actor, (self.handle, self.kind, replace(self.retry, say=None))

    def within(self, timeout_s: float) -> Actor[W_co]:
        """Return the same actor with another timeout of its calls."""
        return replace(self, kind=replace(self.kind, timeout_s=timeout_s))

    def retrying(self, retry: RetryPolicy) -> Actor[W_co]:
        """Return the same actor with calls that are retried."""
        return replace(self, retry=retry)

    def begin(
        self, method: Callable[Concatenate[W_co, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> ObjectRef:
        """Start a call and return the reference to its result (an R)."""
        name = method.__name__
        options = {"name": f"{self.kind.title}.{name}"} | (
            {"concurrency_group": name} if name in self.kind.long_polls else {}
        )
        ref: ObjectRef = self.handle.call.options(**options).remote(name, *args, **kwargs)
        return ref

    def run(self, method: Callable[Concatenate[W_co, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a method and wait for its result.

        Raises:
            AgentRLError: as the method raised it.
            InfrastructureError: the actor died, did not answer in time, or raised something else.
        """
        tries = Tries(self.retry)
        while True:
            try:
                return self._ask(method, *args, **kwargs)
            except self.retry.errors as error:
                time.sleep(tries.pause_s(error))

    async def run_async(
        self, method: Callable[Concatenate[W_co, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Do the same as `run` under trio. A cancelled call is abandoned; it may still take effect."""
        tries = Tries(self.retry)
        ask = partial(self._ask, method, *args, **kwargs)
        while True:
            try:
                return await trio.to_thread.run_sync(ask, abandon_on_cancel=True, limiter=_limiter())
            except self.retry.errors as error:
                await trio.sleep(tries.pause_s(error))

    def _ask(self, method: Callable[Concatenate[W_co, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = get(self.begin(method, *args, **kwargs), timeout_s=self.kind.timeout_s, who=self.kind.who)
        return result

    def kill(self) -> None:
        """End the process at once; Ray does not restart it."""
        ray.kill(self.handle)


class Tries:
    """The tries of one call."""

    def __init__(self, retry: RetryPolicy) -> None:
        self._retry = retry
        self._since: float | None = None

    def pause_s(self, error: AgentRLError) -> float:
        """Return the seconds until the next try; raise `error` if the time is over."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
            if self._retry.say is not None:
                self._retry.say(f"{error} (waiting for up to {self._retry.for_s:g} s)")
        if now - self._since > self._retry.for_s:
            raise error
        return PAUSE_S


def _limiter() -> trio.CapacityLimiter:
    try:
        return _threads.get()
    except LookupError:
        _threads.set(trio.CapacityLimiter(MAX_ASYNC_CALLS))
        return _threads.get()


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


def get_each(refs: Sequence[ObjectRef], *, timeout_s: float, who: Sequence[str]) -> list[Any]:
    """Wait for calls to many actors together, `timeout_s` in all, and return their values in order.

    None for an actor that died or did not answer, so that one that hangs costs one deadline and hides nobody.

    Raises:
        AgentRLError: as an actor raised it.
    """
    done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s) if refs else ([], [])
    ready, values = set(done), []
    for ref, name in zip(refs, who, strict=True):
        try:
            values.append(get(ref, timeout_s=timeout_s, who=name) if ref in ready else None)
        except InfrastructureError:
            values.append(None)
    return values


def translate(error: RayError, *, who: str, timeout_s: float | None = None) -> AgentRLError:
    """Return the AgentRLError for a Ray error: the one that the actor raised, else an InfrastructureError."""
    cause = getattr(error, "cause", None)
    if (ours := _ours(cause)) is not None:
        return ours
    if isinstance(error, GetTimeoutError):
        return InfrastructureError(f"{who} did not answer within {timeout_s:g} s")
    if isinstance(error, DEATHS):
        return _creation_cause(error, who) or ActorDied(f"{who} died{why_died(error)}")
    return InfrastructureError(
        f"{who} failed: {type(cause or error).__name__}: {str(cause or error).strip().splitlines()[-1]}"
    )


def why_died(error: RayError) -> str:
    """Return `: ...` with the memory of the node if Ray killed the process because it ran short, else ``."""
    if not isinstance(error, OutOfMemoryError):
        return ""
    used = re.search(r"was (\S+) used / (\S+) limit", str(error))
    return ": Ray killed it because the node ran out of memory" + (
        f" ({used[1]} of {used[2]} in use)" if used else ""
    )


def _ours(cause: object) -> AgentRLError | None:
    """Return the AgentRLError that a task raised, also one in an exception group of a nursery, or None."""
    if isinstance(cause, BaseExceptionGroup):
        return next((ours for inner in cause.exceptions if (ours := _ours(inner)) is not None), None)
    return cause if isinstance(cause, AgentRLError) else None


def _creation_cause(error: RayError, who: str) -> AgentRLError | None:
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
        return InfrastructureError(
            f"{who} could not be created: {str(error).strip().splitlines()[-1].strip()}"
        )
    return None
