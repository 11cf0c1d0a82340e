"""Packing, unpacking and removal of files that an untrusted program left: follows no links, within a budget.

A packed tree is a single value. So no name that the program chose becomes a path on the host.
"""

from __future__ import annotations

import marshal
import os
import stat

TYPE_CHECKING = False  # importing typing would cost milliseconds at every start
if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_DEPTH = 24
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

Entry = tuple[str, int, "bytes | str | None"]
"""Path, mode as in `st_mode`, and a file's content or a link's target. Folders precede their contents."""


class Budget:
    """Bytes and files that may still be copied."""

    def __init__(self, num_bytes: int, num_files: int) -> None:
        self.num_bytes = num_bytes
        self.num_files = num_files
        self.is_exceeded = False

    def take(self, num_bytes: int) -> bool:
        """Return whether one more file of this size fits, and if so, count it."""
        if num_bytes > self.num_bytes or self.num_files < 1:
            self.is_exceeded = True
            return False
        self.num_bytes -= num_bytes
        self.num_files -= 1
        return True


def pack(folder: int, budget: Budget) -> bytes:
    """Return the files, folders and links below a folder as one value.

    Omits all else, and what exceeds the budget.

    Sizes are apparent sizes, including holes and hard links: a few bytes on disk must not become terabytes.
    """
    os.fchmod(folder, 0o700)  # the program may have removed its own access
    return marshal.dumps(list(_walk(folder, "", budget, depth=0)))


def unpack(data: bytes, folder: int, *, owner: int | None) -> None:
    """Unpack the result of `pack` into an empty folder that no other process can reach yet."""
    entries: list[Entry] = marshal.loads(data) if data else []
    # Links last: nothing is written through one.
    for path, mode, content in sorted(entries, key=lambda entry: stat.S_ISLNK(entry[1])):
        if isinstance(content, str):
            os.symlink(content, path, dir_fd=folder)
        elif content is None:
            os.mkdir(path, 0o700, dir_fd=folder)
        else:
            write_file(folder, path, content, mode=mode & 0o700)
        if owner is not None:
            os.chown(path, owner, owner, dir_fd=folder, follow_symlinks=False)


def write_files(folder: int, files: dict[str, bytes], *, owner: int | None = None, mode: int = 0o600) -> None:
    """Write files by their relative paths, creating parent folders."""
    for path, data in files.items():
        parts = path.split("/")
        for end in range(1, len(parts)):
            above = "/".join(parts[:end])
            try:
                os.mkdir(above, 0o700, dir_fd=folder)
            except FileExistsError:
                continue
            if owner is not None:
                os.chown(above, owner, owner, dir_fd=folder, follow_symlinks=False)
        write_file(folder, path, data, mode=mode)
        if owner is not None:
            os.chown(path, owner, owner, dir_fd=folder, follow_symlinks=False)


def write_file(folder: int, path: str, data: bytes, *, mode: int) -> None:
    descriptor = os.open(
        path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder
    )
    try:
        write_all(descriptor, data)
        os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def read_all(descriptor: int, size: int) -> bytes:
    """Read `size` bytes, or fewer if the file ends before."""
    pieces: list[bytes] = []
    while size > 0 and (piece := os.read(descriptor, min(size, 1 << 20))):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def empty(folder: int) -> None:
    """Remove everything in a folder of any depth without recursion: grandchildren are moved up level by
    level.
    """
    for name, mode, _ in _entries(folder):
        if not stat.S_ISDIR(mode):
            os.unlink(name, dir_fd=folder)
    while folders := [name for name, _, _ in _entries(folder)]:
        for name in folders:
            _make_accessible(name, stat.S_IFDIR, folder)
            inner = os.open(name, _FOLDER, dir_fd=folder)
            try:
                for child, mode, _ in _entries(inner):
                    if stat.S_ISDIR(mode):
                        _make_accessible(child, mode, inner)  # renaming a folder writes its `..` entry
                        os.rename(child, os.urandom(12).hex(), src_dir_fd=inner, dst_dir_fd=folder)
                    else:
                        os.unlink(child, dir_fd=inner)
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=folder)


def _entries(folder: int) -> Iterator[tuple[str, int, int]]:
    for name in os.listdir(folder):
        try:
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            continue
        yield name, found.st_mode, found.st_size


def _make_accessible(name: str, mode: int, folder: int) -> None:
    """Restore the owner's access, which the program may have removed. Links have no permissions."""
    wanted = 0o700 if stat.S_ISDIR(mode) else 0o400
    if not stat.S_ISLNK(mode) and mode & wanted != wanted:
        os.chmod(name, stat.S_IMODE(mode) | wanted, dir_fd=folder)


def _walk(folder: int, path: str, budget: Budget, *, depth: int) -> Iterator[Entry]:
    for name, mode, size in _entries(folder):
        below = f"{path}/{name}" if path else name
        if not budget.take(size if stat.S_ISREG(mode) else 0):
            continue
        _make_accessible(name, mode, folder)
        if stat.S_ISLNK(mode):
            yield below, mode, os.readlink(name, dir_fd=folder)
        elif stat.S_ISREG(mode):
            descriptor = os.open(name, _FILE, dir_fd=folder)
            try:
                yield below, mode, read_all(descriptor, size)
            finally:
                os.close(descriptor)
        elif stat.S_ISDIR(mode) and depth < MAX_DEPTH:
            yield below, mode, None
            descriptor = os.open(name, _FOLDER, dir_fd=folder)
            try:
                yield from _walk(descriptor, below, budget, depth=depth + 1)
            finally:
                os.close(descriptor)
        elif stat.S_ISDIR(mode):
            budget.is_exceeded = True
