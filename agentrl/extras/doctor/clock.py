"""Check `clock`: is the wall clock synchronised, and does the disk of the run have the same one?"""

from __future__ import annotations

import ctypes
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from agentrl.extras.doctor.diagnosis import Diagnosis
from agentrl.extras.doctor.subject import Subject, existing

MAX_FILE_SKEW_S = 5.0
EARLIEST = 1_767_225_600.0
"""1 January 2026: a clock before it was never set."""
_BUFFER_BYTES = 512
"""More than the kernel's `struct timex`."""
_STATE_ERROR = 5
"""TIME_ERROR of adjtimex(2): the clock is not synchronised."""


def diagnose(subject: Subject) -> Iterator[Diagnosis]:
    """Ask the kernel for the state of the clock, and compare it with the times of a new file."""
    yield judge_clock(wall_clock(), is_synchronised())
    folder = existing(subject.run_folder)
    with tempfile.NamedTemporaryFile(prefix=".agentrl-doctor-", dir=folder) as file:
        written = Path(file.name).stat().st_mtime
        yield judge_file_time(folder, written, wall_clock())


def wall_clock() -> float:
    """Return the wall clock in seconds since 1970."""
    return time.time()


def is_synchronised() -> bool | None:
    """Return whether the kernel calls the clock synchronised (NTP); None: not known."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "adjtimex"):
        return None
    # The field `modes` is 0: the state is read, nothing is set.
    state: int = libc.adjtimex(ctypes.create_string_buffer(_BUFFER_BYTES))
    return None if state < 0 else state != _STATE_ERROR


def judge_clock(now: float, is_synced: bool | None) -> Diagnosis:
    """Judge the wall clock. Certificates, object storage and the logs of several machines need it."""
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < EARLIEST:
        text = f"{shown}: was never set; certificates and object storage are refused"
        return Diagnosis("clock", "wrong", text, "set it, or start chrony or systemd-timesyncd")
    state = {True: "synchronised", False: "not synchronised by this kernel", None: "state unknown"}[is_synced]
    note = "" if is_synced else "; --cluster compares the clocks of nodes"
    return Diagnosis("clock", "ok", f"{shown}, {state}{note}")


def judge_file_time(folder: Path, written: float, now: float) -> Diagnosis:
    """Compare the time of a file with the clock; a shared file system has the time of its server."""
    skew = abs(now - written)
    text = f"{folder}: files have this machine's time within {max(skew, 0.1):.1f} s"
    if skew > MAX_FILE_SKEW_S:
        text = f"{folder}: the time of files is {skew:.0f} s off this machine's clock"
        return Diagnosis("file times", "slow", text, "synchronise the file server or this machine (NTP)")
    return Diagnosis("file times", "ok", text)
