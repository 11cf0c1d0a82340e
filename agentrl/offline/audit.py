"""`agentrl audit RUN`: replays the journal event by event, and compares it with the run's other files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from agentrl.buffer.audit import CONSUMED, Audit, audit
from agentrl.buffer.events import Event
from agentrl.buffer.journal import FILE
from agentrl.buffer.records import ArchivedGroup, Records
from agentrl.data.attempt_facts import AttemptFacts
from agentrl.data.attempt_files import FOLDER
from agentrl.errors import CheckpointError, ConfigError, DataError, DiskError
from agentrl.offline.stored_steps import StoredSteps
from agentrl.types import NO_VERSION


@dataclass(frozen=True, slots=True)
class RunAudit:
    """The audit of a journal, with the staleness bound, each group's task, and notes on other files.

    ended: groups that the journal's snapshot has only in totals.
    """

    audit: Audit
    ended: tuple[ArchivedGroup, ...]
    max_staleness: int
    tasks: dict[int, str]
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        found, counts = self.audit, self.audit.counts()
        drawn = sum(counts.values())
        lines = [
            f"{found.num_events:,} events, {drawn:,} groups of {len(set(self.tasks.values())):,} tasks, step "
            f"{found.step}, version {found.lineage.version}, undone {found.num_rollbacks} times",
            " + ".join(f"{count} {state}" for state, count in counts.items()) + f" = {drawn} drawn",
            f"dropped: {_listed(found.dropped())}",
            f"came back: {_listed(found.came_back())}",
            f"attempts discarded: {_listed(dict(found.discarded))}",
            f"taken into batches: {found.num_taken} groups, of which {counts['consumed']} count; "
            f"maximum lag {found.max_lag} (bound {self.max_staleness})",
            *self.notes,
        ]
        lines += [f"PROBLEM: {problem}" for problem in found.problems]
        hidden = found.num_problems - len(found.problems)
        if hidden:
            lines.append(f"... and {hidden} more")
        lines.append("balanced" if found.is_balanced else f"NOT balanced: {found.num_problems} problems")
        return lines

    def by_task(self) -> list[dict[str, object]]:
        """Return the number of groups in each state per task; dropped groups are counted by reason."""
        rows: dict[str, dict[str, int]] = {}
        for group_id, life in self.audit.groups.items():
            row = rows.setdefault(self.tasks.get(group_id, "?"), {})
            state = (
                f"dropped: {life.dropped_for}" if life.dropped_for and life.state == "dropped" else life.state
            )
            row[state] = row.get(state, 0) + 1
        for group in self.ended:
            row = rows.setdefault(group.task_id, {})
            state = f"dropped: {group.dropped_for}" if group.dropped_for else CONSUMED
            row[state] = row.get(state, 0) + 1
        return [{"task": task, **states} for task, states in sorted(rows.items())]

    def to_json(self) -> str:
        found = self.audit
        return json.dumps(
            {
                "is_balanced": found.is_balanced,
                "problems": found.problems,
                "num_problems": found.num_problems,
                "num_events": found.num_events,
                "groups": found.counts(),
                "dropped": found.dropped(),
                "came_back": found.came_back(),
                "attempts_discarded": dict(found.discarded),
                "taken": found.num_taken,
                "max_lag": found.max_lag,
                "max_staleness": self.max_staleness,
                "step": found.step,
                "version": found.lineage.version,
                "rollbacks": found.num_rollbacks,
                "tasks": self.by_task(),
            },
            indent=1,
        )


def audit_run(folder: Path) -> RunAudit:
    """Audit the journal of a run, and compare it with the run's trajectories, versions and result.

    The run may be live. Damaged events and attempts are problems; the other files are not compared then.

    Raises:
        ConfigError: the folder contains no journal.
        CheckpointError: the journal has another format, or is too damaged to be read.
    """
    path = folder / FILE
    if not path.is_file():
        raise ConfigError(f"{str(folder)!r} contains no {FILE}; give the folder of a training run")
    with Records.open(path) as records:
        facts, tasks = records.facts(), records.tasks()
        bound = int(facts.get("max_staleness", 0))
        damages: list[str] = []
        found = audit(_until_damage(records.events(), damages), max_staleness=bound)
        attempts_note = _check_attempts(records, folder, damages)
        ended = () if damages else _read_archive(records, found, damages)
    tasks |= {group.group_id: group.task_id for group in ended}
    if damages:  # further differences would only follow from the damage
        for damage in damages:
            found.complain(damage)
        return RunAudit(found, ended, bound, tasks, (attempts_note,))
    notes = (
        _compare_trajectories(found, ended, folder, bound),
        _compare_versions(found, folder),
        _compare_result(found, folder),
    )
    return RunAudit(
        found, ended, bound, tasks, (attempts_note, *(note for note in notes if note is not None))
    )


def _until_damage(events: Iterator[tuple[int, Event]], damages: list[str]) -> Iterator[tuple[int, Event]]:
    try:
        yield from events
    except CheckpointError as error:
        damages.append(str(error))


def _read_archive(records: Records, found: Audit, damages: list[str]) -> tuple[ArchivedGroup, ...]:
    """Return the groups of the archive, and check that they add up to the totals of the snapshot."""
    try:
        ended = tuple(records.ended())[found.ended.num_before :]
    except CheckpointError as error:
        damages.append(str(error))
        return ()
    dropped = Counter(group.dropped_for for group in ended if group.dropped_for)
    if (len(ended), dropped) != (found.ended.num_groups, found.ended.dropped):
        found.complain(
            f"the archive has {len(ended)} groups, dropped: {_listed(dropped)}; the snapshot counts "
            f"{found.ended.num_groups}, dropped: {_listed(found.ended.dropped)}"
        )
    return ended


def _check_attempts(records: Records, folder: Path, damages: list[str]) -> str:
    """Verify the checksum of every stored attempt and of its file; return a note with the number of intact
    ones.
    """
    stored, num_whole = records.stored(), 0
    for attempt in stored:
        try:
            AttemptFacts.from_json(records.data_of(attempt), folder / FOLDER).load()
            num_whole += 1
        except CheckpointError as error:
            damages.append(str(error))
        except DiskError as error:
            if attempt in records.stored():  # a live run may have let go of it meanwhile
                damages.append(
                    f"the attempt of group {attempt.key[0]}, member {attempt.key[2]}, by {attempt.key[1]!r}: "
                    f"{error}"
                )
    if num_whole == len(stored):
        try:
            records.attempts()
        except CheckpointError as error:
            damages.append(str(error))
    return f"stored attempts: {num_whole} of {len(stored)} are intact"


def _compare_trajectories(
    found: Audit, ended: Sequence[ArchivedGroup], folder: Path, bound: int
) -> str | None:
    """Check that each step's file has the groups of the journal, and no token beyond the staleness bound."""
    try:
        stored = StoredSteps.find(folder)
    except DataError:
        return None
    batches, num_groups = found.batches(), 0
    for group in ended:
        if not group.dropped_for:
            batches.setdefault(group.step, set()).add(group.group_id)
    last = min(stored.num_steps, found.step)
    for step in range(1, last + 1):
        batch = stored.read(step)
        groups = {group.group_id for group in batch.groups}
        expected = batches.get(step)
        if expected is not None and groups != expected and not found.imported:
            found.complain(
                f"step {step}: its trajectories are of {len(groups)} groups, {len(groups - expected)} of "
                f"which the journal does not have in it, which has {len(expected - groups)} others"
            )
        num_groups += len(groups)
        found_versions = {v for group in batch.groups for t in group.attempts for v, _ in t.versions}
        versions = np.array(sorted(found_versions), np.int32)
        newest = int(versions.max(initial=NO_VERSION))
        if newest > batch.learned_by:
            found.complain(
                f"step {step}: a token of version {newest} was trained on by version {batch.learned_by}"
            )
        lag = int(batch.lineage.lags(versions).max(initial=0))
        if lag > bound:
            found.complain(f"step {step}: a token is {lag} versions old; the bound is {bound}")
    return (
        f"trajectories of {last} steps: {num_groups} groups, as in the journal" if found.is_balanced else None
    )


