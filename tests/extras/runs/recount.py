"""A count of a run from its files alone, by other code than the project's: no module of it is imported.

```
python tests/extras/runs/recount.py RUN      # JSON on stdout; ends with 1 if something does not add up
```

What became of each group is read from the journal's archive, snapshot and events; it is compared with the
trajectories of each step, the metrics, the versions, the result and the files of waiting attempts. A run that
is going on, or that was killed, may have taken one batch more than it has published.
"""

from __future__ import annotations

import json
import re
import sqlite3
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

CONSUMED, DROPPED = "consumed", "dropped"
AFTER = {
    "leased": "leased",
    "consumed": CONSUMED,
    "dropped": DROPPED,
    "returned": "ready",
    "requeued": "queued",
}
"""Kind of an event -> state of its group; other kinds change no group that has ended."""


@dataclass
class Count:
    """The groups of a run.

    states: group -> (state, step that took it or -1). members: group -> members that arrived from each owner,
    of groups that the journal still has one by one. published: step of the newest weights; -1: none.
    """

    states: dict[int, tuple[str, int]] = field(default_factory=dict)
    members: dict[int, dict[str, set[int]]] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    published: int = -1
    version: int = -1
    is_imported: bool = False
    problems: list[str] = field(default_factory=list)

    def follow(
        self, kind: str, group: int, owner: str, member: int, step: int, version: int, reason: str
    ) -> None:
        """Apply one event."""
        if kind == "published":
            self.published, self.version = step, version
        elif kind == "rolled_back":
            self.published = step
        elif kind == "imported":
            self.is_imported = True
        elif kind == "added":
            self.members.setdefault(group, {}).setdefault(owner, set()).add(member)
        elif kind == "queued":
            self.members.get(group, {}).pop(owner, None)
        elif kind in AFTER:
            self._enter(kind, group, step, reason)

    def _enter(self, kind: str, group: int, step: int, reason: str) -> None:
        before = self.states.get(group, ("queued", -1))[0]
        if before == DROPPED or (before == CONSUMED and kind in ("consumed", "leased")):
            self.problems.append(f"group {group} is {before} and then {kind}")
        if kind == "dropped":
            self.dropped[reason] += 1
        if kind == "requeued":
            self.members.pop(group, None)
        self.states[group] = (AFTER[kind], step if kind == "consumed" else -1)

    def batches(self) -> dict[int, set[int]]:
        """Return the groups of each step that counts."""
        found: dict[int, set[int]] = {}
        for group, (state, step) in self.states.items():
            if state == CONSUMED:
                found.setdefault(step, set()).add(group)
        return found


def count_journal(database: sqlite3.Connection) -> Count:
    """Return what the journal says of each group."""
    count = Count()
    for (data,) in database.execute("SELECT data FROM archive ORDER BY number"):
        for group, step, reason, _ in json.loads(zlib.decompress(data)):
            if group in count.states:
                count.problems.append(f"group {group} is in the archive twice")
            count.states[group] = (DROPPED, -1) if reason else (CONSUMED, step)
            count.dropped.update([reason] if reason else [])
    query = "SELECT kind, group_id, owner, member, step, version, reason FROM events ORDER BY seq"
    for kind, *others in database.execute(query):
        if kind == "snapshot":
            _begin(count, json.loads(others[-1])["audit"])
        else:
            count.follow(kind, *others)
    return count


def _begin(count: Count, known: dict[str, Any]) -> None:
    for group, state, players, _, _, step, reason, *_ in known["groups"]:
        count.states[group] = (state, step)
        count.dropped.update([reason] if state == DROPPED else [])
        count.members[group] = {owner: {row[0] for row in rows} for owner, rows in players}
    count.published, count.version = known["step"], known["lineage"]["current"]
    count.is_imported |= bool(known["imported"])


# ------------------------------------------------------------------------------------------------ comparisons


def compare_trajectories(run: Path, count: Count) -> int:
    """Compare the file of each step with the journal's groups; return the number of attempts in all files."""
    batches, total, seen = count.batches(), 0, Counter[int]()
    there = {
        int(m[1])
        for p in (run / "trajectories").glob("*")
        if (m := re.fullmatch(r"step_(\d+)\.parquet", p.name))
    }
    for step in range(1, count.published + 1):
        if step not in there:
            count.problems.append(f"step {step} was learned from, and has no file of trajectories")
            continue
        rows = pq.read_table(
            run / f"trajectories/step_{step:06d}.parquet",
            columns=["step", "learned_by", "group_id", "member", "versions"],
        ).to_pylist()
        total += len(rows)
        groups = {row["group_id"] for row in rows}
        seen.update(groups)
        if not count.is_imported and groups != batches.get(step, set()):
            count.problems.append(
                f"step {step}: groups {sorted(groups ^ batches.get(step, set()))} are in only one account"
            )
        if len({(row["group_id"], row["member"]) for row in rows}) != len(rows):
            count.problems.append(f"step {step}: a member of a group is there twice")
        if any(row["step"] != step or max(row["versions"], default=-1) > row["learned_by"] for row in rows):
            count.problems.append(
                f"step {step}: a row is of another step, or newer than the weights that learned from it"
            )
        _compare_members(count, step, rows)
    count.problems += [f"group {group} was learned from in {n} steps" for group, n in seen.items() if n > 1]
    return total


