"""`RunDir`: the folder of a run, which contains its complete state.

```
config.yaml        the resolved config            metrics.jsonl   one record per step and validation
versions.jsonl     every version ever published   checkpoints/    step_000020/ ...
weights/           versions, while it runs        trajectories/   step_000001.parquet ...
validation/        step_000010.parquet ...        servers/        logs of the servers
validations.json   of baselines, initial, final   alarms.jsonl    alarms raised and cleared
alarms/            the groups they concern        failures.parquet   every failed attempt
proximal/          step_000001_part0_rank0.parquet ...   with tracking.token_ratios
columns/           values and KL per token, during the step that needs them
attempts/          trajectories that wait for their batch, one file per delivery of a rollout actor
opponents/         step_000020_v21/ ... the policies that opponents were replaced by
adapters/          of the policy, and of roles in folders within, at the end of a run with model.lora.roles
result.json  summary.md  report.png
```
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from agentrl.config.rollout import WeightsConfig
from agentrl.config.trainer import TrainerConfig
from agentrl.data.atomic_files import write_atomically
from agentrl.data.checkpoint_files import MANIFEST, read_manifest
from agentrl.data.image_files import FOLDER as IMAGES
from agentrl.data.proximal_files import FOLDER as PROXIMAL
from agentrl.data.token_columns import FOLDER as COLUMNS
from agentrl.errors import ConfigError
from agentrl.tracking.closing_table import VALIDATIONS, read_validations
from agentrl.tracking.seals import sealed_document, sealed_text
from agentrl.tracking.unwritten import AppendedFile
from agentrl.tracking.versions import VERSIONS, read_versions


def run_root(trainer: TrainerConfig) -> Path:
    """Return the folder of a run."""
    named = Path("runs") / trainer.project_name / trainer.experiment_name
    return Path(trainer.run_dir) if trainer.run_dir else named


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths of a run, and the lock that excludes a second process."""

    root: Path
    lock: IO[str]
    rollout_data: Path
    validation_data: Path
    versions: AppendedFile

    @classmethod
    def open(cls, trainer: TrainerConfig, resolved_config: str) -> RunDir:
        """Create the folder if needed, lock it, and write the resolved config (YAML).

        Raises:
            ConfigError: the folder cannot be written, or another run has locked it.
        """
        root = run_root(trainer)
        try:
            for name in ("checkpoints", "servers", "weights"):
                (root / name).mkdir(parents=True, exist_ok=True)
            lock = (root / ".lock").open("w")
        except OSError as error:
            raise ConfigError(f"trainer.run_dir {str(root)!r} cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            raise ConfigError(
                f"run folder {str(root)!r} is in use by another run; choose another trainer.run_dir"
            ) from error
        write_atomically(root / "config.yaml", sealed_text(resolved_config))
        return cls(
            root,
            lock,
            Path(trainer.rollout_data_dir) if trainer.rollout_data_dir else root / "trajectories",
            Path(trainer.validation_data_dir) if trainer.validation_data_dir else root / "validation",
            AppendedFile(root / VERSIONS),
        )

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def columns(self) -> Path:
        return self.root / COLUMNS

    @property
    def proximal(self) -> Path:
        return self.root / PROXIMAL

    @property
    def images(self) -> Path:
        """Folder of the images in trajectories; absolute, for processes that run elsewhere."""
        return self.root.resolve() / IMAGES

    def weights(self, config: WeightsConfig) -> Path:
        """Return the folder of the disk transport."""
        return Path(config.folder) if config.folder else self.root / "weights"

    # -------------------------------------------------------------------------------------------- validations

    def read_validations(self) -> dict[str, dict[str, float]]:
        """Return the validation metrics of this run by policy (a baseline, `initial`, `final`)."""
        return read_validations(self.root / VALIDATIONS)

    def write_validations(self, results: Mapping[str, Mapping[str, float]]) -> None:
        write_atomically(self.root / VALIDATIONS, sealed_document(results))

    def close(self) -> None:
        self.versions.close()
        self.lock.close()

    # ----------------------------------------------------------------------------------------------- versions

    def next_version(self) -> int:
        """Return a version that was never published in this folder.

        Lines of versions.jsonl may be lost: checkpoints and published weights know versions, too.

        Raises:
            CheckpointError: versions.jsonl or a checkpoint is damaged.
        """
        saved = (read_manifest(file.parent) for file in self.checkpoints.glob(f"**/{MANIFEST}"))
        weights = (folder.name for folder in (self.root / "weights").glob("v[0-9]*") if folder.is_dir())
        known = {*self.published(), *(one.version for one in saved), *(int(name[1:]) for name in weights)}
        return max(known, default=-1) + 1

    def published(self) -> dict[int, int]:
        """Return version -> step of everything that was published from this folder.

        Raises:
            CheckpointError: versions.jsonl is damaged.
        """
        return {one.version: one.step for one in read_versions(self.root / VERSIONS)}

    def journal_version(self, version: int, *, step: int, what: str) -> None:
        """Record `version` durably BEFORE any server gets it, so that a crash can never lead to its reuse.

        Raises:
            OSError: the write failed; the record is written with the next one.
        """
        record = {"version": version, "step": step, "what": what, "time": time.time()}
        self.versions.append_records(json.dumps(record).encode())
        os.fsync(self.versions.fileno())
