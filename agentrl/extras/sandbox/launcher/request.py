"""The request of the host and the reply, as marshal: both ends run the same interpreter, and it needs no
import.
"""

from __future__ import annotations

import marshal

from .tree import read_all, write_all

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing would cost milliseconds at every start
    from typing import Any

HEADER_BYTES = 8


class ExecutionRequest:
    """One execution. Sizes in bytes, times in seconds.

    python: the interpreter's file; prefix: its installation; packages: more folders for sys.path;
    workspace: file of the host with the packed working folder, read at the start and written at the end, or
        None;
    temporary: folder on the host's disk for the program's files, if there is no tmpfs;
    is_merged: stderr goes to stdout;
    channel: empty, or two descriptors that become 3 (to read from) and 4 (to write to) in the program;
    commands: the system's commands (bash, git, ...) can be run, not only the interpreter;
    avoid: mechanisms that are not used, to test the remaining ones.
    """

    def __init__(self, fields: dict[str, Any]) -> None:
        # The host guarantees these types; mypy cannot see across the pipe.
        self.python: str = fields["python"]
        self.prefix: str = fields["prefix"]
        self.packages: list[str] = fields["packages"]
        self.source: str = fields["source"]
        self.echo: bool = fields["echo"]
        self.stdin: bytes = fields["stdin"]
        self.files: dict[str, bytes] = fields["files"]
        self.workspace: str | None = fields["workspace"]
        self.temporary: str = fields["temporary"]
        self.is_merged: bool = fields["is_merged"]
        self.channel: list[int] = fields["channel"]
        self.commands: bool = fields["commands"]
        self.avoid: list[str] = fields["avoid"]
        self.cpu_s: float = fields["cpu_s"]
        self.wall_s: float = fields["wall_s"]
        self.memory_bytes: int = fields["memory_bytes"]
        self.max_processes: int = fields["max_processes"]
        self.output_bytes: int = fields["output_bytes"]
        self.file_bytes: int = fields["file_bytes"]
        self.disk_bytes: int = fields["disk_bytes"]
        self.max_files: int = fields["max_files"]
        self.max_open_files: int = fields["max_open_files"]


def read_request(descriptor: int) -> ExecutionRequest:
    """Read one request.

    The descriptor stays open: its end means that the host gave up, which the caller watches.
    """
    size = int.from_bytes(_read(descriptor, HEADER_BYTES), "big")
    return ExecutionRequest(marshal.loads(_read(descriptor, size)))


def write_reply(descriptor: int, reply: dict[str, object]) -> None:
    write_all(descriptor, marshal.dumps(reply))


def _read(descriptor: int, size: int) -> bytes:
    data = read_all(descriptor, size)
    if len(data) < size:
        raise SystemExit("the host closed the request")
    return data
