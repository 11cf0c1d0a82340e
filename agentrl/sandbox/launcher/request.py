"""What the host asks for; read from a pipe as marshal, which both ends, the same interpreter, speak without an import."""

from __future__ import annotations

import marshal

from .tree import read_all, write_all

HEADER_BYTES = 8


class Request:
    """One execution. Sizes in bytes, times in seconds.

    python: the interpreter's file; prefix: its installation; packages: further folders for sys.path;
    workspace: file of the host with the packed files that the program finds and leaves, None for none;
    temporary: where the program's files lie on the host's disk, if they must;
    is_merged: stderr goes where stdout goes;
    avoid: walls that are not even tried, so that a test sees what the others hold.
    """

    def __init__(self, fields: dict[str, object]) -> None:
        # Of the types declared here, as the host wrote them: mypy cannot see across the pipe.
        self.python: str = fields["python"]  # type: ignore[assignment]
        self.prefix: str = fields["prefix"]  # type: ignore[assignment]
        self.packages: list[str] = fields["packages"]  # type: ignore[assignment]
        self.source: str = fields["source"]  # type: ignore[assignment]
        self.echo: bool = fields["echo"]  # type: ignore[assignment]
        self.stdin: bytes = fields["stdin"]  # type: ignore[assignment]
        self.files: dict[str, bytes] = fields["files"]  # type: ignore[assignment]
        self.workspace: str | None = fields["workspace"]  # type: ignore[assignment]
        self.temporary: str = fields["temporary"]  # type: ignore[assignment]
        self.is_merged: bool = fields["is_merged"]  # type: ignore[assignment]
        self.avoid: list[str] = fields["avoid"]  # type: ignore[assignment]
        self.cpu_s: float = fields["cpu_s"]  # type: ignore[assignment]
        self.wall_s: float = fields["wall_s"]  # type: ignore[assignment]
        self.memory_bytes: int = fields["memory_bytes"]  # type: ignore[assignment]
        self.max_processes: int = fields["max_processes"]  # type: ignore[assignment]
        self.output_bytes: int = fields["output_bytes"]  # type: ignore[assignment]
        self.file_bytes: int = fields["file_bytes"]  # type: ignore[assignment]
        self.disk_bytes: int = fields["disk_bytes"]  # type: ignore[assignment]
        self.max_files: int = fields["max_files"]  # type: ignore[assignment]
        self.max_open_files: int = fields["max_open_files"]  # type: ignore[assignment]


def read_request(descriptor: int) -> Request:
    """Read one request; what the descriptor does afterwards (it closes when the host gives up) is left to the caller."""
    size = int.from_bytes(_read(descriptor, HEADER_BYTES), "big")
    return Request(marshal.loads(_read(descriptor, size)))


def write_reply(descriptor: int, reply: dict[str, object]) -> None:
    write_all(descriptor, marshal.dumps(reply))


def _read(descriptor: int, size: int) -> bytes:
    data = read_all(descriptor, size)
    if len(data) < size:
        raise SystemExit("the host closed the request")
    return data
