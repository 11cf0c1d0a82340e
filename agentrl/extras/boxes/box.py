"""The protocol of boxes: what the tools of an attempt need of an isolated place, wherever it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


class BoxRefused(Exception):
    """The box cannot do what was asked: a file that does not exist, a command that is not there.

    It says nothing about the infrastructure. The message is written for the model.
    """


class BoxFileMissing(BoxRefused):
    """There is no file with this path."""


class BoxEnded(BoxRefused):
    """What ran in the box ended it: it used too much memory, or killed the box's own process."""


@dataclass(frozen=True, slots=True)
class Executed:
    """The result of one command.

    exit_code: as a shell counts: 128 + the number of the signal that ended it.
    stdout, stderr: if more was written than allowed, the middle is left out.
    is_truncated: something was left out. is_timed_out: the command was killed at its deadline.
    """

    exit_code: int
    stdout: str
    stderr: str
    is_truncated: bool
    is_timed_out: bool
    wall_s: float


@dataclass(frozen=True, slots=True)
class Start:
    """What a box starts from.

    image: for the back ends that have images; None: the configured one.
    snapshot: a tar archive of the working folder, as `OpenBox.snapshot` returns it; None: an empty folder.
    files: written after that: path below the working folder -> content.
    """

    image: str | None = None
    snapshot: bytes | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)


class OpenBox(ABC):
    """One isolated place with a working folder, where paths begin. Calls run one at a time.

    All methods run under trio. They raise SandboxError if the infrastructure broke.
    """

    @abstractmethod
    async def run(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        max_output_bytes: int,
        stdin: bytes = b"",
        is_merged: bool = False,
    ) -> Executed:
        """Run a command in the working folder. Its processes are killed at the deadline.

        is_merged: stderr goes to stdout, in the order of writing.

        Raises:
            BoxRefused: the command does not exist. BoxEnded: the box is over.
        """

    @abstractmethod
    async def read(self, path: str, *, max_bytes: int) -> bytes:
        """Return the content of a file.

        Raises:
            BoxFileMissing: there is no such file. BoxRefused: it is no plain file, or too large.
            BoxEnded: the box is over.
        """

    @abstractmethod
    async def write(self, path: str, content: bytes) -> None:
        """Write a file, with the folders above it.

        Raises:
            BoxRefused: the box does not take it: a folder has this name, the disk is full. BoxEnded.
        """

    @abstractmethod
    async def snapshot(self, *, max_bytes: int) -> bytes:
        """Return the working folder as a tar archive: files, folders and links, without owners and devices.

        Raises:
            BoxRefused: it is larger than `max_bytes`. BoxEnded: the box is over.
        """

    @abstractmethod
    async def restore(self, snapshot: bytes) -> None:
        """Make the working folder what it was in a snapshot: other files in it are removed. Processes go on.

        Raises:
            BoxRefused: the box does not take it: it is no tar archive, or too large. BoxEnded.
        """

    async def fill(self, start: Start) -> None:
        """Write what a box starts from.

        Raises:
            BoxRefused: the box does not take it. BoxEnded.
        """
        if start.snapshot is not None:
            await self.restore(start.snapshot)
        for path, content in start.files.items():
            await self.write(path, content)

    @abstractmethod
    async def stop(self) -> None:
        """End everything in the box and remove its files. Safe to call again."""


class BoxMaker(ABC):
    """A back end: starts boxes of one kind."""

    @abstractmethod
    def check(self) -> None:
        """Return if boxes can be started here. Blocks; called once, before anything is played.

        Raises:
            ConfigError: the back end is not installed, or does not isolate.
        """

    @abstractmethod
    async def start(self, start: Start) -> OpenBox:
        """Start a box. If this is cancelled or fails, nothing is left of it.

        Raises:
            DataError: the back end has no such image. SandboxError: the infrastructure broke.
            BoxRefused: the box does not take the snapshot or a file.
        """
