"""The Ray actors around one object, which call its methods by name: around any object, or around one rank."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import ray

from agentrl.cluster import call_events
from agentrl.errors import AgentRLError
from agentrl.learner.dispatch import Join, threads_of
from agentrl.ports import ReservedPort


class ActorHost:
    """The Ray actor around one object. Synchronous: one `async def` would make it an asyncio actor.

    Ray restarts it with the same arguments, so the object is made again.
    """

    def __init__(self, make: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._make = partial(make, *args, **kwargs)
        self._lock = threading.Lock()
        self._part: Any = None
        try:
            self._part = self._make()
        except AgentRLError:
            return  # in a constructor it would lose its type: the first call tries again and raises it

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            if self._part is None:
                self._part = self._make()
        return getattr(self._part, method)(*args, **kwargs)


class WorkerHost:
    """The Ray actor around one rank. Synchronous: calls run one after another in the order in which the group
    sent them.

    Methods with a thread of their own are the exception.
    """

    def __init__(self) -> None:
        gc.disable()  # until the worker exists: loading its modules takes a fifth less time

    def find_address(self) -> tuple[str, int]:
        """Return this host's address and a free port, reserved until the next call."""
        self._meeting = ReservedPort()
        return ray.util.get_node_ip_address(), self._meeting.number

    def pid(self) -> int:
        """Return the process id of this rank."""
        return os.getpid()

    def start(self, worker: type, args: Sequence[Any], meeting: tuple[str, int], *, rank: int) -> None:
        """Create the worker. The ranks of a group meet at `meeting`, the address and port of rank 0."""
        address, port = meeting
        self._worker = worker(*args, rank=rank, address=address, port=port)
        gc.enable()

    def call(self, method: str, join: Join, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the worker.

        With join `remote`, return the number of items and the items, as two references; the group fetches
        only the first.
        """
        result = getattr(self._worker, method)(*args, **kwargs)
        return (len(result), result) if join == "remote" else result

    def call_packed(self, packed: bytes, is_wanted: bool) -> Any:
        """Call a method with arguments that all ranks share (see `pack_call`).

        is_wanted: False: return nothing, because the caller does not read this rank's result.
        """
        method, args, kwargs = ray.cloudpickle.loads(packed)
        result = getattr(self._worker, method)(*args, **kwargs)
        return result if is_wanted else None


def pack_call(method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Pickle a call that several ranks get, for `WorkerHost.call_packed`."""
    return ray.cloudpickle.dumps((method, tuple(args), dict(kwargs)))


def host_class(worker: type) -> Any:
    """Return the actor class for a worker's ranks, with one thread for each name that its methods use."""
    return ray.remote(
        num_cpus=0,
        concurrency_groups=dict.fromkeys(threads_of(worker), 1),
        enable_task_events=call_events.are_kept(),
    )(WorkerHost)  # type: ignore[call-overload]  # not in ray's stubs
