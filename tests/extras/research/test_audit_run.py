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

from agentrl.data.attempt_files import FOLDER
from agentrl.data.trajectories import decode, encode, read_parquet, write_parquet
from agentrl.extras.research.audit import audit_run
from agentrl.tracking.seals import read_document, sealed_document
from agentrl.tracking.unwritten import AppendedFile
from agentrl.types import NO_VERSION, Trajectory
from parts.written_run import STALENESS, step_file, write_whole_run


@pytest.fixture
def run(tmp_path):
    """Four steps; then those after the second are undone and made anew, from what had been played by weights
    that were given up.
    """
    return write_whole_run(tmp_path / "run")


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
    assert len(found.notes) == 13
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
    file = AppendedFile(folder / "versions.jsonl")
    file.append_records(json.dumps({"version": 2, "step": 2, "what": "policy"}).encode())


def lose_the_last_publish(folder: Path) -> None:
    lines = (folder / "versions.jsonl").read_text().splitlines(keepends=True)
    (folder / "versions.jsonl").write_text("".join(lines[:-1]))


def tell(**changes: int):
    def tamper(folder: Path) -> None:
        result = read_document(folder / "result.json")
        result["counts"].update(changes)
        (folder / "result.json").write_text(sealed_document(result))

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


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("trajectories/step_000001.parquet", "step 1: its trajectories are missing"),
        ("trajectories/step_000004.parquet", "step 4: its trajectories are missing"),
        ("trajectories", "step 3: its trajectories are missing"),
        ("validation/step_000004.parquet", "validations could not be compared"),
        ("validations.json", "validations.json is missing"),
        ("metrics.jsonl", "metrics.jsonl lacks steps 1, 2, 3, 4 of 4"),
        ("failures.parquet", "failures.parquet is missing"),
        ("alarms.jsonl", "alarms.jsonl is missing"),
        ("versions.jsonl", "version 7 in the journal is not in versions.jsonl"),
        ("checkpoints/step_000004", "the checkpoint of step 4 is missing"),
        ("checkpoints/step_000004/buffer.bin", "buffer.bin is missing"),
        ("config.yaml", "config.yaml is missing"),
        ("result.json", "result.json is missing"),
        ("policy/model.safetensors", "model.safetensors is missing"),
        ("ledger.sqlite-writes", "ledger.sqlite-writes is missing"),
    ],
)
def test_what_is_gone_from_a_finished_run_is_named(run, name, words):
    shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()
    found = audit_run(run)
    assert any(words in problem for problem in found.audit.problems), found.audit.problems
    assert found.lines()[-1].startswith("NOT balanced")


def test_what_a_run_that_goes_on_has_not_written_yet_is_no_problem(run):
    """The steps after its newest checkpoint, and its end."""
    for name in ("checkpoints/step_000004", "policy"):
        shutil.rmtree(run / name)
    (run / "result.json").unlink()
    found = audit_run(run)
    assert found.audit.problems == [
        "the checkpoint of step 4 is missing: the journal cannot go back before that step"
    ]