def _compare_members(count: Count, step: int, rows: list[dict[str, Any]]) -> None:
    stored: dict[int, set[int]] = {}
    for row in rows:
        stored.setdefault(row["group_id"], set()).add(row["member"])
    for group, members in stored.items():
        arrived = count.members.get(group)
        if arrived is not None and members not in arrived.values():
            count.problems.append(
                f"step {step}, group {group}: members {sorted(members)} are not what one actor delivered"
            )


def compare_metrics(run: Path, count: Count) -> int:
    """Compare the records of steps with the journal; return their number."""
    records = [json.loads(line) for line in _lines(run / "metrics.jsonl")]
    train = [record for record in records if record["kind"] == "train"]
    if [record["step"] for record in train] != list(range(1, count.published + 1)):
        steps = [record["step"] for record in train]
        count.problems.append(
            f"metrics.jsonl has the steps {steps}, the journal published up to {count.published}"
        )
    versions = [record["version"] for record in train]
    if versions != sorted(set(versions)):
        count.problems.append("metrics.jsonl: versions do not increase")
    return len(train)


def compare_versions(run: Path, count: Count) -> int:
    """Compare the versions with the journal's; return their number."""
    versions = [json.loads(line)["version"] for line in _lines(run / "versions.jsonl")]
    if versions != sorted(set(versions)):
        count.problems.append("versions.jsonl: a version is there twice, or not in order")
    if count.version not in (-1, *versions):
        count.problems.append(f"versions.jsonl lacks version {count.version}, the journal's newest")
    return len(versions)


def compare_result(run: Path, count: Count) -> bool:
    """Compare the result with the journal; return whether there is one of the newest step."""
    file = run / "result.json"
    result = json.loads(file.read_text()) if file.is_file() else {"step": None}
    if result["step"] != count.published:
        return False
    states, told = Counter(state for state, _ in count.states.values()), result["counts"]
    own = {"consumed": states[CONSUMED], "drawn": len(count.states), "dropped": states[DROPPED]}
    theirs = {"consumed": told["consumed"], "drawn": told["drawn"], "dropped": sum(told["dropped"].values())}
    if own != theirs and not count.is_imported:
        count.problems.append(f"result.json tells {theirs}, the journal {own}")
    return True


def compare_attempts(run: Path, database: sqlite3.Connection, count: Count) -> int:
    """Compare the files of attempts that the journal refers to with their checksums; return their number."""
    stored = database.execute("SELECT group_id, member, data FROM attempts").fetchall()
    for group, member, data in stored:
        name, offset, size, checksum = json.loads(data)["source"]
        file = run / "attempts" / name
        content = file.read_bytes()[offset : offset + size] if file.is_file() else b""
        if zlib.crc32(content) != checksum:
            count.problems.append(f"group {group}, member {member}: its file {name} is missing or changed")
    return len(stored)


def _lines(file: Path) -> Iterator[str]:
    """Yield the whole lines of a file; the last one may have been cut off by a kill."""
    text = file.read_text() if file.is_file() else ""
    yield from (line for line in text.splitlines(keepends=True) if line.endswith("\n"))


def recount(run: Path) -> dict[str, Any]:
    """Return the counts and the problems of the run in a folder."""
    with closing(sqlite3.connect(f"file:{run / 'ledger.sqlite'}?mode=ro", uri=True)) as database:
        database.execute("BEGIN")
        count = count_journal(database)
        waiting = compare_attempts(run, database, count)
    if not count.is_imported and sorted(count.states) != list(range(len(count.states))):
        count.problems.append("the ids of groups have gaps: a group is in no account")
    return {
        "groups": dict(Counter(state for state, _ in count.states.values())),
        "dropped": dict(count.dropped),
        "published": count.published,
        "version": count.version,
        "attempts_in_trajectories": compare_trajectories(run, count),
        "attempts_waiting": waiting,
        "steps_in_metrics": compare_metrics(run, count),
        "versions": compare_versions(run, count),
        "has_result": compare_result(run, count),
        "problems": count.problems,
    }


if __name__ == "__main__":
    found = recount(Path(sys.argv[1]))
    print(json.dumps(found, indent=1))
    sys.exit(1 if found["problems"] else 0)
