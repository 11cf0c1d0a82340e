"""A group of ranks, each a Ray actor around one worker, called as one object."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, ObjectLostError, RayError, RayTaskError

from agentrl.cluster.actors import DEATHS, why_died
from agentrl.cluster.deadlines import CallDeadlines
from agentrl.cluster.host import host_class, pack_call
from agentrl.cluster.pools import Seat
from agentrl.cluster.starting import num_done
from agentrl.cluster.workers import Handle, Workers
from agentrl.errors import AgentRLError, LearnerError, RankLost
from agentrl.learner.dispatch import Dispatch, cut, dispatch_of, join_results
from agentrl.servers.startup import Readiness

W = TypeVar("W")
P = ParamSpec("P")
R = TypeVar("R")

FETCH_TIMEOUT_S = 600.0
"""For a result that is ready on another machine: transferring a large batch may take long, but must end."""
_GRACE_S = 5.0
"""Seconds to wait for the report of a dead rank.

Its death breaks the collectives of the others, which may report their errors first.
"""


class RemoteResults(Sequence[R]):
    """Items that stay on the ranks that computed them.

    A group passes the references on unread. Reading one item fetches all of them.
    """

    def __init__(self, parts: Sequence[ObjectRef], sizes: Sequence[int]) -> None:
        self.parts = tuple(parts)
        self.sizes = tuple(sizes)

    def __len__(self) -> int:
        return sum(self.sizes)

    @overload
    def __getitem__(self, index: int) -> R: ...
    @overload
    def __getitem__(self, index: slice) -> list[R]: ...
    def __getitem__(self, index: int | slice) -> R | list[R]:
        return list(self)[index]

    def __iter__(self) -> Iterator[R]:
        return chain.from_iterable(ray.get(list(self.parts), timeout=FETCH_TIMEOUT_S))


@dataclass(frozen=True, slots=True)
class _Start:
    """Workers that are being created.

    meeting: address where they will meet. ranks: done when the rank's worker is ready. deadline: on the
    monotonic clock.
    """

    meeting: ObjectRef
    ranks: Mapping[int, ObjectRef]
    deadline: float

    @property
    def left_s(self) -> float:
        return max(0.0, self.deadline - time.monotonic())


class WorkerGroup(Workers[W]):
    """All ranks of one role. Rank r is a replica of data-parallel rank r // num_replicas.

    Every method raises LearnerError if a rank is lost, fails or does not answer in time. The group is
    unusable afterwards.
    """

    def __init__(
        self, hosts: Sequence[ActorHandle], *, name: str, deadlines: CallDeadlines, num_replicas: int = 1
    ) -> None:
        assert len(hosts) % num_replicas == 0, (
            f"{len(hosts)} ranks are not a multiple of {num_replicas} replicas"
        )
        self.dp_size = len(hosts) // num_replicas
        self._hosts = tuple(hosts)
        self._num_replicas = num_replicas
        self._name = name
        self._deadlines = deadlines
        self._start: _Start | None = None
        self._is_lost = threading.Event()
        self._last_calls: dict[str | None, _Call[Any]] = {}
        """For each thread of the ranks, the call that the next one waits for."""

    @classmethod
    def launch(
        cls,
        worker: Callable[..., W],
        *args: Any,
        seats: Sequence[Seat],
        name: str = "learner",
        deadlines: CallDeadlines,
        num_replicas: int = 1,
    ) -> WorkerGroup[W]:
        """Start a rank per seat and create `worker(*args, rank=, address=, port=)` on each, without waiting.

        `wait_until_ready` waits for them.

        Args:
            name: of the ranks in errors: `learner rank 1 was lost ...`.
        """
        assert isinstance(worker, type), "a worker is a class"
        host = host_class(worker)
        hosts: list[Any] = [host.options(**seat.ray_options()).remote() for seat in seats]
        group = cls(hosts, name=name, deadlines=deadlines, num_replicas=num_replicas)
        meeting = hosts[0].find_address.remote()
        # `meeting` is a reference: Ray passes rank 0's address on to the others without the driver waiting
        # for it.
        starts = {
            rank: host.start.remote(worker, args, meeting, rank=rank) for rank, host in enumerate(hosts)
        }
        group._start = _Start(meeting, starts, time.monotonic() + deadlines.start_s)
        return group

    @classmethod
    def start(
        cls,
        worker: Callable[..., W],
        *args: Any,
        seats: Sequence[Seat],
        name: str = "learner",
        deadlines: CallDeadlines,
        num_replicas: int = 1,
    ) -> WorkerGroup[W]:
        """Launch a group (see `launch`) and wait until all ranks are ready.

        Raises:
            AgentRLError: raised by a worker.
            LearnerError: the ranks did not join in time.
        """
        group = cls.launch(
            worker, *args, seats=seats, name=name, deadlines=deadlines, num_replicas=num_replicas
        )
        group.wait_until_ready()
        return group

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process, which calls the same ranks; only one process may call them at a time."""
        make = partial(
            WorkerGroup, name=self._name, deadlines=self._deadlines, num_replicas=self._num_replicas
        )
        return make, (self._hosts,)

    @property
    def is_lost(self) -> bool:
        return self._is_lost.is_set()

    @property
    def starting(self) -> Mapping[ObjectRef, float]:
        return {} if self._start is None else dict.fromkeys(self._start.ranks.values(), self._start.deadline)

    @property
    def readiness(self) -> Readiness:
        num_ranks, start = len(self._hosts), self._start
        return Readiness(
            self._name, num_ranks if start is None else num_done(start.ranks.values()), num_ranks
        )

    def unanswered(self) -> list[str]:
        # A copy, because another thread may begin a call meanwhile.
        calls = [(call, call.ranks_under_way()) for call in list(self._last_calls.values())]
        return [
            f"{self._name} rank {', '.join(map(str, ranks))} of {len(self._hosts)} has been running "
            f"{call.what!r} for {call.age_s:.0f} s"
            for call, ranks in calls
            if ranks
        ]

    def wait_until_ready(self) -> None:
        if self._start is None:
            return
        start, self._start = self._start, None
        try:
            # Wait for the address first. All ranks need it, and if it fails, the error must name rank 0 and
            # not another rank that fails for lack of it.
            self._get("find_address", {0: start.meeting}, start.left_s)
            self._get("start", start.ranks, start.left_s, self._deadlines.start_limit)
        except AgentRLError:
            self.stop()
            raise

    def begin(
        self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> Handle[R]:
        how, what = dispatch_of(method), method.__name__
        options: dict[str, Any] = {
            "name": method.__qualname__,
            "num_returns": 1 if how.join != "remote" else 2,
        }
        if how.thread is not None:
            options["concurrency_group"] = how.thread
        refs: dict[int, Any] = {}
        num_items = 0
        if how.split == "dp":
            per_rank, num_items = self._split(what, args)
            for rank, own in per_rank.items():
                refs[rank] = self._hosts[rank].call.options(**options).remote(what, how.join, *own, **kwargs)
        else:
            # Pickled once, not once per rank.
            packed = pack_call(what, args, kwargs)
            for rank in range(len(self._hosts) if how.split == "all" else 1):
                is_wanted = rank == 0 or how.join != "first"
                refs[rank] = self._hosts[rank].call_packed.options(**options).remote(packed, is_wanted)
        call: _Call[Any] = _Call(self, what, how, refs, self._deadline(how, num_items))
        self._last_calls[how.thread] = call
        return call

    def patient(self, times: float) -> WorkerGroup[W]:
        deadlines = replace(self._deadlines, times=times)
        group: WorkerGroup[W] = WorkerGroup(
            self._hosts, name=self._name, deadlines=deadlines, num_replicas=self._num_replicas
        )
        # Shared, because calls of both objects queue up on the same ranks.
        group._is_lost, group._last_calls = self._is_lost, self._last_calls
        return group

    def find_address(self) -> tuple[str, int]:
        ref: ObjectRef = self._hosts[0].find_address.remote()
        address: tuple[str, int] = self._get("find_address", {0: ref}, self._deadlines.deadline_s(0))[0]
        return address

    def pids(self) -> list[int]:
        """Return the process id of each rank."""
        refs = {rank: host.pid.remote() for rank, host in enumerate(self._hosts)}
        return list(self._get("pid", refs, self._deadlines.deadline_s(0)).values())

    def stop(self) -> None:
        """Kill all ranks immediately."""
        for host in self._hosts:
            ray.kill(host)

    # ------------------------------------------------------------------------------------------------ private

    def _deadline(self, how: Dispatch, num_items: int) -> float:
        """Return when a call begun now must be over (monotonic clock).

        Calls on one thread run in order, so this one may start as late as the previous call's deadline.
        """
        before = self._last_calls.get(how.thread)
        begins = (
            time.monotonic() if before is None or before.is_over else max(time.monotonic(), before.deadline)
        )
        return begins + self._deadlines.of(how).deadline_s(num_items)

    def _split(self, what: str, args: Sequence[Any]) -> tuple[dict[int, list[Any]], int]:
        """Return the arguments of each rank for a call that is split by data, and how many items a rank
        gets.
        """
        columns = [self._cut(argument, what) for argument in args]
        num_items = sum(size for _, size in columns)
        if not any(isinstance(argument, (list, RemoteResults)) for argument in args):
            raise TypeError(
                f"{what}: there is no list among the positional arguments to split over the ranks"
            )
        dp_rank = {rank: rank // self._num_replicas for rank in range(len(self._hosts))}
        return {rank: [column[index] for column, _ in columns] for rank, index in dp_rank.items()}, num_items

    def _cut(self, argument: Any, what: str) -> tuple[list[Any], int]:
        """Return each data-parallel rank's part of one argument, and the number of items in a part."""
        if isinstance(argument, RemoteResults):
            assert len(argument.parts) == self.dp_size, (
                f"{what}: the argument is kept by {len(argument.parts)} ranks, but this group has "
                f"{self.dp_size}"
            )
            return list(argument.parts), max(argument.sizes)
        if isinstance(argument, list):
            parts = cut(argument, self.dp_size, what=what)
            return [ray.put(part) for part in parts], len(parts[0])  # stored once for all replicas
        return [argument] * self.dp_size, 0

    def _is_counted(self, rank: int, how: Dispatch) -> bool:
        """Return whether a rank's result is part of the joined one. Of replicas, only the first one's is."""
        return how.split != "dp" or rank % self._num_replicas == 0

    def _get(
        self, what: str, refs: Mapping[int, ObjectRef], timeout_s: float, limit: str | None = None
    ) -> dict[int, Any]:
        """Wait for one reference per rank and return their values by rank; the first failure ends the wait.

        limit: origin of `timeout_s`, for the error.
        """
        try:
            # One call for all ranks: Ray raises as soon as one of the references is an error.
            values = ray.get(list(refs.values()), timeout=timeout_s)
        except GetTimeoutError:
            pending = _not_done(refs)
            if pending:
                ranks = ", ".join(map(str, pending))
                raise self._failed(
                    f"rank {ranks} did not finish {what!r} in time ({limit or self._deadlines.limit})"
                ) from None
            values = self._fetch(list(refs.values()), what)  # all are done; only the transfer is slow
        except RayError:
            self._raise_failure(what, refs)
            raise
        return dict(zip(refs, values, strict=True))

    def _raise_failure(self, what: str, refs: Mapping[int, ObjectRef]) -> None:
        """Raise the error of the ranks that have failed: a death, the user's mistake, else the first one."""
        pending = _not_done(refs)
        failed: dict[int, RayTaskError] = {}
        for rank in sorted(refs.keys() - pending.keys()):
            try:
                self._fetch([refs[rank]], what)
            except (*DEATHS, ObjectLostError) as error:
                raise self._lost(rank, what, error) from error
            except RayTaskError as error:
                failed[rank] = error
        for first in failed.values():
            # An error of the user's config or plugins is the cause by itself. A LearnerError may only be the
            # consequence of another rank's death.
            if isinstance(first.cause, AgentRLError) and not isinstance(first.cause, LearnerError):
                raise first.cause from None
        self._raise_if_lost(what, pending)
        for rank, first in failed.items():
            raise self._failed(f"rank {rank} failed in {what!r}: {first.cause!r}") from first

    def _raise_if_lost(self, what: str, pending: Mapping[int, ObjectRef]) -> None:
        """Raise RankLost if a pending rank is dead: the error of the first rank may only be a consequence."""
        if pending:
            ray.wait(list(pending.values()), num_returns=len(pending), timeout=_GRACE_S)
        for rank in sorted(pending.keys() - _not_done(pending).keys()):
            try:
                self._fetch([pending[rank]], what)
            except (*DEATHS, ObjectLostError) as error:
                raise self._lost(rank, what, error) from error
            except RayTaskError:
                # a failure, but not a death
                continue

    def _fetch(self, refs: Sequence[ObjectRef], what: str) -> list[Any]:
        """Return results that are known to be ready; only the transfer can take time."""
        try:
            return ray.get(list(refs), timeout=FETCH_TIMEOUT_S)
        except GetTimeoutError as error:
            raise self._failed(f"results of {what!r} did not arrive within {FETCH_TIMEOUT_S:g} s") from error

    def _lost(self, rank: int, what: str, error: RayError) -> RankLost:
        self._is_lost.set()
        return RankLost(f"{self._name} rank {rank} was lost during {what!r}{why_died(error)}")

    def _failed(self, why: str) -> LearnerError:
        self._is_lost.set()
        return LearnerError(f"{self._name} {why}")


class _Call(Handle[R], Generic[R]):
    """A call in progress on the ranks.

    refs: one reference per called rank; with join `remote` a pair of references (number of items, items).
    """

    def __init__(
        self, group: WorkerGroup[Any], what: str, how: Dispatch, refs: Mapping[int, Any], deadline: float
    ) -> None:
        self._group, self.what, self._how, self._refs = group, what, how, refs
        self.deadline = deadline
        self._begun = time.monotonic()
        self._result: list[R] = []

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._begun

    def ranks_under_way(self) -> list[int]:
        """Return the ranks that have not finished the call, including those that have not started it."""
        return list(_not_done({rank: self._of_result(ref) for rank, ref in self._refs.items()}))

    def _of_result(self, ref: Any) -> ObjectRef:
        """Return the reference that is ready when the rank has finished the call."""
        return ref[0] if self._how.join == "remote" else ref

    @property
    def is_over(self) -> bool:
        """Whether the call was waited for and succeeded."""
        return bool(self._result)

    def wait(self) -> R:
        if not self._result:
            is_remote = self._how.join == "remote"
            waited = {rank: self._of_result(ref) for rank, ref in self._refs.items()}
            limit = self._group._deadlines.of(self._how).limit
            of_rank = self._group._get(self.what, waited, max(0.0, self.deadline - time.monotonic()), limit)
            counted = [rank for rank in self._refs if self._group._is_counted(rank, self._how)]
            values = [of_rank[rank] for rank in counted]
            joined: Any = (
                RemoteResults([self._refs[rank][1] for rank in counted], values)
                if is_remote
                else join_results(values, self._how.join)
            )
            self._result.append(joined)
        return self._result[0]


def _not_done(refs: Mapping[int, ObjectRef]) -> dict[int, ObjectRef]:
    """Return the references whose calls have not ended, by rank."""
    # fetch_local=False: only ask whether results exist; large ones may stay on their node.
    done, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=0, fetch_local=False)
    ended = set(done)
    return {rank: ref for rank, ref in refs.items() if ref not in ended}
