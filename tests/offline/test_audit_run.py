"""The audit of a run's folder: whatever else the run wrote has to agree with its journal, and each kind of
disagreement is found.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agentrl.buffer.buffer import ReplayBuffer
from agentrl.buffer.journal import FILE, Journal
from agentrl.buffer.ledger import LedgerRules
from agentrl.data.attempt_files import FOLDER
from agentrl.data.trajectories import decode, encode, read_parquet, write_parquet
from agentrl.offline.audit import audit_run
from agentrl.types import NO_VERSION, Trajectory
from parts.trajectories import Rows, play, stored

STALENESS = 1
GROUPS = 2


class Writer:
    """A run that writes what a run writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "trajectories").mkdir()
        journal = Journal(folder / FILE)
        journal.set_fact("max_staleness", str(STALENESS))
        self.buffer = ReplayBuffer(
            Rows(),
            LedgerRules(groups_per_step=GROUPS, max_staleness=STALENESS, group_size=2),
            folder / FOLDER,
            journal=journal,
        )
        self.version = -1

    def publish(self, step: int) -> None:
        self.version += 1
        with (self.folder / "versions.jsonl").open("a") as file:
            file.write(json.dumps({"version": self.version, "step": step, "what": "policy"}) + "\n")
        self.buffer.advance(self.version, step)

    def play_all(self) -> None:
        for lease in self.buffer.lease("a", 99, 0.0):
            self.buffer.add(
                "a",
                stored(
                    *(play(lease, member, reward=float(member)) for member in range(2)),
                    folder=self.folder / FOLDER,
                ),
            )

    def learn(self, step: int) -> None:
        self.play_all()
        batch = [attempt.load() for attempt in self.buffer.take(GROUPS, 0.0, step)]
        write_parquet(step_file(self.folder, step), encode(batch), step=step, learned_by=self.version)
        self.publish(step)

    def end(self, step: int) -> None:
        counts = self.buffer.counts()
        (self.folder / "result.json").write_text(
            json.dumps({"step": step, "counts": {"consumed": counts.consumed, "drawn": counts.drawn}})
        )


def step_file(folder: Path, step: int) -> Path:
    return folder / f"trajectories/step_{step:06d}.parquet"


@pytest.fixture
def run(tmp_path):
    """Four steps; then those after the second are undone and made anew, from what had been played by weights
    that were given up.
    """
    writer = Writer(tmp_path)
    writer.publish(0)
    for step in (1, 2, 3, 4):
        writer.learn(step)
    writer.play_all()
    writer.buffer.roll_back(2)
    writer.publish(2)
    for step in (3, 4):
        writer.learn(step)
    writer.end(4)
    return tmp_path


def rewrite(folder: Path, step: int, trajectories: Sequence[Trajectory], learned_by: int) -> None:
    write_parquet(step_file(folder, step), encode(trajectories), step=step, learned_by=learned_by)


def read_step(folder: Path, step: int) -> tuple[list[Trajectory], int]:
    batch = read_parquet(step_file(folder, step))
    return decode(batch), batch.column("learned_by")[0].as_py()


def test_what_a_run_wrote_agrees_with_its_journal_also_where_it_went_back(run):
    trajectories, learned_by = read_step(run, 3)
    assert learned_by - min(t.min_version for t in trajectories) > STALENESS, (
        "too old by their numbers, and not along the tree"
    )
    found = audit_run(run)
    assert found.audit.is_balanced, found.audit.problems
    assert len(found.notes) == 4
    assert found.lines()[-1] == "balanced"


def sample_by(version: int):
    """Have the first token of step 4 be sampled by `version`."""

    def tamper(folder: Path) -> None:
        (first, *others), learned_by = read_step(folder, 4)
        rewrite(
            folder,
            4,
            [
                replace(first, versions=np.where(first.action_mask, version, NO_VERSION).astype(np.int32)),
                *others,
            ],
            learned_by,
        )

    return tamper


def exchange_group(folder: Path) -> None:
    trajectories, learned_by = read_step(folder, 4)
    other = trajectories[0].group_id
    rewrite(
        folder, 4, [replace(t, group_id=999) if t.group_id == other else t for t in trajectories], learned_by
    )


def flip_bits(folder: Path) -> None:
    """In all files of trajectories: some of them wait only to be recorded."""
    for file in (folder / FOLDER).iterdir():
        data = bytearray(file.read_bytes())
        data[len(data) // 4] ^= 1
        data[3 * len(data) // 4] ^= 1
        file.write_bytes(data)


def publish_again(folder: Path) -> None:
    with (folder / "versions.jsonl").open("a") as file:
        file.write(json.dumps({"version": 2, "step": 2, "what": "policy"}) + "\n")


def lose_the_last_publish(folder: Path) -> None:
    lines = (folder / "versions.jsonl").read_text().splitlines(keepends=True)
    (folder / "versions.jsonl").write_text("".join(lines[:-1]))


def tell(**changes: int):
    def tamper(folder: Path) -> None:
        result = json.loads((folder / "result.json").read_text())
        result["counts"].update(changes)
        (folder / "result.json").write_text(json.dumps(result))

    return tamper


@pytest.mark.parametrize(
    ("tamper", "words"),
    [
        (sample_by(0), "step 4: a token is 3 versions old; the bound is 1"),
        (sample_by(9), "step 4: a token of version 9 was trained on by version 6"),
        (
            exchange_group,
            "its trajectories are of 2 groups, 1 of which the journal does not have in it, which has 1 "
            "others",
        ),
        (flip_bits, "does not match its checksum"),
        (lambda folder: shutil.rmtree(folder / FOLDER), "cannot be read"),
        (publish_again, "versions.jsonl: a version was published twice"),
        (lose_the_last_publish, "version 7 in the journal is not in versions.jsonl"),
        (tell(consumed=9), "result.json tells 9 consumed groups, the journal 8"),
        (tell(drawn=99), "result.json tells 99 drawn groups"),
    ],
)
def test_what_does_not_agree_is_found(run, tamper, words):
    tamper(run)
    found = audit_run(run)
    assert not found.audit.is_balanced
    assert any(words in problem for problem in found.audit.problems), found.audit.problems
    assert found.lines()[-1].startswith("NOT balanced")
