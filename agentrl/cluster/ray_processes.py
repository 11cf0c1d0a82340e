"""Watches the essential processes of a local Ray: if one dies, the run ends at once, without retries."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import psutil  # type: ignore[import-untyped]
import ray

from agentrl.interrupts import end_at_once

POLL_S = 0.5
KILLED_S = 10.0
"""In which a killed process is gone."""
LOST_STATUS = 1
NEEDED: Mapping[str, str] = {"gcs_server": "its control store", "raylet": "its scheduler"}
"""Processes that every Ray call needs.

Ray itself retries for a minute or more before it ends this process.
"""


@contextmanager
def ending_what_began() -> Iterator[None]:
    """If the start of Ray within the block is interrupted, kill what it has started: nothing else would end
    Ray's agents soon, and Ray's own end of a half start may crash.
    """
    before = set(psutil.Process().children(recursive=True))
    try:
        yield
    except KeyboardInterrupt:
        for process in psutil.Process().children(recursive=True):
            if process not in before:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        raise


@contextmanager
def leaving_nothing() -> Iterator[None]:
    """Let the processes of a local Ray end soon after this one if it is killed within the block.

    Most end by themselves. Ray's agents first tell the control store for a minute that their scheduler died.
    """
    pids = [str(process.pid) for process in psutil.Process().children(recursive=True)]
    guard = subprocess.Popen(
        [sys.executable, "-m", "agentrl.guard", "--parent-pid", str(os.getpid()), "--then-kill", *pids],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        guard.kill()
        guard.wait(KILLED_S)


@contextmanager
def watching_ray() -> Iterator[None]:
    """End this process with a one-line message if Ray's control store or scheduler dies within the block.

    A Ray that another process started is not watched.
    """
    processes = local_processes()
    leaving = threading.Event()

    def watch() -> None:
        while not leaving.wait(POLL_S):
            for name, process in processes.items():
                if not _is_alive(process) and not leaving.is_set():
                    # From this thread: the main one may be in a call of Ray that cannot be interrupted.
                    end_at_once(
                        f"error (infrastructure): {name} of Ray ({NEEDED[name]}, process {process.pid}) died "
                        "and the run cannot continue; the same command resumes it",
                        status=LOST_STATUS,
                    )

    if processes:
        threading.Thread(target=watch, name="watch-ray", daemon=True).start()
    try:
        yield
    finally:
        leaving.set()


def local_processes() -> dict[str, psutil.Process]:
    """Return the processes of `NEEDED` that Ray started as children of this process, by name."""
    own = psutil.Process().children() if ray.is_initialized() else []
    found = {}
    for process in own:
        with suppress(psutil.Error):
            if process.name() in NEEDED:
                found[process.name()] = process
    return found


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
