"""What can be looked at: the folder of a run, that of an evaluation, or Parquet files of trajectories.

Nothing is kept open, and nothing is written: a run may start, go on, stop or be moved away meanwhile.
"""

from __future__ import annotations

import fcntl
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentrl.data.failures import FILE as FAILURES
from agentrl.data.trajectories import may_have_trajectories
from agentrl.errors import ConfigError
from agentrl.extras.view.unfinished import copied
from agentrl.figures.attempts import ATTEMPTS

Kind = Literal["run", "evaluation", "files"]
AttemptSet = Literal["training", "validation", "evaluation", "failed"]
"""failed: rows of `failures.parquet` whose attempts are stored nowhere else; they have no tokens."""

Signature = tuple[int, int, int]
"""What changes whenever a file is replaced."""

METRICS = "metrics.jsonl"
STORE = "attempts.sqlite"
_STEP = re.compile(r"step_(\d+)\.parquet")


@dataclass(frozen=True, slots=True)
class AttemptFile:
    """A Parquet file of attempts.

    name: path within the source, which is part of every link to an attempt. step: None if the name has none.
    policy: of a validation, such as a baseline's name; None: the run's own.
    """

    path: Path
    name: str
    set: AttemptSet
    step: int | None = None
    policy: str | None = None


@dataclass(frozen=True, slots=True)
class ViewSource:
    """One argument of the command. `title` is unique among the sources of a page."""

    root: Path
    kind: Kind
    title: str

    @property
    def folder(self) -> Path:
        """The folder that contains the source's files."""
        return self.root if self.root.is_dir() else self.root.parent

    @property
    def is_live(self) -> bool:
        """Whether a process works in the folder: it holds the lock of a run, or of a store of attempts."""
        names = {"run": ".lock", "evaluation": "attempts.lock", "files": ""}
        lock = self.folder / names[self.kind]
        if not lock.is_file():
            return False
        try:
            with lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # not ours to read: nothing is known
            return False
        return False

    def files(self) -> list[AttemptFile]:
        """Return the files of attempts, the newest step first; failures that have no file of their own last.

        Partial files, and files that are gone meanwhile, are left out.
        """
        found = list(self._files())
        rank = {"training": 0, "evaluation": 0, "validation": 1, "failed": 3}
        baselines = {file.name: file.policy is not None for file in found}
        return sorted(
            found,
            key=lambda file: (
                file.set == "failed",
                baselines[file.name],
                -(file.step or 0),
                rank[file.set],
                file.name,
            ),
        )

    def _files(self) -> Iterator[AttemptFile]:
        if self.kind == "files":
            paths = [self.root] if self.root.is_file() else sorted(self.root.glob("*.parquet"))
            yield from (_file(path, path.name, "training") for path in paths)
            return
        if self.kind == "evaluation":
            if (self.root / ATTEMPTS).is_file():
                yield _file(self.root / ATTEMPTS, ATTEMPTS, "evaluation")
            elif (self.root / STORE).is_file():
                for path in copied(self.root / STORE).files():
                    yield _file(path, path.name, "evaluation")
            if (self.root / FAILURES).is_file():
                yield _file(self.root / FAILURES, FAILURES, "failed")
            return
        folders: tuple[tuple[str, AttemptSet], ...] = (
            ("trajectories", "training"),
            ("validation", "validation"),
        )
        for folder, own in folders:
            for path in sorted((self.root / folder).glob("*.parquet")):
                yield _file(path, f"{folder}/{path.name}", own)
        if (self.root / FAILURES).is_file():
            yield _file(self.root / FAILURES, FAILURES, "failed")


def _file(path: Path, name: str, own: AttemptSet) -> AttemptFile:
    found = _STEP.fullmatch(path.name)
    policy = path.stem.removeprefix("baseline_") if path.stem.startswith("baseline_") else None
    return AttemptFile(path, name, own, int(found[1]) if found else None, policy)


def signature_of(file: AttemptFile) -> Signature | None:
    """Return the signature of a file as it is now; None if it is gone."""
    try:
        status = file.path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def open_sources(paths: Sequence[Path]) -> list[ViewSource]:
    """Return the sources at `paths`.

    Raises:
        ConfigError: a path does not exist, is given twice, or contains neither a run nor attempts.
    """
    found: list[ViewSource] = []
    for path in paths:
        if any(source.root.resolve() == path.resolve() for source in found):
            raise ConfigError(f"{str(path)!r} is given twice; give each run once")
        found.append(ViewSource(path, _kind(path), _title(path, [source.title for source in found])))
    return found


def _kind(path: Path) -> Kind:
    if not path.exists():
        raise ConfigError(f"{str(path)!r} does not exist; give the folder of a run or of an evaluation")
    if path.is_file():
        if path.suffix != ".parquet":
            raise ConfigError(f"{str(path)!r} is no Parquet file; give a folder or a file *.parquet")
        return _files([path], path)
    if (path / METRICS).exists() or (path / "config.yaml").exists() or (path / "trajectories").is_dir():
        return "run"
    if (path / ATTEMPTS).exists() or (path / STORE).exists():
        return "evaluation"
    if files := list(path.glob("*.parquet")):
        return _files(files, path)
    raise ConfigError(
        f"{str(path)!r} contains no {METRICS}, no {ATTEMPTS} and no other *.parquet; give the folder of a "
        "run or of an evaluation"
    )


def _files(files: Sequence[Path], path: Path) -> Kind:
    if not any(map(may_have_trajectories, files)):
        raise ConfigError(f"{str(path)!r} has no trajectories; give the folder of a run or of an evaluation")
    return "files"


def _title(path: Path, taken: Sequence[str]) -> str:
    """Return the shortest end of the path that no other source has."""
    parts = path.resolve().parts
    for length in range(1, len(parts) + 1):
        title = "/".join(parts[-length:])
        if title not in taken:
            return title
    raise AssertionError("two different paths have different ends")
