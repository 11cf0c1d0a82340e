"""The last words of a process that a plugin ends: by `os._exit`, by a crash in native code, or by an event
loop that it does not give back.

Nothing in the process can tell of it afterwards, so it is noted before, in a file that others read: which
plugin each thread runs, and, at the end, Python's own report of the thread that crashed or called `os._exit`.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import re
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from agentrl.plugins.blame import is_of_library, running_plugin
from agentrl.plugins.sources import named_by_user, originals
from agentrl.types import Failure, PluginId, Task

SLOT_BYTES = 2048
NUM_SLOTS = 64
"""Threads that are noted at once; further ones share the slots of others."""
_SIZE = SLOT_BYTES * NUM_SLOTS
_MAX_TEXT = 100
_MAX_WORDS = 1 << 20
_IDENT = b"0" * 16
_OWN = (str(Path(__file__).parents[1]) + os.sep, sysconfig.get_path("scripts") + os.sep)
_EXITED = re.compile(r"^exit status (-?\d+)$", re.MULTILINE)
_CRASHED = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)
_THREAD = re.compile(r"^Current thread 0x([0-9a-f]+).*\n((?:  .*\n)*)", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in ', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class PlayedAttempt:
    """The attempt in which a plugin runs."""

    group_id: int
    member: int
    task_id: str
    data_source: str
    agent_name: str

    @classmethod
    def of(cls, group_id: int, member: int, task: Task) -> PlayedAttempt:
        names = (task.task_id, task.data_source, task.agent_name)
        return cls(group_id, member, *(name[:_MAX_TEXT] for name in names))


@dataclass(frozen=True, slots=True)
class LastWords:
    """What ended a process, and in which attempt; None if that is not known."""

    failure: Failure
    attempt: PlayedAttempt | None

    @property
    def line(self) -> str:
        """What ended the process, and where."""
        text, place = self.failure.text, self.failure.place
        return f"{text} at {place}" if place and place not in text else text


played_attempt: ContextVar[PlayedAttempt | None] = ContextVar("played_attempt", default=None)

_board: mmap.mmap | None = None
_words: IO[bytes] | None = None
_slots: dict[int, int] = {}
_lock = threading.Lock()
_exit = os._exit


def keep_last_words(file: IO[bytes], *, exit_status: int | None = None) -> None:
    """Keep the last words of this process in a file, opened for reading and writing.

    exit_status: of this process if a plugin calls `os._exit`; None: the plugin's.
    """
    global _board, _words
    file.truncate(_SIZE)
    file.seek(_SIZE)
    _board, _words = mmap.mmap(file.fileno(), _SIZE), file
    for pair in originals().items():  # Python's report of a crash names the copies
        os.write(file.fileno(), ("\t".join(pair) + "\n").encode(errors="replace"))
    faulthandler.enable(file, all_threads=True)
    pid = os.getpid()

    def exit_with_words(status: int) -> NoReturn:
        thread = threading.get_ident()
        is_ours = plugin_in(thread) is None and not place_in(thread)
        if os.getpid() == pid and not is_ours:  # children of a fork leave like that
            write_last_words(f"exit status {status}", thread)
            status = status if exit_status is None else exit_status
        _exit(status)

    os._exit = exit_with_words


def write_last_words(what: str, thread: int) -> None:
    """Add that `what` ends the process, with the stack of a thread."""
    if _words is None:
        return
    os.write(_words.fileno(), f"{what}\n\nCurrent thread 0x{thread:016x}:\n".encode(errors="replace"))
    frame = sys._current_frames().get(thread)
    while frame is not None:
        code = frame.f_code
        line = f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}\n'
        os.write(_words.fileno(), line.encode(errors="replace"))
        frame = frame.f_back


def note() -> bytes | None:
    """Return what `noting` notes of the current context: plugin and attempt; None if nobody reads it."""
    plugin, attempt = running_plugin.get(), played_attempt.get()
    if _board is None or plugin is None:
        return None
    told: list[Any] = [
        plugin.kind,
        plugin.name[:_MAX_TEXT],
        *(astuple(attempt) if attempt is not None else ()),
    ]
    return (
        json.dumps(told, ensure_ascii=False).encode(errors="replace")[: SLOT_BYTES - len(_IDENT) - 1] + b"\0"
    )


class noting:
    """Note, within the block, what the current thread runs.

    A class, because a generator would cost more than many a call of a plugin.
    """

    __slots__ = ("_begin", "_kept", "_note")

    def __init__(self, note: bytes | None) -> None:
        self._note = note

    def __enter__(self) -> None:
        if self._note is None or _board is None:
            return
        ident = threading.get_ident()
        begin = self._begin = _slot(ident) * SLOT_BYTES
        self._kept = _board[begin : begin + SLOT_BYTES]
        said = b"%016x" % ident + self._note
        _board[begin : begin + len(said)] = said

    def __exit__(self, *_: object) -> None:
        if self._note is not None and _board is not None:
            _board[self._begin : self._begin + SLOT_BYTES] = self._kept


def plugin_in(thread: int) -> PluginId | None:
    """Return the plugin that a thread of this process runs."""
    return None if _board is None else next((one for one, _ in _noted(_board[:], thread)), None)


def place_in(thread: int) -> str:
    """Return the innermost line of the user's own files in which a thread of this process is; "" if none."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if _is_of_user(frame.f_code.co_filename):
            return f"{named_by_user(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def end_with_last_words(what: str, thread: threading.Thread) -> NoReturn:
    """End this process at once because of what a thread does."""
    write_last_words(what, thread.ident or 0)
    _exit(1)


