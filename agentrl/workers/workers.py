"""What the controller holds of workers: many ranks elsewhere, or one in this process, called the same way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Concatenate, Generic, ParamSpec, TypeVar

from ray import ObjectRef

from agentrl.ports import ReservedPort
from agentrl.workers.dispatch import dispatch_of, join_results
from agentrl.workers.starting import Readiness

W = TypeVar("W")
P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Handle(ABC, Generic[R_co]):
    """A call under way."""

    @abstractmethod
    def wait(self) -> R_co:
        """Return the result; a second call returns it again."""


class Workers(ABC, Generic[W]):
    """Ranks of one worker class `W`, called as if they were one object: `workers.run(W.method, ...)` is `worker.method(...)`.

    dp_size: data-parallel ranks: so many equal parts a list is cut into by a method marked `dp`.
    """

    dp_size: int

    @property
    @abstractmethod
    def is_lost(self) -> bool:
        """Whether a rank died, failed or did not answer in time: the others wait for it in vain, and all of them are of no use."""

    @property
    @abstractmethod
    def starting(self) -> Mapping[ObjectRef, float]:
        """The ranks that are not known to stand, and until when they have to (of the monotonic clock)."""

    @property
    @abstractmethod
    def readiness(self) -> Readiness:
        """How many ranks stand, of how many; returns at once, in any thread."""

    @abstractmethod
    def unanswered(self) -> list[str]:
        """Say in a line each which ranks have not ended the calls that were begun last, and since when; in any thread."""

    @abstractmethod
    def wait_until_ready(self) -> None:
        """Wait until all ranks stand, before the first call; those of a group that does not come up are ended.

        Raises:
            AgentRLError: what a worker raised as it was made.
            LearnerError: the ranks did not come together.
        """

    @abstractmethod
    def begin(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        """Start a marked method and return at once; calls run in the order in which they were begun.

        Raises:
            TypeError: the method is not marked, or no argument can be split.
            ValueError: a list cannot be cut into equal parts.
        """

    def run(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a marked method and wait for its result.

        Raises:
            AgentRLError: what the method raised, or a rank was lost or did not answer in time.
        """
        return self.begin(method, *args, **kwargs).wait()

    @abstractmethod
    def patient(self, times: float) -> Workers[W]:
        """Return the same ranks with deadlines `times` as long."""

    @abstractmethod
    def find_address(self) -> tuple[str, int]:
        """Return the address of rank 0's host and a port that is free there at this moment."""

    @abstractmethod
    def stop(self) -> None:
        """End all ranks."""


class LocalWorker(Workers[W]):
    """One worker in this process, for a replay, a test or a debugger: what a group of one rank does, without Ray."""

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
        """Return at once: the worker was made before."""

    def begin(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        join = dispatch_of(method).join
        bound: Callable[P, R] = getattr(self.worker, method.__name__)  # by name, as on a rank: a subclass may have its own
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
