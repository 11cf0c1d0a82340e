"""How one program ended."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

Ending = Literal["exited", "wall", "cpu", "memory", "output"]


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """Output and end of one program; all its processes are gone.

    exit_code: None when a signal or a limit ended it; signal: the number of that signal, None if there was none.
    ended_by: the limit that ended it, or "exited". cpu_s: of its processes together.
    is_workspace_cut: it left more than may be kept between calls, or folders nested too deep.
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

    @property
    def is_out_of_memory(self) -> bool:
        """Whether all processes together passed the limit, or one of them was refused more and said so."""
        return self.ended_by == "memory" or (self.exit_code == 1 and self.stderr.rstrip().rpartition("\n")[2].startswith("MemoryError"))

    def describe(self) -> str:
        """Say in words how it ended, "" when it ended well."""
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
