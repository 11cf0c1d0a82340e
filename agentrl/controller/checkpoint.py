"""The checkpoints of a run on disk.

Each is complete or absent: written to a partial folder, hashed, synced, renamed. Ranks hash and sync the
files that they write; the controller reads only files of its own.

```
checkpoints/step_000020/
  manifest.json   {format, step, version, metric, block_bytes, files: {path: [bytes, sha256]}}   written last
  learner/        DCP: model, optimizer, schedule, random state
                  model.json, huggingface/: all that `agentrl export` needs
  buffer.bin      dataset cursor, ledger, ready groups
```
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.config.trainer import TrainerConfig
from agentrl.data.atomic_files import sync, write_atomically
from agentrl.data.checkpoint_files import (
    BLOCK_BYTES,
    FORMAT,
    MANIFEST,
    Manifest,
    StoredFile,
    damage_of_file,
    damage_of_sizes,
    read_manifest,
    stored_file,
)
from agentrl.errors import CheckpointError, ConfigError, DiskError

_BUFFER = "buffer.bin"
_LEARNER = "learner"
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
        return self.folder / _LEARNER

    def is_in(self, parent: Path) -> bool:
        """Return whether the checkpoint is in `parent`; both paths are resolved first."""
        return self.folder.resolve().parent == parent.resolve()

    def buffer_state(self) -> bytes:
        return (self.folder / _BUFFER).read_bytes()


# ------------------------------------------------------------------------------------------------------ write


def begin(parent: Path, *, step: int, buffer_state: bytes) -> Path:
    """Create the partial folder for the checkpoint of `step`. Readers ignore it until `complete` renames it.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    partial = parent / f"{_PARTIAL}{_name(step)}"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / _LEARNER).mkdir(parents=True)
        (partial / _BUFFER).write_bytes(buffer_state)
    except OSError as error:
        raise unwritten(partial, error) from error
    return partial


def complete(
    partial: Path, written: Sequence[StoredFile], *, step: int, version: int, metric: float | None
) -> Checkpoint:
    """Write the manifest into the folder of `begin`, and rename the folder to its final name.

    Args:
        written: files below `learner/` that the ranks wrote, synced and hashed. They are not opened here.

    Raises:
        CheckpointError: a write failed; the folder is removed, earlier checkpoints are untouched.
    """
    parent = partial.parent
    final, replaced = parent / _name(step), parent / f"{_REPLACED}{_name(step)}"
    try:
        # First the manifest, when all files are synced, then the rename: a crash in between leaves a partial
        # folder.
        manifest = Manifest(
            format=FORMAT,
            step=step,
            version=version,
            metric=metric,
            files=_all_files(partial, written),
            block_bytes=BLOCK_BYTES,
        )
        write_atomically(partial / MANIFEST, manifest.to_json())
        if final.exists():  # the step was made again after a resume from an earlier one
            final.rename(replaced)
        partial.rename(final)
        sync(parent)
    except (OSError, DiskError) as error:
        raise unwritten(partial, error) from error
    shutil.rmtree(replaced, ignore_errors=True)
    return Checkpoint(final, step, version, metric)


def _all_files(partial: Path, written: Sequence[StoredFile]) -> dict[str, tuple[int, str]]:
    """Return size and hash of every file; those that no rank wrote are the controller's own.

    Raises:
        OSError: a file that a rank wrote is not here, or not whole.
    """
    files = {f"{_LEARNER}/{file.path}": (file.num_bytes, file.sha256) for file in written}
    if damage := damage_of_sizes(partial, files):
        raise OSError(f"{damage}, after a rank wrote it; checkpoints need a folder that all nodes share")
    for path in partial.rglob("*"):
        if path.is_dir():
            sync(path)
        elif (name := str(path.relative_to(partial))) not in files:
            own = stored_file(partial, path)
            files[name] = own.num_bytes, own.sha256
    sync(partial)
    return dict(sorted(files.items()))


def save_checkpoint(
    parent: Path,
    *,
    step: int,
    version: int,
    save_learner: Callable[[str], Sequence[StoredFile]],
    buffer_state: bytes,
    keep_last: int,
) -> Checkpoint:
    """Write the checkpoint of `step` synchronously, then remove all but the newest `keep_last`.

    Args:
        save_learner: writes into a folder and returns the files with paths relative to it.

    Raises:
        CheckpointError: it could not be written; earlier checkpoints are untouched.
    """
    partial = begin(parent, step=step, buffer_state=buffer_state)
    try:
        written = save_learner(str(partial / _LEARNER))
    except OSError as error:
        raise unwritten(partial, error) from error
    checkpoint = complete(partial, written, step=step, version=version, metric=None)
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
    others = [other for other in complete_checkpoints(parent) if other.step > last]
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


