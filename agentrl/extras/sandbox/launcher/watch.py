"""Watches one program: reads its output, enforces wall time, and sums the resources of all its processes."""

from __future__ import annotations

import os
import select
import time

from . import processes
from .request import ExecutionRequest

TYPE_CHECKING = False  # importing typing would cost milliseconds at every start
if TYPE_CHECKING:
    from collections.abc import Callable

STARTED = b"started\n"
"""First line of a report. After it, the program itself is responsible for any death of the first process."""
FIRST_LOOK_S, LOOK_S = 0.01, 0.05
"""Seconds between polls of memory and CPU time, at first and at most.

A poll costs about 50 us per process.
"""


class ProcessWatch:
    """What was observed of one program.

    `why`: "" if it ended by itself, else wall | cpu | memory | output | gone (the host gave up).
    """

    def __init__(
        self,
        request: ExecutionRequest,
        *,
        outputs: tuple[int, int],
        status: int,
        host: int,
        num_oom_kills: Callable[[], int],
    ) -> None:
        """`num_oom_kills`: returns how many of its processes the OOM killer ended.

        The others must end too.
        """
        self._request = request
        self._outputs = outputs
        self._status = status
        self._host = host
        self._num_oom_kills = num_oom_kills
        self._texts = {descriptor: bytearray() for descriptor in outputs}
        self.why = ""
        self.report = b""
        self.started = time.monotonic()
        self.wall_s = 0.0
        self.cpu_s = 0.0
        self.peak_bytes = 0

    @property
    def stdout(self) -> bytes:
        return bytes(self._texts[self._outputs[0]])

    @property
    def stderr(self) -> bytes:
        return bytes(self._texts[self._outputs[1]])

    def until_end(self, find: Callable[[], list[int]]) -> None:
        """Return when the program has ended or must be killed. `find` lists its processes."""
        poll = select.poll()
        for descriptor in (*self._outputs, self._status, self._host):
            poll.register(descriptor, select.POLLIN | select.POLLHUP)
        deadline = self.started + self._request.wall_s
        next_look, pause = self.started + FIRST_LOOK_S, FIRST_LOOK_S
        while not self.why:
            now = time.monotonic()
            if now >= deadline:
                self.why = "wall"
                break
            if now >= next_look:
                self.why = self._look(find())
                pause = min(2 * pause, LOOK_S)
                next_look = now + pause
            for descriptor, _ in poll.poll(1000 * max(0.0, min(deadline, next_look) - time.monotonic())):
                if descriptor == self._host:
                    self.why = "gone"
                elif descriptor == self._status:
                    piece = os.read(descriptor, 4096)
                    self.report += piece
                    if not piece or self.report != STARTED:
                        self.wall_s = time.monotonic() - self.started
                        return
                elif not self._take(descriptor):
                    poll.unregister(descriptor)
        self.wall_s = time.monotonic() - self.started

    def drain(self) -> None:
        """Read the rest of the pipes after everything was killed."""
        for descriptor in self._outputs:
            os.set_blocking(descriptor, False)
            try:
                while self._take(descriptor):
                    pass
            except BlockingIOError:
                continue

    @property
    def is_truncated(self) -> bool:
        return any(len(text) > self._request.output_bytes for text in self._texts.values())

    def _take(self, descriptor: int) -> bool:
        """Read a piece of output; return False at its end."""
        piece = os.read(descriptor, 65536)
        text = self._texts[descriptor]
        if len(text) <= self._request.output_bytes:
            text += piece[: self._request.output_bytes + 1 - len(text)]
        if self.is_truncated and not self.why:
            self.why = "output"
        return bool(piece)

    def _look(self, pids: list[int]) -> str:
        memory_bytes, cpu_s = processes.usage(pids)
        self.cpu_s = max(self.cpu_s, cpu_s)
        self.peak_bytes = max(self.peak_bytes, memory_bytes)
        if memory_bytes > self._request.memory_bytes or self._num_oom_kills():
            return "memory"
        return "cpu" if cpu_s > self._request.cpu_s + 1 else ""
