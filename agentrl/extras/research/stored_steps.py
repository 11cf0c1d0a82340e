"""`StoredSteps`: reads a run's stored trajectories step by step, as the learner got them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.buffer.journal import FILE as JOURNAL
from agentrl.buffer.lineage import Lineage
from agentrl.controller.credit import group_attempts
from agentrl.data.attempt_facts import AttemptFacts
from agentrl.data.image_files import FOLDER as IMAGES
from agentrl.data.parquet_files import open_parquet, reading_parquet
from agentrl.data.trajectories import WHAT, read_trajectories
from agentrl.errors import DataError
from agentrl.tracking.versions import VERSIONS, read_versions
from agentrl.types import Group

_STEP_FILE = re.compile(r"step_(\d+)\.parquet")


@dataclass(frozen=True, slots=True)
class StoredStep:
    """A stored batch.

    step: counted from 1. groups: in the order in which they were trained on.
    lineage: versions up to the one that was trained on the batch.
    """

    step: int
    groups: tuple[Group[AttemptFacts], ...]
    lineage: Lineage

    @property
    def learned_by(self) -> int:
        return self.lineage.version


@dataclass(frozen=True, slots=True)
class StoredSteps:
    """The files of a run's steps 1 to `num_steps`, without gaps.

    publishes: (version, step) of every published policy, in order; empty without the run's versions.jsonl.
    """

    files: tuple[Path, ...]
    publishes: tuple[tuple[int, int], ...] = ()

    @property
    def num_steps(self) -> int:
        return len(self.files)

    @classmethod
    def find(cls, folder: Path) -> StoredSteps:
        """Find the step files in a run's folder or its `trajectories` folder.

        Files of later steps, which the run rolled back, are left out.

        Raises:
            DataError: there are no files, a step is missing, or a publish is missing in versions.jsonl.
            CheckpointError: versions.jsonl is damaged.
        """
        for place in (folder / "trajectories", folder):
            found = {
                int(m[1]): path
                for path in place.glob("step_*.parquet")
                if (m := _STEP_FILE.fullmatch(path.name))
            }
            if found:
                break
        else:
            raise DataError(
                f"{str(folder)!r} contains no trajectories; give a run's folder, or a folder of "
                "step_000001.parquet, ..."
            )
        publishes = read_publishes(place.parent)
        if publishes:
            _check_publishes(found, publishes)
        elif (place.parent / JOURNAL).is_file():
            raise DataError(f"{place.parent / VERSIONS} is missing: the ages of tokens are not known")
        last = min(max(found), publishes[-1][1]) if publishes else max(found)
        missing = [step for step in range(1, last + 1) if step not in found]
        if missing:
            raise DataError(
                f"{place}: step_{missing[0]:06d}.parquet is missing; a replay needs every step up to the "
                f"last, {last}"
            )
        return cls(tuple(found[step] for step in range(1, last + 1)), publishes)

    def read(self, step: int) -> StoredStep:
        """Read step `step`, counted from 1.

        Raises:
            DataError: the file is damaged, or contains no trajectories of this step in a known format.
        """
        file = self.files[step - 1]
        trajectories, batch = read_trajectories(file, images=file.parent.parent / IMAGES)
        found = set(batch.column("step").to_pylist()) if "step" in batch.schema.names else set()
        if found - {step}:
            raise DataError(f"{file} contains step {min(found)}, not {step}")
        groups = tuple(group_attempts([AttemptFacts.of(t) for t in trajectories]))
        if "learned_by" in batch.schema.names and batch.num_rows > 0:
            version = batch.column("learned_by")[0].as_py()
        else:  # a lower bound, for files without it: the newest version of any token
            versions = (v for group in groups for t in group.trajectories for v, _ in t.versions)
            version = max(versions, default=-1)
        lineage = Lineage.of(publish for publish in self.publishes if publish[0] <= version)
        if lineage.version != version:
            lineage = Lineage.of([(version, 0)])
        return StoredStep(step, groups, lineage)


def read_publishes(run: Path) -> tuple[tuple[int, int], ...]:
    """Return (version, step) of every policy that a run published, in order.

    Raises:
        CheckpointError: versions.jsonl is damaged.
    """
    found: list[tuple[int, int]] = []
    for one in read_versions(run / VERSIONS):
        # Duplicate versions are skipped here; `agentrl audit` reports them.
        if one.what == "policy" and (not found or one.version > found[-1][0]):
            found.append((one.version, one.step))
    return tuple(found)


def _check_publishes(files: Mapping[int, Path], publishes: Sequence[tuple[int, int]]) -> None:
    """Check that no publish is missing: a version learned from each step, which led to a later one.

    Raises:
        DataError: one is missing, or a file is damaged.
    """
    for step, file in files.items():
        with reading_parquet(file, WHAT), open_parquet(file, WHAT) as parquet:
            if "learned_by" not in parquet.schema_arrow.names or not parquet.metadata.num_rows:
                continue
            learned_by = parquet.read(["learned_by"])["learned_by"][0].as_py()
        if learned_by not in {version for version, _ in publishes}:
            what = f"version {learned_by}, which learned from step {step}"
        elif not any(own == step and version > learned_by for version, own in publishes):
            what = f"the version that step {step} led to"
        else:
            continue
        raise DataError(f"{file.parent.parent / VERSIONS} lacks {what}: lines are missing")


def is_fresh(attempt: AttemptFacts, version: int) -> bool:
    """Return whether every token of the attempt was sampled by `version` (or a newer one)."""
    return attempt.num_action_tokens > 0 and attempt.min_version >= version
