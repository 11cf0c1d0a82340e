"""Puts together what tests run on: the row's repository, with the changes of the model that may count."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

SETTINGS = frozenset(
    {
        *("conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml"),
        *("sitecustomize.py", "usercustomize.py"),
    }
)
"""Files that decide how tests run, wherever they are."""
TEST_FOLDERS = frozenset({"test", "tests"})
NO_CODE = re.compile(r"test_.*|.*_test\.py|tests?\.py|conftest\.py|__init__\.py|.*(?<!\.py)")
ROOT = PurePosixPath(".")
PATCHED = re.compile(r"^(?:---|\+\+\+) (?:[ab]/)?([^\t\n]+)", re.MULTILINE)


def patched_files(patch: str) -> frozenset[str]:
    """Return the files that a unified diff names, without /dev/null."""
    return frozenset(path for path in PATCHED.findall(patch) if path != "/dev/null")


@dataclass(frozen=True, slots=True)
class Proof:
    """What a row decides about its tests. Paths are relative to the repository.

    tests: the files with the tests.
    folders: those that hold tests only. All in them is the row's.
    ways: the root and all folders above tests -> the first parts, before any dot, of the names that lead to
        tests.
    known: all paths of the row's repository -> the target of a link, else "".
    archive: tar archive of those of them that only the row decides about.
    """

    tests: frozenset[str]
    folders: frozenset[PurePosixPath]
    ways: Mapping[PurePosixPath, frozenset[str]]
    known: Mapping[str, str]
    archive: bytes = b""

    def is_rows(self, path: PurePosixPath) -> bool:
        """Return whether only the row decides about a path."""
        return (
            any(str(above) in self.tests or above in self.folders for above in (path, *path.parents))
            or path.name in SETTINGS
            or path.suffix == ".pth"
        )

    def admits(self, member: tarfile.TarInfo) -> bool:
        """Return whether the tests run on a file, folder or link that the model left.

        Links are admitted as the row has them, compiled modules never. Directly in the folders above a test,
        modules and folders may be new, but nothing that could be taken for the settings of a test runner.
        """
        path = PurePosixPath(member.name)
        is_compiled = path.suffix == ".pyc" or "__pycache__" in path.parts
        if (
            is_compiled
            or not _is_below(path)
            or self.is_rows(path)
            or self._takes_place_of_test(path, member)
        ):
            return False
        if member.issym():
            return self.known.get(member.name) == member.linkname
        is_module = path.suffix == ".py" and path.name != "__init__.py"
        return member.isdir() or (
            member.isreg() and (member.name in self.known or path.parent not in self.ways or is_module)
        )

    def _takes_place_of_test(self, path: PurePosixPath, member: tarfile.TarInfo) -> bool:
        """Return whether Python could import this instead of a test or of a folder above one."""
        places = [path, *path.parents][:-1]
        return any(
            place.name.partition(".")[0] in self.ways.get(place.parent, ())
            and not (place in self.ways and (place != path or member.isdir()))
            for place in places
        )


def read_proof(folder: bytes, given: Collection[str], names: Collection[str] = ()) -> Proof:
    """Read the row's repository, a tar archive.

    Args:
        given: paths of files with tests; the archive need not have them.
        names: tests, whose files are such, too: dotted names of unittest, or node ids of pytest.
    """
    members = [member for member, _ in _members(folder)]
    files = {member.name for member in members if member.isreg()}
    tests = {*given, *(path for name in names for path in _possible_files(name) if path in files)}
    ways: dict[PurePosixPath, set[str]] = {ROOT: set()}
    for path in map(PurePosixPath, tests):
        for place in [path, *path.parents][:-1]:
            ways.setdefault(place.parent, set()).add(place.name.partition(".")[0])
    known = {str(above): "" for member in members for above in PurePosixPath(member.name).parents}
    known |= {member.name: member.linkname if member.issym() else "" for member in members}
    proof = Proof(
        frozenset(tests),
        frozenset(_folders_of_tests(tests, files - tests)),
        {place: frozenset(names) for place, names in ways.items()},
        known,
    )
    rows = _packed(folder, lambda member: proof.is_rows(PurePosixPath(member.name)))
    return Proof(proof.tests, proof.folders, proof.ways, proof.known, rows)


def proven(changed: bytes, proof: Proof) -> bytes:
    """Return the working folder that the model left, with all that the row decides as the row has it.

    Both are tar archives.
    """
    return _packed(changed, proof.admits, proof.archive)


def added_modules(folder: bytes, proof: Proof) -> list[str]:
    """Return the paths of modules and packages in a tar archive that the row has not, without those inside of
    packages: they could take the place of modules that the tests import from elsewhere.
    """
    added = []
    for member, _ in _members(folder):
        path = PurePosixPath(member.name)
        is_module = member.isdir() or path.suffix == ".py"
        is_alone = path.parent == ROOT or str(path.parent) in proof.known
        is_inside = str(path.parent / "__init__.py") in proof.known
        if is_module and is_alone and not is_inside and member.name not in proof.known:
            added.append(member.name)
    return added


def plain_files(folder: bytes) -> dict[str, bytes]:
    """Return the files of a tar archive, path -> content, without links."""
    return {
        member.name: content.read()
        for member, content in _members(folder)
        if content is not None and _is_below(PurePosixPath(member.name))
    }


def _possible_files(name: str) -> list[str]:
    """Return the files that a test of this name can be in."""
    parts = name.split(".")
    dotted = ["/".join(parts[:length]) + ".py" for length in range(1, len(parts))]
    return [name.partition("::")[0]] if "::" in name else dotted


def _folders_of_tests(tests: Collection[str], code: Collection[str]) -> Iterator[PurePosixPath]:
    """Yield the folders that hold tests only: by their names, or because no other code is beside a test."""
    other = [path for path in map(PurePosixPath, code) if not NO_CODE.fullmatch(path.name)]
    beside = {path.parent for path in other}
    for path in map(PurePosixPath, tests):
        named = [folder for folder in path.parents if folder.name in TEST_FOLDERS]
        if named:
            yield named[-1]
        elif path.parent != ROOT and path.parent not in beside:
            yield path.parent


def _is_below(path: PurePosixPath) -> bool:
    return not path.is_absolute() and ".." not in path.parts


def _packed(folder: bytes, takes: Callable[[tarfile.TarInfo], bool], first: bytes = b"") -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for member, content in _members(first) if first else ():
            tar.addfile(member, content)
        for member, content in _members(folder):
            if takes(member):
                tar.addfile(member, content)
    return archive.getvalue()


def _members(archive: bytes) -> Iterator[tuple[tarfile.TarInfo, io.BufferedIOBase | None]]:
    """Yield the members with their contents; a further name of a file is a file of its own."""
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
        for member in tar:
            content = None if member.isdir() or member.issym() else tar.extractfile(member)
            if member.islnk() and content is not None:
                member.type, member.size = tarfile.REGTYPE, len(content.read())
                content.seek(0)
            member.name = str(PurePosixPath(member.name))  # `./a` and `a` are one file
            yield member, content  # type: ignore[misc]
