"""An object in a Ray process is called as itself: its values, its errors with their types, its restarts, its
deadlines.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
import trio

from agentrl.cluster.actors import Actor, ActorKind, RetryPolicy, get_each
from agentrl.errors import ConfigError, InfrastructureError, JournalError
from parts.local_ray import local_ray

KIND = ActorKind("ShelfActor", "the shelf", timeout_s=60.0, num_threads=2, long_polls={"wait": 3})


class Shelf:
    """An object with a file that survives it."""

    def __init__(self, folder: Path, *, refuses: bool = False) -> None:
        if refuses:
            raise ConfigError("no shelf for you")
        self.folder = folder
        self.is_open = threading.Event()
        (folder / f"made-{os.getpid()}").touch()

    def pid(self) -> int:
        return os.getpid()

    def label(self, name: str, *, number: int = 0) -> str:
        return f"{name} {number}"

    def wait(self, timeout_s: float) -> bool:
        return self.is_open.wait(timeout_s)

    def open(self) -> None:
        self.is_open.set()

    def fill(self, times: int) -> int:
        """Be full for the first calls."""
        tries = len(list(self.folder.glob("try-*")))
        (self.folder / f"try-{tries}").touch()
        if tries < times:
            raise JournalError("the shelf is full")
        return tries

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def break_down(self) -> None:
        raise ZeroDivisionError("a bug")


class Unmakable:
    def __init__(self) -> None:
        raise AttributeError("nothing is so called")

    def wait(self) -> None: ...


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with local_ray(__name__):
        yield


def launch(folder: Path, **options) -> Actor[Shelf]:
    return KIND.launch(options, Shelf, folder)


def test_a_call_returns_the_methods_value_from_plain_code_and_from_trio(tmp_path):
    shelf = launch(tmp_path)
    assert shelf.run(Shelf.label, "oak", number=2) == "oak 2"
    assert trio.run(shelf.run_async, Shelf.label, "elm") == "elm 0"
    titles = [p.cmdline()[0] for p in psutil.Process().children(recursive=True) if p.cmdline()]
    assert [title for title in titles if "Shelf" in title] == ["ray::ShelfActor"], (
        "operators find processes by this name"
    )
    shelf.kill()


def test_long_polls_do_not_starve_the_call_that_ends_them(tmp_path):
    shelf = launch(tmp_path)
    polls = [shelf.begin(Shelf.wait, 50.0) for _ in range(3)]
    shelf.run(Shelf.open)
    assert ray.get(polls, timeout=60) == [True] * 3
    shelf.kill()


def test_errors_keep_their_type_and_foreign_ones_name_the_actor(tmp_path):
    shelf = launch(tmp_path)
    process = psutil.Process(shelf.run(Shelf.pid))
    with pytest.raises(JournalError, match="full"):
        shelf.run(Shelf.fill, 1)
    with pytest.raises(InfrastructureError, match=r"the shelf failed: ZeroDivisionError: a bug"):
        shelf.run(Shelf.break_down)
    with pytest.raises(InfrastructureError, match=r"the shelf did not answer within 0\.1 s"):
        shelf.within(0.1).run(Shelf.sleep, 1.0)
    shelf.kill()
    process.wait(timeout=60)
    with pytest.raises(InfrastructureError, match="the shelf died"):
        shelf.run(Shelf.pid)


def test_what_a_constructor_raised_is_told(tmp_path):
    with pytest.raises(ConfigError, match="no shelf for you"):
        KIND.launch({}, Shelf, tmp_path, refuses=True).run(Shelf.pid)
    with pytest.raises(InfrastructureError, match=r"the shelf could not be created: .*nothing is so called"):
        KIND.launch({}, Unmakable).run(Unmakable.wait)


def test_of_many_actors_those_that_hang_cost_one_deadline_and_hide_nobody(tmp_path):
    one, dead = launch(tmp_path), launch(tmp_path)
    dead.run(Shelf.pid)
    answers = [one.begin(Shelf.label, name) for name in "ab"]
    ray.get(answers, timeout=60)
    gone = dead.begin(
        Shelf.wait, 60.0
    )  # begun before the kill: an actor may still answer what reaches it after
    dead.kill()
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(gone, timeout=30)
    hanging = [one.begin(Shelf.wait, 60.0) for _ in range(20)]
    refs = [answers[0], *hanging, gone, answers[1]]
    start = time.monotonic()
    found = get_each(refs, timeout_s=3.0, who=[f"actor {i}" for i in range(len(refs))])
    assert found == ["a 0", *[None] * 21, "b 0"]
    assert time.monotonic() - start < 20 * 3.0, "not a deadline for each"
    refused = KIND.launch({}, Shelf, tmp_path, refuses=True)
    with pytest.raises(ConfigError, match="no shelf for you"):
        get_each([refused.begin(Shelf.pid)], timeout_s=60.0, who=["it"])
    assert get_each([], timeout_s=1.0, who=[]) == []
    one.run(Shelf.open)


def test_a_killed_actor_is_made_again_and_calls_in_flight_are_repeated(tmp_path):
    shelf = launch(tmp_path, max_restarts=-1, max_task_retries=-1)
    first = shelf.run(Shelf.pid)
    waiting = shelf.begin(Shelf.wait, 5.0)
    os.kill(first, signal.SIGKILL)
    assert shelf.run(Shelf.pid) != first
    assert ray.get(waiting, timeout=60) is False
    assert len(list(tmp_path.glob("made-*"))) == 2
    shelf.kill()


def test_a_retried_error_is_waited_out_and_said_once(tmp_path):
    said: list[str] = []
    shelf = launch(tmp_path)
    patient = shelf.retrying(RetryPolicy((JournalError,), 50.0, said.append))
    assert patient.run(Shelf.fill, 2) == 2
    assert said == ["the shelf is full (waiting for up to 50 s)"]
    assert trio.run(shelf.retrying(RetryPolicy((JournalError,), 50.0)).run_async, Shelf.fill, 4) == 4
    with pytest.raises(JournalError):
        shelf.retrying(RetryPolicy((JournalError,), 0.5)).run(Shelf.fill, 99)
    shelf.kill()
