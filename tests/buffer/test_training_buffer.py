"""The replay buffer of a run: what the config says reaches it, and which journal is its own."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from agentrl import heap
from agentrl.buffer.journal import FILE
from agentrl.buffer.ledger import LedgerRules
from agentrl.buffer.training_buffer import (
    BufferSettings,
    TrainingBuffer,
    open_journal,
    planned_steps,
    subject_of,
)
from agentrl.chat.tiny import write_tiny_tokenizer
from agentrl.config.schema import Config
from agentrl.config.trainer import TrainerConfig
from parts.core_world import PLUGINS, SOURCE

NUM_TASKS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("training_buffer")
    write_tiny_tokenizer(path / "tokenizer")
    row = {
        "data_source": SOURCE,
        "prompt": [{"role": "user", "content": "1+1?"}],
        "reward_model": {"ground_truth": "2"},
    }
    (path / "rows.jsonl").write_text((json.dumps(row) + "\n") * NUM_TASKS)
    return path


def settings(folder: Path, **changes: dict) -> BufferSettings:
    sections = {
        "data": {"train_files": [str(folder / "rows.jsonl")]},
        "model": {"path": str(folder), "tokenizer_path": str(folder / "tokenizer")},
        "agent": {"default": "single_turn_agent"},
        "reward": {"sources": {SOURCE: f"{PLUGINS}:Number"}},
        "rollout": {"group_size": 2},
        "buffer": {"groups_per_step": 2},
        "trainer": {"total_epochs": 3},
    }
    for name, values in changes.items():
        sections[name] = {**sections[name], **values}
    return BufferSettings.of(Config.model_validate(sections))


@pytest.mark.parametrize(
    ("chosen", "rules", "waits_s"),
    [
        (
            {"max_staleness": 3, "stragglers": "wait", "lease_timeout_s": 50.0, "duplicate_after_s": 7.0},
            {"max_staleness": 3, "waits_for_stragglers": True, "sampler": "fifo", "oversample": 1.0},
            (50.0, 7.0),
        ),
        (
            {"stragglers": "drop", "sampler": "windowed", "oversample": 1.5, "lease_timeout_s": 60.0},
            {"max_staleness": 1, "waits_for_stragglers": False, "sampler": "windowed", "oversample": 1.5},
            (60.0, math.inf),
        ),
    ],
)
def test_what_the_config_says_reaches_the_ledger(folder, chosen, rules, waits_s):
    target = TrainingBuffer(settings(folder, buffer=chosen))
    assert target._ledger.rules == LedgerRules(groups_per_step=2, group_size=2, total_groups=18, **rules)
    assert (target._lease_timeout_s, target._duplicate_after_s) == waits_s
    plan = target.plan()
    assert (plan.num_tasks, plan.total_steps, plan.journal_note) == (NUM_TASKS, 9, None)


@pytest.mark.parametrize("shuffles", [True, False])
@pytest.mark.parametrize("has_curriculum", [True, False])
def test_rows_are_shuffled_once(folder, shuffles, has_curriculum):
    """By the dataset, or by the curriculum, in the same order."""
    data = {"shuffle": shuffles, "curriculum": {"by_pass_rate": has_curriculum}}
    target = TrainingBuffer(settings(folder, data=data, buffer={"max_staleness": 9}))
    target.advance(0, 0)
    found = [int(lease.task.task_id.partition(":")[2]) for lease in target.lease("a", NUM_TASKS, 0.0)]
    assert sorted(found) == list(range(NUM_TASKS))
    assert (found == list(range(NUM_TASKS))) != shuffles
    assert bool(target.curriculum()) == has_curriculum


def test_memory_of_a_published_batch_is_given_back(folder, monkeypatch):
    calls = []
    monkeypatch.setattr(heap, "release_free_memory", lambda: calls.append(1))
    target = TrainingBuffer(settings(folder))
    assert [target.advance(version, version).version for version in (0, 1)] == [0, 1]
    assert len(calls) == 2


def test_free_memory_is_given_back_steadily_and_not_at_each_call(monkeypatch):
    calls, now = [], [0.0]
    monkeypatch.setattr(heap, "release_free_memory", lambda: calls.append(now[0]))
    monkeypatch.setattr(heap.time, "monotonic", lambda: now[0])
    freed = heap.SteadyRelease(10.0)
    for now[0] in (0.0, 5.0, 10.0, 15.0, 19.9, 40.0):
        freed.consider()
    assert calls == [10.0, 40.0]


def test_a_run_may_have_one_step(folder):
    assert planned_steps(TrainerConfig(), num_tasks=4, groups_per_step=4) == 1


# ------------------------------------------------------------------------------------- whose journal it is


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        ({}, True),
        ({"data": {"val_files": ["other.jsonl"]}}, True),
        ({"buffer": {"max_staleness": 5}}, True),
        ({"data": {"curriculum": {"source_weights": {"b": 1, "a": 2}}}}, True),  # in another order
        ({"data": {"max_prompt_tokens": 99}}, False),
        ({"trainer": {"seed": 5}}, False),
        ({"rollout": {"group_size": 4}}, False),
        ({"data": {"curriculum": {"source_weights": {"a": 1, "b": 2}}}}, False),
    ],
)
def test_a_journal_is_of_the_settings_that_say_which_task_a_group_is(folder, change, is_same):
    weighed = {"data": {"curriculum": {"source_weights": {"a": 2, "b": 1}}}}
    base = weighed if "curriculum" in change.get("data", {}) else {}
    assert (subject_of(settings(folder, **base)) == subject_of(settings(folder, **change))) == is_same


def test_the_journal_of_a_run_knows_its_settings_and_one_of_other_data_is_closed_and_renamed(
    folder, tmp_path
):
    journal, note = open_journal(tmp_path, settings(folder, buffer={"max_staleness": 5}), is_new=False)
    assert (journal.facts["max_staleness"], note) == ("5", None)
    assert json.loads(journal.facts["naming"])["rollout.group_size"] == 2
    assert not [name for name in json.loads(journal.facts["naming"]) if "val" in name]
    subject = journal.facts["subject"]
    journal.close()
    other, note = open_journal(tmp_path, settings(folder, rollout={"group_size": 4}), is_new=False)
    assert other.facts["subject"] != subject
    other.close()
    assert "rollout.group_size was 2 and is 4; it was renamed to ledger_before_000.sqlite" in note
    begun, note = open_journal(tmp_path, settings(folder), is_new=True)
    assert (begun.facts["subject"], note) == (subject, None)
    begun.close()
    names = [FILE, "ledger_before_000.sqlite", "ledger_before_001.sqlite"]
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(
        name + end for name in names for end in ("", "-writes")
    )
