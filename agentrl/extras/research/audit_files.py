"""The second half of `agentrl audit`: compares the journal of a run with the run's other files.

Each comparison returns a line about what it found to agree. What differs, is missing, or cannot be read is a
problem: a comparison that was not made proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.buffer.audit import Audit
from agentrl.buffer.journal import FILE as JOURNAL
from agentrl.buffer.records import ArchivedGroup, count_path
from agentrl.controller.checkpoint import complete_checkpoints, read_checkpoint
from agentrl.data.checkpoint_files import MANIFEST
from agentrl.data.failures import FILE as FAILURES
from agentrl.data.failures import FailureTable
from agentrl.data.folder_index import INDEX, check_folder
from agentrl.data.proximal_files import FOLDER as PROXIMAL
from agentrl.data.proximal_files import groups_of_step
from agentrl.data.trajectories import read_parquet
from agentrl.errors import AgentRLError
from agentrl.extras.research.stored_steps import StoredStep, StoredSteps, read_publishes
from agentrl.extras.storage.uploaded import UploadIndex, own_index
from agentrl.extras.view.sources import ViewSource
from agentrl.extras.view.token_texts import read_config
from agentrl.tracking.closing_table import RESULT, VALIDATIONS, read_result, read_validations
from agentrl.tracking.metrics import StepRecord, read_metrics
from agentrl.tracking.seals import checked_lines, last_checksum, read_document
from agentrl.tracking.versions import VERSIONS, read_versions
from agentrl.types import NO_VERSION

CONFIG, METRICS, ALARMS = "config.yaml", "metrics.jsonl", "alarms.jsonl"


def compare_files(found: Audit, ended: Sequence[ArchivedGroup], folder: Path, bound: int) -> tuple[str, ...]:
    """Compare the files of a run with its journal; add problems to `found`, and return lines of what agrees.

    Args:
        ended: groups that the journal's snapshot has only in totals.
        bound: of the staleness of tokens.
    """
    comparison = _Comparison(found, ended, folder, bound)
    checks: Mapping[str, Callable[[], str]] = {
        CONFIG: comparison.check_config,
        "trajectories": comparison.trajectories,
        METRICS: comparison.metrics,
        "validations": comparison.validations,
        FAILURES: comparison.failures,
        PROXIMAL: comparison.proximal,
        ALARMS: comparison.alarms,
        VERSIONS: comparison.versions,
        "checkpoints": comparison.checkpoints,
        "policy": comparison.policy,
        "last lines": comparison.ends,
        RESULT: comparison.result,
    }
    notes = []
    for what, check in checks.items():
        num_before = found.num_problems
        try:
            note = check()
        except AgentRLError as error:
            found.complain(f"{what} could not be compared: {error}")
            continue
        if found.num_problems == num_before:
            notes.append(note)
    return tuple(notes)


@dataclass
class _Comparison:
    """The comparisons of one run, each of which returns a line, adds problems, or raises AgentRLError."""

    found: Audit
    ended: Sequence[ArchivedGroup]
    folder: Path
    bound: int

    @cached_property
    def config(self) -> dict[str, Any]:
        return read_config(self.folder) if (self.folder / CONFIG).is_file() else {}

    @cached_property
    def records(self) -> list[StepRecord]:
        """All records of the metrics; [] without the file."""
        path = self.folder / METRICS
        return read_metrics(path) if path.is_file() else []

    @cached_property
    def index(self) -> UploadIndex | None:
        """What of the run is in storage; None without an upload."""
        return own_index(self.folder)

    @property
    def has_ended(self) -> bool:
        """Whether the run has made its last step, and everything must be there."""
        try:
            result = read_result(self.folder / RESULT)
        except AgentRLError:  # `result` tells it
            return True
        return result is not None and result[0] == self.found.step

    @property
    def last_complete(self) -> int:
        """The last step whose files must be there: those of later ones may wait to be written."""
        return self.found.step if self.has_ended else self.found.settled

    def _of(self, section: str, key: str, default: Any) -> Any:
        return (self.config.get(section) or {}).get(key, default)

    def _place(self, key: str, name: str) -> Path:
        """Return the folder of trajectories: that of the config, or `name` in the run's."""
        own = self._of("trainer", key, None)
        return Path(own) if own else self.folder / name

    # ------------------------------------------------------------------------------------------------- files

    def check_config(self) -> str:
        if not self.config:
            self.found.complain(f"{CONFIG} is missing: whether trajectories were kept is not known")
        if not count_path(self.folder / JOURNAL).is_file():
            self.found.complain(
                f"{count_path(self.folder / JOURNAL).name} is missing: whether the journal lacks its last "
                "writes is not known"
            )
        return f"{CONFIG}: as the run wrote it"

    def trajectories(self) -> str:
        """Compare each step's file with the groups of the journal and the bound on staleness."""
        if not self._of("trainer", "keep_trajectories", True):
            return "trajectories: not kept (trainer.keep_trajectories=false)"
        batches = self._batches()
        steps = sorted(step for step in batches if step <= self.found.lineage.step)
        place = self._place("rollout_data_dir", "trajectories")
        last = max(steps, default=0)
        files = {step: place / f"step_{step:06d}.parquet" for step in range(1, last + 1)}
        there = [step for step in steps if files[step].is_file()]
        waiting = [step for step in steps if step not in there and not self._is_stored(files[step])]
        for step in waiting:
            if step <= self.last_complete:
                self.found.complain(f"step {step}: its trajectories are missing: there is no {files[step]}")
        stored = StoredSteps(tuple(files.values()), read_publishes(self.folder))
        read = [self._read(stored, step, batches[step]) for step in there]
        num_stored = len(steps) - len(there) - len(waiting)
        notes = [f"trajectories of {len(there)} steps: {sum(read)} groups, as in the journal"]
        notes += [f"those of {len(waiting)} steps are not written yet"] if waiting else []
        notes += [f"those of {num_stored} steps are in storage (agentrl fetch)"] if num_stored else []
        return "; ".join(notes)

    def _is_stored(self, file: Path) -> bool:
        """Return whether a file of the run is only in storage, because the run was continued here."""
        return self.index is not None and f"{file.parent.name}/{file.name}" in self.index.files

    def _batches(self) -> dict[int, set[int]]:
        """Return the groups of each step that counts, those of the archive included."""
        batches = self.found.batches()
        for group in self.ended:
            if not group.dropped_for:
                batches.setdefault(group.step, set()).add(group.group_id)
        return batches

    def _read(self, stored: StoredSteps, step: int, expected: set[int]) -> int:
        """Compare a step's file, and return the number of its groups."""
        try:
            batch = stored.read(step)
        except AgentRLError as error:
            self.found.complain(f"step {step}: its trajectories could not be compared: {error}")
            return 0
        groups = {group.group_id for group in batch.groups}
        if groups != expected:
            self.found.complain(
                f"step {step}: its trajectories are of {len(groups)} groups, {len(groups - expected)} of "
                f"which the journal does not have in it, which has {len(expected - groups)} others"
            )
        self._check_ages(step, batch)
        told = next((r.values for r in self.records if r.kind == "train" and r.step == step), {})
        counted = sum(len(group.trajectories) for group in batch.groups)
        if counted != told.get("rollout/trajectories", counted):
            self.found.complain(
                f"step {step}: it has {counted} trajectories, {METRICS} tells "
                f"{told['rollout/trajectories']:.0f}"
            )
        return len(groups)

    def _check_ages(self, step: int, batch: StoredStep) -> None:
        found_versions = {v for group in batch.groups for t in group.attempts for v, _ in t.versions}
        versions = np.array(sorted(found_versions), np.int32)
        newest = int(versions.max(initial=NO_VERSION))
        if newest > batch.learned_by:
            self.found.complain(
                f"step {step}: a token of version {newest} was trained on by version {batch.learned_by}"
            )
        lag = int(batch.lineage.lags(versions).max(initial=0))
        if lag > self.bound:
            self.found.complain(f"step {step}: a token is {lag} versions old; the bound is {self.bound}")

    def metrics(self) -> str:
        """Check that each step that was published has one record, in order."""
        steps = [record.step for record in self.records if record.kind == "train"]
        published = self.found.lineage.step
        first = min(self._batches(), default=1)
        # A run that has not ended may be killed, or live, between a publish and its record.
        last = published if self.has_ended else max(self.found.settled, published - 1)
        missing = sorted(set(range(first, last + 1)) - set(steps))
        if missing:
            self.found.complain(f"{METRICS} lacks {_numbered(missing)} of {published}")
        if steps != sorted(set(steps)) or max(steps, default=0) > max(published, 0):
            self.found.complain(f"{METRICS}: steps {steps[-3:]} are not those up to {published}, each once")
        return f"{METRICS}: {len(steps)} steps, each once"

    def validations(self) -> str:
        """Check that there is what was validated, by the records of the metrics."""
        validated = [record for record in self.records if record.kind == "validation"]
        if not validated:
            return "validations: none"
        if not read_validations(self.folder / VALIDATIONS):
            self.found.complain(f"{VALIDATIONS} is missing")
        keeps = self._of("trainer", "keep_trajectories", True)
        place = self._place("validation_data_dir", "validation")
        for record in validated if keeps else ():
            path = place / f"step_{record.step:06d}.parquet"
            if not path.is_file() and (record.step > self.last_complete or self._is_stored(path)):
                continue
            batch = read_parquet(path)
            if set(batch.column("step").to_pylist()) - {record.step}:
                self.found.complain(f"{path} is of another step")
            if batch.num_rows != record.values.get("val/trajectories", batch.num_rows):
                self.found.complain(f"the validation after step {record.step} has {batch.num_rows} attempts")
        return f"validations: {len(validated)}, as in {METRICS}"

    def failures(self) -> str:
        """Check that failures were recorded, if the metrics tell of any."""
        names = ("attempts/failed", "val/failed")
        told = sum(int(record.values.get(name, 0)) for record in self.records for name in names)
        path = self.folder / FAILURES
        stored = len(list(FailureTable(path, keeps_earlier=True).earlier()))
        if told and not path.is_file():
            self.found.complain(f"{FAILURES} is missing, and {METRICS} tells of {told} failed attempts")
        return f"{FAILURES}: {stored} failed attempts"

    def proximal(self) -> str:
        """Check that the proximal log-probabilities of each step are of its groups."""
        if not self._of("tracking", "token_ratios", False):
            return f"{PROXIMAL}: not kept (tracking.token_ratios=false)"
        batches = self._batches()
        for step in (record.step for record in self.records if record.kind == "train"):
            groups = groups_of_step(self.folder / PROXIMAL, step)
            first = self.folder / PROXIMAL / f"step_{step:06d}_part0_rank0.parquet"
            if not groups and step <= self.last_complete and not self._is_stored(first):
                self.found.complain(f"step {step}: its file in {PROXIMAL}/ is missing")
            if groups - batches.get(step, groups):
                self.found.complain(f"step {step}: its file in {PROXIMAL}/ is of other groups")
        return f"{PROXIMAL}: of the steps that {METRICS} has"

    def alarms(self) -> str:
        path = self.folder / ALARMS
        if any(record.values.get("alarms/raised") for record in self.records) and not path.is_file():
            self.found.complain(f"{ALARMS} is missing, and {METRICS} tells of alarms")
        lines = list(checked_lines(path)) if path.is_file() else []
        for number, line in enumerate(lines, start=1):
            if b'"event"' not in line or b'"rule"' not in line:
                self.found.complain(f"{ALARMS}: line {number} is no alarm")
        return f"{ALARMS}: {len(lines)} lines"

    def versions(self) -> str:
        """Check that no version was published twice, and that every version of the journal was published."""
        versions = [one.version for one in read_versions(self.folder / VERSIONS)]
        if len(versions) != len(set(versions)):
            self.found.complain(f"{VERSIONS}: a version was published twice")
        known = self.found.lineage.versions
        # Versions of an imported checkpoint were published from another folder.
        for version in known[-1:] if self.found.imported else known:
            if version not in versions:
                self.found.complain(f"version {version} in the journal is not in {VERSIONS}")
        return f"versions: {len(versions)}, no duplicates"

    def checkpoints(self) -> str:
        """Check that the checkpoint on which the journal relies is there, and that files have their sizes."""
        there = complete_checkpoints(self.folder / "checkpoints")
        for folder in sorted((self.folder / "checkpoints").glob("step_*")):
            if folder not in [one.folder for one in there]:
                self.found.complain(f"{folder} has no {MANIFEST}")
        for checkpoint in there:
            read_checkpoint(checkpoint.folder)
        settled = self.found.settled
        if settled and not self.found.imported and settled not in [one.step for one in there]:
            self.found.complain(
                f"the checkpoint of step {settled} is missing: the journal cannot go back before that step"
            )
        return f"checkpoints: {len(there)}"

    @cached_property
    def _ends(self) -> dict[str, int]:
        """The checksums of last lines that the run told at its end; {} before it, and of earlier versions."""
        path = self.folder / RESULT
        found: dict[str, int] = read_document(path).get("ends", {}) if path.is_file() else {}
        return found

    def ends(self) -> str:
        """Check that no last line is missing of files that grow by lines."""
        for name, checksum in self._ends.items() if self.has_ended else ():
            if last_checksum(self.folder / name) != checksum:
                self.found.complain(f"{name} does not end as it did when the run ended: lines are missing")
        return "last lines: as at the end of the run" if self._ends else "last lines: not compared"

    def policy(self) -> str:
        """Check the exported policy, which the run writes at its end."""
        folder = self.folder / "policy"
        if self.has_ended and not folder.is_dir():
            self.found.complain(f"{folder} is missing")
        if self._ends and not (folder / INDEX).is_file():
            self.found.complain(f"{folder / INDEX} is missing: whether the policy was changed is not known")
        check_folder(folder)
        return "policy: as the run wrote it"

    def result(self) -> str:
        """Check the totals in the run's result against the journal."""
        result = read_result(self.folder / RESULT)
        if result is None:
            is_live = ViewSource(self.folder, "run", "").is_live
            if not is_live and (self.folder / "policy").is_dir():
                self.found.complain(f"{RESULT} is missing, and the run has written its policy")
            return f"{RESULT}: none, the run has not ended"
        step, told = result
        if step < self.found.step:
            return f"{RESULT}: of step {step}, the run has gone on to {self.found.step}"
        counts = self.found.counts()
        if step > self.found.step:
            if not self.found.num_rollbacks and not self.found.imported:
                self.found.complain(f"{RESULT} is of step {step}, the journal ends with {self.found.step}")
            return f"{RESULT}: of step {step}, the run went back to {self.found.step}"
        if counts["consumed"] != told.consumed:
            self.found.complain(
                f"{RESULT} tells {told.consumed} consumed groups, the journal {counts['consumed']}"
            )
        if sum(counts.values()) != told.drawn:
            self.found.complain(
                f"{RESULT} tells {told.drawn} drawn groups, the journal {sum(counts.values())}"
            )
        return f"{RESULT}: {told.consumed} groups consumed, as in the journal"


def _numbered(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:5])) + (", ..." if len(steps) > 5 else "")
    return f"step{'s' if len(steps) > 1 else ''} {shown}"
