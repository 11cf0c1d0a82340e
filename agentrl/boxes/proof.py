"""Puts together what tests run on: the model's repository, with the files of the row that prove something."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Collection, Iterator
from pathlib import PurePosixPath

PROTECTED_NAMES = frozenset(
    {
        *("conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml"),
        *("sitecustomize.py", "usercustomize.py"),
    }
)
"""Files that decide how tests run, wherever they are."""
PATCHED = re.compile(r"^(?:---|\+\+\+) (?:[ab]/)?([^\t\n]+)", re.MULTILINE)


def patched_files(patch: str) -> frozenset[str]:
    """Return the files that a unified diff names, without /dev/null."""
    return frozenset(path for path in PATCHED.findall(patch) if path != "/dev/null")


def protected(folder: bytes, proofs: Collection[str]) -> bytes:
    """Return the part of a working folder that decides its tests, as a tar archive like the whole.

    That is: the files in `proofs`, and those with a name in PROTECTED_NAMES.
    """
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for member, content in _members(folder):
            if _is_protected(member, proofs):
                tar.addfile(member, content)
    return archive.getvalue()


def proven(changed: bytes, original: bytes, proofs: Collection[str]) -> bytes:
    """Return the working folder `changed`, in which all that decides the tests is as in `original`.

    If `original` has no such file, the result has none. A link or a file in place of a folder of `proofs` is
    left out. All three are tar archives; `original` may be reduced to its protected part.
    """
    folders = {str(folder) for path in proofs for folder in PurePosixPath(path).parents}
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for member, content in _members(changed):
            if not _is_protected(member, proofs) and (member.isdir() or member.name not in folders):
                tar.addfile(member, content)
        for member, content in _members(original):
            if _is_protected(member, proofs):
                tar.addfile(member, content)
    return archive.getvalue()


def plain_files(folder: bytes) -> dict[str, bytes]:
    """Return the files of a tar archive, path -> content, without links."""
    return {
        member.name: content.read()
        for member, content in _members(folder)
        if content is not None and not member.name.startswith("/") and ".." not in member.name.split("/")
    }


def modules_of(folder: bytes) -> frozenset[str]:
    """Return the names of modules and packages at the top of a folder, given as a tar archive."""
    return frozenset(member.name.partition("/")[0].removesuffix(".py") for member, _ in _members(folder))


def _is_protected(member: tarfile.TarInfo, proofs: Collection[str]) -> bool:
    path = PurePosixPath(member.name)
    is_proof = any(str(above) in proofs for above in (path, *path.parents))  # a folder in place of a file
    return is_proof or path.name in PROTECTED_NAMES or path.suffix == ".pth"


def _members(archive: bytes) -> Iterator[tuple[tarfile.TarInfo, io.BufferedIOBase | None]]:
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
        for member in tar:
            member.name = str(PurePosixPath(member.name))  # `./a` and `a` are one file
            yield member, tar.extractfile(member) if member.isreg() else None  # type: ignore[misc]
