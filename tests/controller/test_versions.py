"""Versions are never used twice, whatever file of the run has lost some of them."""

import json

import pytest

from agentrl.buffer.buffer import ReplayBuffer
from agentrl.buffer.journal import FILE, Journal
from agentrl.buffer.ledger import LedgerRules
from agentrl.config.trainer import TrainerConfig
from agentrl.controller.run_dir import RunDir
from agentrl.errors import CheckpointError
from parts.trajectories import Rows
from parts.written_run import GROUPS, STALENESS, write_whole_run


@pytest.fixture
def run(tmp_path):
    return write_whole_run(tmp_path / "run")


def opened(run) -> RunDir:
    return RunDir.open(TrainerConfig(run_dir=str(run)), "")


def cut(run, number: int) -> None:
    """Cut the last lines off."""
    lines = (run / "versions.jsonl").read_text().splitlines(keepends=True)
    (run / "versions.jsonl").write_text("".join(lines[:-number]))


def test_the_next_version_is_above_all_that_any_file_knows(run):
    assert opened(run).next_version() == 8
    cut(run, 3)
    assert opened(run).next_version() == 8, "the newest checkpoint has version 7"
    (run / "weights" / "v000011").mkdir(parents=True)
    assert opened(run).next_version() == 12


def test_the_journal_knows_versions_of_which_no_line_and_no_checkpoint_is_left(run):
    for folder in (run / "checkpoints").glob("step_000004"):
        folder.rename(run / "gone")
    cut(run, 3)
    assert opened(run).next_version() == 5
    rules = LedgerRules(groups_per_step=GROUPS, max_staleness=STALENESS, group_size=2)
    buffer = ReplayBuffer(Rows(), rules, run / "attempts", journal=Journal(run / FILE))
    assert buffer.resume(4, None) == 7
    buffer.close()


def test_a_line_that_was_cut_out_or_changed_ends_the_start_in_one_line(run):
    lines = (run / "versions.jsonl").read_text().splitlines(keepends=True)
    changed = lines[6].replace('"version": 6', '"version": 2')
    for damaged in ([*lines[:6], *lines[7:]], [*lines[:6], changed, *lines[7:]], [*lines[:6], "{}\n"]):
        (run / "versions.jsonl").write_text("".join(damaged))
        with pytest.raises(CheckpointError, match=r"versions\.jsonl, line \d") as caught:
            opened(run).next_version()
        assert "\n" not in str(caught.value)
    assert json.loads(lines[0])["version"] == 0