def prune(parent: Path, trainer: TrainerConfig, *, pinned: Collection[str] = ()) -> None:
    """Remove all checkpoints but the newest `keep_last`, the best `keep_best`, and the folders `pinned`."""
    found = complete_checkpoints(parent)
    kept = {c.step for c in found[-trainer.keep_last :]} | {c.step for c in _best(found, trainer)}
    for checkpoint in found:
        if checkpoint.step not in kept and checkpoint.folder.name not in pinned:
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
    """Return the checkpoint in `folder`, if its files have the right sizes. See `verification` for the rest.

    Raises:
        ConfigError: the folder contains no checkpoint.
        CheckpointError: the checkpoint is damaged.
    """
    if not (folder / MANIFEST).is_file():
        why = f"is not a checkpoint: it has no {MANIFEST}" if folder.exists() else "does not exist"
        raise ConfigError(f"{str(folder)!r} {why}; {_meant(folder)}")
    checkpoint = _read(folder)
    if damage := _own_damage(checkpoint):
        raise damaged(checkpoint, damage)
    return checkpoint


def _meant(folder: Path) -> str:
    """Return what somebody may have meant who named `folder` as a checkpoint: what is in it or beside it."""
    if (folder / "config.json").is_file():
        return "it is a model in Hugging Face format already"
    for place in (folder, folder / "checkpoints", folder.parent):
        if found := complete_checkpoints(place):
            policy = folder / "policy"
            is_ended = (policy / "config.json").is_file()
            exported = f", or use {policy}, the exported policy" if is_ended else ""
            return f"the newest is {found[-1].folder}{exported}"
    return "checkpoints are folders such as RUN/checkpoints/step_000020"


def find_checkpoint(parent: Path, trainer: TrainerConfig) -> Checkpoint | None:
    """Return the checkpoint that `trainer.resume_mode` asks for; None for a fresh start.

    All files have the right sizes, and the controller's own are verified. The ranks verify theirs before they
    load them.

    Raises:
        ConfigError: resume_mode names a folder that is not a checkpoint.
        CheckpointError: the checkpoint is damaged; the message names an older one if there is one.
    """
    if trainer.resume_mode == "disable":
        return None
    if trainer.resume_mode == "auto":
        found = complete_checkpoints(parent)
        if not found:
            return None
        checkpoint = found[-1]
    else:
        folder = Path(trainer.resume_mode)
        if not (folder / MANIFEST).is_file():
            raise ConfigError(
                f"trainer.resume_mode={trainer.resume_mode!r} is wrong; use auto, disable, or the folder of "
                "a checkpoint"
            )
        checkpoint = _read(folder)
    if damage := _own_damage(checkpoint):
        raise damaged(checkpoint, damage, parent=parent)
    return checkpoint


def damaged(checkpoint: Checkpoint, damage: str, *, parent: Path | None = None) -> CheckpointError:
    """Return the error for a damaged checkpoint.

    parent: checkpoints of the run that would resume from it; the error names the newest older one of them.
    """
    older = [] if parent is None else [c for c in complete_checkpoints(parent) if c.step < checkpoint.step]
    cure = f"; trainer.resume_mode={older[-1].folder} is older" if older else ""
    return CheckpointError(f"checkpoint {checkpoint.folder} is damaged: {damage}{cure}")


def complete_checkpoints(parent: Path) -> list[Checkpoint]:
    """Return the complete checkpoints in a folder, the oldest first."""
    return [_read(folder) for folder in sorted(parent.glob("step_*")) if (folder / MANIFEST).is_file()]


def _read(folder: Path) -> Checkpoint:
    manifest = read_manifest(folder)
    return Checkpoint(folder, manifest.step, manifest.version, manifest.metric)


def _own_damage(checkpoint: Checkpoint) -> str | None:
    """Return what is wrong with the sizes of all files or with the controller's own files; None: nothing."""
    files = read_manifest(checkpoint.folder).files
    if damage := damage_of_sizes(checkpoint.folder, files):
        return damage
    own = {path: file for path, file in files.items() if not path.startswith(f"{_LEARNER}/")}
    return next((line for path in own if (line := damage_of_file(checkpoint.folder, path, own[path]))), None)
