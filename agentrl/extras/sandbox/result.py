"""The result of one program."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

Ending = Literal["exited", "wall", "cpu", "memory", "output"]


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """Output and exit of one program. All its processes have ended.

    exit_code: None if a signal or a limit ended it. signal: the number of that signal, None if there was
        none.
    ended_by: the limit that was exceeded, or "exited". cpu_s: sum over its processes.
    is_workspace_cut: files were lost, because they exceed what is kept between calls or are nested too deep.
    """

    stdout: str
    stderr: str
    exit_code: int | None
    signal: int | None
    ended_by: Ending
    is_output_truncated: bool
    wall_s: float
    cpu_s: float
    is_workspace_cut: bool = False

    @property
    def is_ok(self) -> bool:
        return self.ended_by == "exited" and self.exit_code == 0

    @property
    def is_timed_out(self) -> bool:
        return self.ended_by in ("wall", "cpu")

    def describe(self) -> str:
        """Describe a failed program in words, "" if it exited with 0."""
        match self.ended_by:
            case "wall":
                return f"ended after {self.wall_s:.1f} s: it took too long"
            case "cpu":
                return f"ended after {self.cpu_s:.1f} s of processor time: it computed for too long"
            case "memory":
                return "ended: it used too much memory"
            case "output":
                return "ended: it printed too much"
        if self.signal is not None:
            return f"ended by signal {self.signal} ({signal.Signals(self.signal).name})"
        return f"exit code {self.exit_code}" if self.exit_code else ""
