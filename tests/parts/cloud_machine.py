"""A machine of a cloud, for servers of the tests: a folder, in which programs run without walls."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Machine:
    """A machine: its home folder, and the processes that were started in it."""

    asked: dict[str, Any]
    home: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="agentrl-cloud-")))
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    def start(self, command: list[str], envs: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start a command; everything that it starts has the machine's mark in its environment."""
        temporary = self.home / "tmp"
        temporary.mkdir(exist_ok=True)
        own = {"HOME": str(self.home), "TMPDIR": str(temporary), "CLOUD_MACHINE": self.token}
        process = subprocess.Popen(
            command,
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PATH": os.environ["PATH"], **envs, **own},
        )
        self.processes.append(process)
        return process

    def end(self) -> None:
        """Kill all of its processes, whatever their parents and sessions."""
        mark = f"CLOUD_MACHINE={self.token}".encode()
        for found in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in found.read_bytes().split(b"\0"):
                    os.kill(int(found.parent.name), signal.SIGKILL)
            except OSError:
                continue
        for process in self.processes:
            process.wait()
        shutil.rmtree(self.home, ignore_errors=True)
