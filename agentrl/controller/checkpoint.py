"""Checkpoints: whole or absent. Written beside, hashed, synced, renamed; an interrupted one is never found.

```
checkpoints/step_000020/
  manifest.json   {format, step, version, files: {path: [bytes, sha256]}}   written last
  learner/        DCP: model, optimizer, schedule, random state
  buffer.bin      dataset cursor, ledger, ready groups
```
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agentrl.config.schema import TrainerConfig
from agentrl.controller.run_dir import write_atomically
from agentrl.errors import CheckpointError, ConfigError

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    folder: Path
    step: int
    version: int

    @property
    def learner(self) -> Path:
        return self.folder / "learner"

    def buffer_state(self) -> bytes:
        return (self.folder / "buffer.bin").read_bytes()


def save_checkpoint(
    parent: Path, *, step: int, version: int, save_learner: Callable[[str], None], buffer_state: bytes, keep_last: int
) -> Checkpoint:
    """Write the checkpoint of `step` and then remove all but the newest `keep_last`.

    Raises:
        CheckpointError: it could not be written; earlier checkpoints are untouched.
    """
    final = parent / f"step_{step:06d}"
    partial = parent / f".partial_step_{step:06d}"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        (partial / "learner").mkdir(parents=True)
        save_learner(str(partial / "learner"))
        (partial / "buffer.bin").write_bytes(buffer_state)
        _write_manifest(partial, step=step, version=version)
        if final.exists():  # the same step again after a resume from before it
            shutil.rmtree(final)
        partial.rename(final)
        _sync(parent)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"checkpoint of step {step} could not be written to {parent}: {error}; earlier ones are untouched") from error
    for old in _complete(parent)[:-keep_last]:
        shutil.rmtree(old.folder, ignore_errors=True)
    return Checkpoint(final, step, version)


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
            raise ConfigError(f"trainer.resume_mode={trainer.resume_mode!r} is neither auto nor disable nor a checkpoint's folder")
        checkpoint = _read(folder)
    _verify(checkpoint, older=[c for c in _complete(parent) if c.step < checkpoint.step])
    return checkpoint


def _complete(parent: Path) -> list[Checkpoint]:
    return [_read(folder) for folder in sorted(parent.glob("step_*")) if (folder / "manifest.json").is_file()]


def _read(folder: Path) -> Checkpoint:
    manifest = json.loads((folder / "manifest.json").read_text())
    if manifest["format"] != FORMAT:
        raise CheckpointError(f"{folder} has format {manifest['format']}, this version reads {FORMAT}")
    return Checkpoint(folder, manifest["step"], manifest["version"])


def _write_manifest(folder: Path, *, step: int, version: int) -> None:
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        _sync(path)
        files[str(path.relative_to(folder))] = [path.stat().st_size, _sha256(path)]
    write_atomically(folder / "manifest.json", json.dumps({"format": FORMAT, "step": step, "version": version, "files": files}, indent=1))


def _verify(checkpoint: Checkpoint, *, older: list[Checkpoint]) -> None:
    manifest = json.loads((checkpoint.folder / "manifest.json").read_text())
    for name, (size, digest) in manifest["files"].items():
        path = checkpoint.folder / name
        if not path.is_file() or path.stat().st_size != size or _sha256(path) != digest:
            cure = f"; trainer.resume_mode={older[-1].folder} is older" if older else ""
            raise CheckpointError(f"checkpoint {checkpoint.folder} is damaged: {name} is missing or changed{cure}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
