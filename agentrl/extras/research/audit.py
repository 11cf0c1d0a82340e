"""`agentrl audit RUN`: replays the journal event by event, and compares it with the run's other files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from agentrl.buffer.audit import CONSUMED, Audit, audit
from agentrl.buffer.events import Event
from agentrl.buffer.journal import FILE
from agentrl.buffer.records import ArchivedGroup, Records
from agentrl.data.attempt_facts import AttemptFacts
from agentrl.data.attempt_files import FOLDER
from agentrl.errors import CheckpointError, ConfigError, DiskError
from agentrl.extras.research.audit_files import compare_files


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
    """Audit the journal of a run, and compare it with everything else that the run wrote.

    The run may be live. A comparison that cannot be made is a problem, with its reason. If events or attempts
    of the journal are damaged, other files are not compared: further differences would only follow from that.

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
    for damage in damages:
        found.complain(damage)
    notes = ("other files were not compared",) if damages else compare_files(found, ended, folder, bound)
    return RunAudit(found, ended, bound, tasks, (attempts_note, *notes))


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


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items()) if count) or "none"
