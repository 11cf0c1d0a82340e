"""The worker process of slow rewards, started by WorkerPool.

It reads requests from standard input and writes replies to standard output: pickles, each after its length. A
reward's prints go to standard error. The process exits when its input ends, which also happens if its owner
dies. A reward that hangs in Python code does not prevent that.
"""

from __future__ import annotations

import math
import os
import pickle
import queue
import resource
import signal
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

from agentrl.plugins import AnyReward, Reward
from agentrl.plugins.blame import failure_of
from agentrl.plugins.contained import contained
from agentrl.rewards.recipes import Recipe
from agentrl.types import Failure, Task

HEADER = struct.Struct("!Q")
MAX_ANSWER_BYTES = 2**30
"""Additional memory for scoring one answer, if the reward limits its answers."""


@dataclass(frozen=True, slots=True)
class MakeRequest:
    """Create the reward that later requests refer to as `key`."""

    key: int
    recipe: Recipe


@dataclass(frozen=True, slots=True)
class RehearseRequest:
    """Rehearse the reward `key` on a task: a failure here is not the fault of any answer."""

    key: int
    task: Task


@dataclass(frozen=True, slots=True)
class RewardRequest:
    """Score `subject` (one attempt or several) with the reward `key`."""

    key: int
    subject: Any


Request = MakeRequest | RehearseRequest | RewardRequest


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of `score`, or why it failed."""

    value: Any = None
    failure: Failure | None = None


def frame(message: object) -> bytes:
    """Return a pickled message, preceded by its length."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(data)) + data


def main() -> None:
    """Answer requests in their order until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches this process; its owner handles it
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # to stderr: a reward's prints must not mix with the replies
    requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin.buffer, requests), daemon=True).start()
    rewards: dict[int, AnyReward] = {}
    while True:
        reply = _answer(requests.get(), rewards)
        try:
            data = frame(reply)
        except Exception as error:  # noqa: BLE001 - boundary: pickling runs methods of the user's objects
            data = frame(
                Reply(failure=Failure(f"its result cannot be pickled: {error}", error=type(error).__name__))
            )
        out.write(data)
        out.flush()


def _answer(request: Request, rewards: dict[int, AnyReward]) -> Reply:
    try:
        with contained():
            if isinstance(request, MakeRequest):
                rewards[request.key] = request.recipe.make()
                return Reply()
            reward = rewards[request.key]
            if isinstance(request, RehearseRequest):
                assert isinstance(reward, Reward), reward
                reward.rehearse(request.task)
                return Reply()
            with _limits(reward.max_answer_cpu_s):
                return Reply(reward.score(request.subject))
    except Exception as error:  # noqa: BLE001 - boundary of one score: a reward raised
        return Reply(failure=failure_of(error))


@contextmanager
def _limits(max_cpu_s: int | None) -> Iterator[None]:
    """Limit this process: the kernel kills it with SIGXCPU after `max_cpu_s` more CPU seconds, and it may use
    MAX_ANSWER_BYTES more.

    Nothing is limited if `max_cpu_s` is None.
    """
    if max_cpu_s is None:
        yield
        return
    soft_limits = [
        (resource.RLIMIT_CPU, math.ceil(time.process_time()) + max_cpu_s),
        (resource.RLIMIT_AS, _address_space_bytes() + MAX_ANSWER_BYTES),
    ]
    before = [(kind, resource.getrlimit(kind)) for kind, _ in soft_limits]
    try:
        for kind, limit in soft_limits:
            _, hard = resource.getrlimit(kind)
            resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
        yield
    finally:
        for kind, limits in before:
            resource.setrlimit(kind, limits)


def _address_space_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _read(source: BinaryIO, requests: queue.SimpleQueue[Request]) -> None:
    while len(header := source.read(HEADER.size)) == HEADER.size:
        requests.put(pickle.loads(source.read(HEADER.unpack(header)[0])))
    os._exit(0)  # the main thread may be inside a reward
