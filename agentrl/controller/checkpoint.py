"""The checkpoints of a run on disk.

Each is complete or absent: written to a partial folder, hashed, synced, renamed.

```
checkpoints/step_000020/
  manifest.json   {format, step, version, metric, files: {path: [bytes, sha256]}}   written last
  learner/        DCP: model, optimizer, schedule, random state
                  model.json, huggingface/: all that `agentrl export` needs
  buffer.bin      dataset cursor, ledger, ready groups
```
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, Field

from agentrl.config.trainer import TrainerConfig
from agentrl.data.atomic_files import sync, write_atomically
from agentrl.errors import CheckpointError, ConfigError, DiskError

FORMAT = 2
_PARTIAL = ".partial_"
_REPLACED = ".replaced_"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk.

    `metric`: validation metric of its step, None if it was not validated.
    """

    folder: Path
    step: int
    version: int
    metric: float | None

    @property
    def learner(self) -> Path:
        return self.folder / "learner"

    def is_in(self, parent: Path) -> bool:
        """Return whether the checkpoint is in `parent`; both paths are resolved first."""
        return self.folder.resolve().parent == parent.resolve()

    def buffer_state(self) -> bytes:
        return (self.folder / "buffer.bin").read_bytes()


# ------------------------------------------------------------------------------------------------------ write


