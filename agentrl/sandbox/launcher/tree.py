"""Files that an untrusted program left: copied and removed without following a link, and within bounds.

Everything goes through descriptors of folders, so no name is ever resolved twice.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

MAX_DEPTH = 24
PIECE_BYTES = 1 << 20
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Budget:
    """What may still be copied."""

    def __init__(self, num_bytes: int, num_files: int) -> None:
        self.num_bytes = num_bytes
        self.num_files = num_files
        self.is_exceeded = False

    def take(self, num_bytes: int) -> bool:
        """Tell whether one more file of this size is within the budget, and count it if so."""
        if num_bytes > self.num_bytes or self.num_files < 1:
            self.is_exceeded = True
            return False
        self.num_bytes -= num_bytes
        self.num_files -= 1
        return True


def copy_tree(source: int, target: int, budget: Budget, *, owner: int | None = None, depth: int = 0) -> None:
    """Copy files, folders and links from one folder to another, given by descriptors; what is none of these stays behind.

    Sizes count as they read, holes and hard links included: a few bytes on disk must not become terabytes.
    """
    for name, mode, size in _entries(source):
        if not budget.take(size if stat.S_ISREG(mode) else 0):
            continue
        _make_accessible(name, mode, source)
        if stat.S_ISDIR(mode):
            if depth >= MAX_DEPTH:
                budget.is_exceeded = True
                continue
            os.mkdir(name, 0o700, dir_fd=target)
            inner_source, inner_target = os.open(name, _FOLDER, dir_fd=source), os.open(name, _FOLDER, dir_fd=target)
            try:
                copy_tree(inner_source, inner_target, budget, owner=owner, depth=depth + 1)
            finally:
                os.close(inner_source)
                os.close(inner_target)
        elif stat.S_ISLNK(mode):
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
        elif stat.S_ISREG(mode):
            _copy_file(name, source, target, size, mode & 0o700)
        else:
            continue
        if owner is not None:
            os.chown(name, owner, owner, dir_fd=target, follow_symlinks=False)


def write_files(folder: int, files: dict[str, bytes], *, owner: int | None = None) -> None:
    """Write files by their relative path; the folder is the launcher's own and nobody else changes it."""
    for path, data in files.items():
        *above, name = path.split("/")
        descriptor = os.dup(folder)
        for part in above:
            if not os.access(part, os.F_OK, dir_fd=descriptor):
                os.mkdir(part, 0o700, dir_fd=descriptor)
                if owner is not None:
                    os.chown(part, owner, owner, dir_fd=descriptor)
            inner = os.open(part, _FOLDER, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600, dir_fd=descriptor)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(file, view) :]
            if owner is not None:
                os.fchown(file, owner, owner)
        finally:
            os.close(file)
            os.close(descriptor)


def empty(folder: int) -> None:
    """Remove all that is in a folder, however deep: what lies two levels down is moved up before its folder goes."""
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
                        _make_accessible(child, mode, inner)  # a folder that is moved is written to
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
    """Give the owner back what the program took from itself; a link has no permissions of its own."""
    wanted = 0o700 if stat.S_ISDIR(mode) else 0o400
    if not stat.S_ISLNK(mode) and mode & wanted != wanted:
        os.chmod(name, stat.S_IMODE(mode) | wanted, dir_fd=folder)


def _copy_file(name: str, source: int, target: int, size: int, mode: int) -> None:
    reader = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=source)
    try:
        writer = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode | 0o600, dir_fd=target)
        try:
            while size > 0 and (piece := os.read(reader, min(size, PIECE_BYTES))):
                size -= os.write(writer, piece)
        finally:
            os.close(writer)
    finally:
        os.close(reader)
