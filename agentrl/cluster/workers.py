"""The controller's view of workers: many remote ranks, or one in this process, called the same way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Concatenate, Generic, ParamSpec, TypeVar

from agentrl.learner.dispatch import dispatch_of, join_results
from agentrl.ports import ReservedPort
from agentrl.servers.startup import Readiness

if TYPE_CHECKING:  # a worker in this process needs no Ray
    from ray import ObjectRef

W = TypeVar("W")
P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Handle(ABC, Generic[R_co]):
    """A call in progress."""

    @abstractmethod
    def wait(self) -> R_co:
        """Return the result, blocking until it is ready. A second call returns it again."""


class Workers(ABC, Generic[W]):
    """Ranks of one worker class `W`, called as one object.

    `workers.run(W.method, ...)` corresponds to `worker.method(...)`.

    dp_size: number of data-parallel ranks, i.e. of equal parts that a method marked `dp` cuts a list into.
    """

    dp_size: int

    @property
    @abstractmethod
    def is_lost(self) -> bool:
        """Whether a rank died, failed or did not answer in time.

        The other ranks would wait for it forever, so none of them is usable.
        """

    @property
    @abstractmethod
    def starting(self) -> Mapping[ObjectRef, float]:
        """References of the ranks that are not known to be ready, and their deadlines (monotonic clock)."""

    @property
    @abstractmethod
    def readiness(self) -> Readiness:
        """How many of the ranks are ready; does not block, callable from any thread."""

    @abstractmethod
    def unanswered(self) -> list[str]:
        """Return one line per unfinished call: which ranks, and since when; callable from any thread.

        Only the call begun last on each thread is examined.
        """

    @abstractmethod
    def wait_until_ready(self) -> None:
        """Wait until all ranks are ready, before the first call. If the start fails, all ranks are stopped.

        Raises:
            AgentRLError: raised by a worker's constructor.
            LearnerError: the ranks did not join in time.
        """

    @abstractmethod
    def begin(
        self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> Handle[R]:
        """Start a marked method and return at once. Calls run in the order in which they were begun.

        Raises:
            TypeError: the method is not marked, or no argument can be split.
            ValueError: a list cannot be cut into equal parts.
        """

    def run(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a marked method and wait for its result.

        Raises:
            AgentRLError: raised by the method, or a rank was lost or did not answer in time.
        """
        return self.begin(method, *args, **kwargs).wait()

    @abstractmethod
    def patient(self, times: float) -> Workers[W]:
        """Return the same ranks with deadlines multiplied by `times`."""

    @abstractmethod
    def find_address(self) -> tuple[str, int]:
        """Return the address of rank 0's host and a port that is currently free there."""

    @abstractmethod
    def stop(self) -> None:
        """End all ranks."""


class LocalWorker(Workers[W]):
    """One worker in this process, for a replay, a test or a debugger: a group of one rank without Ray."""

    dp_size = 1

    def __init__(self, worker: W, *, close: Callable[[W], None] | None = None) -> None:
        self.worker = worker
        self._close = close
        self._meeting: ReservedPort | None = None

    @property
    def is_lost(self) -> bool:
        return False

    @property
    def starting(self) -> Mapping[ObjectRef, float]:
        return {}

    @property
    def readiness(self) -> Readiness:
        return Readiness("learner", 1, 1)

    def unanswered(self) -> list[str]:
        return []

    def wait_until_ready(self) -> None:
        """Return at once: the worker already exists."""

    def begin(
        self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> Handle[R]:
        join = dispatch_of(method).join
        # By name, as on a rank, so a subclass can override it.
        bound: Callable[P, R] = getattr(self.worker, method.__name__)
        return _Done(join_results([bound(*args, **kwargs)], join))

    def patient(self, times: float) -> LocalWorker[W]:
        return self

    def find_address(self) -> tuple[str, int]:
        self._meeting = ReservedPort()
        return "127.0.0.1", self._meeting.number

    def stop(self) -> None:
        if self._close is not None:
            self._close(self.worker)


class _Done(Handle[R]):
    def __init__(self, result: R) -> None:
        self._result = result

    def wait(self) -> R:
        return self._result