def begin(parent: Path, *, step: int, buffer_state: bytes) -> Path:
    """Create the partial folder for the checkpoint of `step`. Readers ignore it until `complete` renames it.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    partial = parent / f"{_PARTIAL}{_name(step)}"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "learner").mkdir(parents=True)
        (partial / "buffer.bin").write_bytes(buffer_state)
    except OSError as error:
        raise unwritten(partial, error) from error
    return partial


def complete(partial: Path, *, step: int, version: int, metric: float | None) -> Checkpoint:
    """Hash and sync the files in the folder of `begin`, and rename it to its final name.

    Raises:
        CheckpointError: a write failed; the folder is removed, earlier checkpoints are untouched.
    """
    parent = partial.parent
    final, replaced = parent / _name(step), parent / f"{_REPLACED}{_name(step)}"
    try:
        # First the manifest, which syncs all files, then the rename: a crash in between leaves a partial
        # folder.
        _write_manifest(partial, step=step, version=version, metric=metric)
        if final.exists():  # the step was made again after a resume from an earlier one
            final.rename(replaced)
        partial.rename(final)
        sync(parent)
    except (OSError, DiskError) as error:
        raise unwritten(partial, error) from error
    shutil.rmtree(replaced, ignore_errors=True)
    return Checkpoint(final, step, version, metric)


def save_checkpoint(
    parent: Path,
    *,
    step: int,
    version: int,
    save_learner: Callable[[str], None],
    buffer_state: bytes,
    keep_last: int,
) -> Checkpoint:
    """Write the checkpoint of `step` synchronously, then remove all but the newest `keep_last`.

    Raises:
        CheckpointError: it could not be written; earlier checkpoints are untouched.
    """
    partial = begin(parent, step=step, buffer_state=buffer_state)
    try:
        save_learner(str(partial / "learner"))
    except OSError as error:
        raise unwritten(partial, error) from error
    checkpoint = complete(partial, step=step, version=version, metric=None)
    prune(parent, TrainerConfig(keep_last=keep_last))
    return checkpoint


def unwritten(partial: Path, error: Exception) -> CheckpointError:
    """Remove the partial folder and return the error to raise."""
    shutil.rmtree(partial, ignore_errors=True)
    name = partial.name.removeprefix(_PARTIAL)
    return CheckpointError(
        f"checkpoint {name} could not be written to {partial.parent}: {error}; earlier checkpoints are "
        "unchanged"
    )


def tidy(parent: Path) -> None:
    """Remove partial checkpoints of an interrupted run. No process may be writing to `parent`."""
    for replaced in parent.glob(f"{_REPLACED}*"):
        final = parent / replaced.name.removeprefix(_REPLACED)
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:  # interrupted between the two renames
            replaced.rename(final)
    for partial in parent.glob(f"{_PARTIAL}*"):
        shutil.rmtree(partial, ignore_errors=True)


def put_aside(parent: Path, checkpoint: Checkpoint | None) -> str | None:
    """Move checkpoints that are no ancestors of this run to `before_NNN`, and return a message, or None.

    They are later steps of an abandoned branch, or belong to another run. If they stayed, a resume would pick
    the newest of them, and `prune` would remove this run's own checkpoints, whose steps are smaller.

    Args:
        checkpoint: the one that this run resumes from; None: it starts from the initial weights.
    """
    last = checkpoint.step if checkpoint is not None and checkpoint.is_in(parent) else -1
    others = [other for other in _complete(parent) if other.step > last]
    if not others:
        return None
    aside = parent / f"before_{len(list(parent.glob('before_*'))):03d}"
    aside.mkdir()
    for other in reversed(others):  # newest first: after an interruption, the rest is still one branch
        other.folder.rename(aside / other.folder.name)
    sync(parent)
    begin_with = "nothing" if checkpoint is None else str(checkpoint.folder)
    return (
        f"{len(others)} checkpoint(s), up to {others[-1].folder.name}, were moved to {aside}: this run "
        f"starts with {begin_with}"
    )


def prune(parent: Path, trainer: TrainerConfig) -> None:
    """Remove all checkpoints but the newest `keep_last` and the best `keep_best`."""
    found = _complete(parent)
    kept = {c.step for c in found[-trainer.keep_last :]} | {c.step for c in _best(found, trainer)}
    for checkpoint in found:
        if checkpoint.step not in kept:
            shutil.rmtree(checkpoint.folder, ignore_errors=True)


def _best(found: Sequence[Checkpoint], trainer: TrainerConfig) -> list[Checkpoint]:
    """Return the best `keep_best` checkpoints that have a metric; ties go to the newer."""
    sign = 1 if trainer.best_mode == "max" else -1
    measured = [(sign * c.metric, c.step, c) for c in found if c.metric is not None]
    return [
        checkpoint
        for _, _, checkpoint in sorted(measured, key=lambda m: m[:2], reverse=True)[: trainer.keep_best]
    ]


def _name(step: int) -> str:
    return f"step_{step:06d}"


# ------------------------------------------------------------------------------------------------------- read


def read_checkpoint(folder: Path) -> Checkpoint:
    """Return the checkpoint in `folder` after verifying all its files.

    Raises:
        ConfigError: the folder contains no checkpoint.
        CheckpointError: the checkpoint is damaged.
    """
    if not (folder / "manifest.json").is_file():
        raise ConfigError(
            f"{str(folder)!r} is not a checkpoint: it has no manifest.json; checkpoints are folders such as "
            "checkpoints/step_000020"
        )
    checkpoint = _read(folder)
    _verify(checkpoint, older=[])
    return checkpoint


def find_checkpoint(parent: Path, trainer: TrainerConfig) -> Checkpoint | None:
    """Return the checkpoint that `trainer.resume_mode` asks for, verified; None for a fresh start.

    Raises:
        ConfigError: resume_mode names a folder that is not a checkpoint.
        CheckpointError: the checkpoint is damaged; the message names an older one if there is one.
    """
    if trainer.resume_mode == "disable":
        return None
    if trainer.resume_mode == "auto":
        found = _complete(parent)
        if not found:
            return None
        checkpoint = found[-1]
    else:
        folder = Path(trainer.resume_mode)
        if not (folder / "manifest.json").is_file():
            raise ConfigError(
                f"trainer.resume_mode={trainer.resume_mode!r} is wrong; use auto, disable, or the folder of "
                "a checkpoint"
            )
        checkpoint = _read(folder)
    _verify(checkpoint, older=[c for c in _complete(parent) if c.step < checkpoint.step])
    return checkpoint


def _complete(parent: Path) -> list[Checkpoint]:
    return [_read(folder) for folder in sorted(parent.glob("step_*")) if (folder / "manifest.json").is_file()]


def _read(folder: Path) -> Checkpoint:
    manifest = _manifest(folder)
    return Checkpoint(folder, manifest.step, manifest.version, manifest.metric)


class _Manifest(BaseModel):
    """The content of manifest.json. files: path -> (bytes, sha256)."""

    format: int
    step: int = Field(ge=0)
    version: int
    metric: float | None
    files: dict[str, tuple[int, str]]


def _manifest(folder: Path) -> _Manifest:
    path = folder / "manifest.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(data, dict) and data.get("format") != FORMAT:
            raise CheckpointError(f"{folder} has format {data.get('format')!r}, this version reads {FORMAT}")
        return _Manifest.model_validate(data)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or other fields
        raise CheckpointError(
            f"checkpoint {folder} is damaged: manifest.json: {' '.join(str(error).split())[:200]}"
        ) from error


def _write_manifest(folder: Path, *, step: int, version: int, metric: float | None) -> None:
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        sync(path)
        files[str(path.relative_to(folder))] = [path.stat().st_size, _sha256(path)]
    manifest = {"format": FORMAT, "step": step, "version": version, "metric": metric, "files": files}
    write_atomically(folder / "manifest.json", json.dumps(manifest, indent=1))


def _verify(checkpoint: Checkpoint, *, older: list[Checkpoint]) -> None:
    for name, (size, digest) in _manifest(checkpoint.folder).files.items():
        path = checkpoint.folder / name
        if not path.is_file() or path.stat().st_size != size or _sha256(path) != digest:
            cure = f"; trainer.resume_mode={older[-1].folder} is older" if older else ""
            raise CheckpointError(
                f"checkpoint {checkpoint.folder} is damaged: {name} is missing or changed{cure}"
            )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