def read_last_words(content: bytes) -> LastWords | None:
    """Return what the file of a dead process says; None if nothing in it ended the process."""
    said = content[_SIZE:].decode(errors="replace")
    if (thread := _THREAD.search(said)) is None:
        return None
    plugin, attempt = next(_noted(content, int(thread[1], 16)), (None, None))
    frames = [(file, line) for file, line in _FRAME.findall(thread[2]) if _is_of_user(file)]
    begun = said[: thread.start()].splitlines()
    names = dict(line.split("\t") for line in begun if line.count("\t") == 1)
    place = f"{names.get(frames[0][0], frames[0][0])}:{frames[0][1]}" if frames else ""
    what = _what("\n".join(line for line in begun if line and "\t" not in line), plugin)
    return LastWords(Failure(what, plugin, "ProcessEnded", place), attempt)


def _what(said: str, plugin: PluginId | None) -> str:
    if (exited := _EXITED.search(said)) is not None:
        return f"{plugin or 'a thread'} ended its process: os._exit({exited[1]})"
    if (crashed := _CRASHED.search(said)) is not None:
        return f"{plugin or 'native code'} ended its process: a crash ({crashed[1]})"
    return said


def _slot(ident: int) -> int:
    found = _slots.get(ident)
    if found is None:
        with _lock:
            found = _slots[ident] = len(_slots) % NUM_SLOTS
    return found


def _noted(content: bytes, thread: int) -> Iterator[tuple[PluginId, PlayedAttempt | None]]:
    for begin in range(0, min(_SIZE, len(content)), SLOT_BYTES):
        text = content[begin : begin + SLOT_BYTES].partition(b"\0")[0]
        if text.startswith(b"%016x" % thread):
            with suppress(ValueError):  # cut
                kind, name, *attempt = json.loads(text[len(_IDENT) :])
                yield PluginId(kind, name), PlayedAttempt(*attempt) if attempt else None


def _is_of_user(file: str) -> bool:
    return not is_of_library(file) and not file.startswith(_OWN)


def read_file_at(descriptor: int) -> LastWords | None:
    """Return what an open file says."""
    return read_last_words(os.pread(descriptor, _SIZE + _MAX_WORDS, 0))


def read_file(path: Path) -> LastWords | None:
    """Return what the file at a path says; None also if there is none."""
    try:
        return read_last_words(path.read_bytes())
    except OSError:
        return None