def _compare_versions(found: Audit, folder: Path) -> str | None:
    """Check that no version was published twice, and that the journal's newest version was published."""
    path = folder / "versions.jsonl"
    if not path.is_file():
        return None
    versions = [json.loads(line)["version"] for line in path.read_text().splitlines() if line.endswith("}")]
    if len(versions) != len(set(versions)):
        found.complain("versions.jsonl: a version was published twice")
    if found.lineage.version != NO_VERSION and found.lineage.version not in versions:
        found.complain(f"version {found.lineage.version} in the journal is not in versions.jsonl")
    return f"versions: {len(versions)}, no duplicates"


def _compare_result(found: Audit, folder: Path) -> str | None:
    """Check the totals in the run's result.json against the journal."""
    path = folder / "result.json"
    if not path.is_file():
        return None
    result = json.loads(path.read_text())
    if result["step"] != found.step:
        return None  # written when the run ended at an earlier step
    counts, told = found.counts(), result["counts"]
    if counts["consumed"] != told["consumed"]:
        found.complain(
            f"result.json tells {told['consumed']} consumed groups, the journal {counts['consumed']}"
        )
    if sum(counts.values()) != told["drawn"]:
        found.complain(f"result.json tells {told['drawn']} drawn groups, the journal {sum(counts.values())}")
    return (
        f"result.json: {told['consumed']} groups consumed, as in the journal" if found.is_balanced else None
    )


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items()) if count) or "none"
