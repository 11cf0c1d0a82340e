"""Alarms: when they go off, that they do not repeat themselves, what they keep, and that a resume changes
nothing.
"""

import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.buffer.lineage import Lineage
from agentrl.config.compose import dump_config
from agentrl.config.schema import Config
from agentrl.config.tracking import AlarmsConfig
from agentrl.controller.listeners import FinishedStep
from agentrl.controller.run_dir import RunDir
from agentrl.data.trajectories import decode, read_parquet
from agentrl.extras.watch.rules import Alarms, evidence, rules_from
from agentrl.figures.trajectory_metrics import constant_group_share
from agentrl.tracking.metrics import StepRecord
from agentrl.types import Group
from parts.full_disk import files_of_at_most
from parts.observed import observed
from parts.trajectories import facts as only_facts
from parts.trajectories import make_trajectory

QUIET = {
    "learner/entropy": 1.0,
    "learner/correction/ess": 0.9,
    "learner/ratio_max": 1.5,
    "rollout/response_tokens/mean": 100.0,
    "learner/mismatch_mean": 0.01,
    "learner/moved_per_version": 0.01,
    "learner/clip_low": 0.05,
    "learner/clip_high": 0.05,
    "rollout/constant_groups": 0.2,
    "attempts/failed_share": 0.02,
}
WRONG = {
    "entropy_collapse": {"learner/entropy": 0.05},
    "ess_low": {"learner/correction/ess": 0.1},
    "ratio_tail": {"learner/ratio_max": math.inf},
    "length_growth": {"rollout/response_tokens/mean": 201.0},
    "length_collapse": {"rollout/response_tokens/mean": 49.0},
    "logprob_gap": {"learner/mismatch_mean": 0.21},
    "policy_moved": {"learner/moved_per_version": 0.06},
    "clip_share": {"learner/clip_low": 0.2, "learner/clip_high": 0.15},
    "constant_groups": {"rollout/constant_groups": 1.0},
    "failed_share": {"attempts/failed_share": 0.11},
}


def alarms(tmp_path, options=None, kept=()):
    options = options or AlarmsConfig(window_steps=1)
    return Alarms(
        rules_from(options), window_steps=options.window_steps, file=tmp_path / "alarms.jsonl", kept=kept
    )


def names(raised):
    return [alarm.rule for _, alarm in raised]


def written(tmp_path):
    file = tmp_path / "alarms.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def trajectory(group_id, member, *, length=4, **fields):
    tokens, logprobs = np.arange(length + 1), [0.0] + [-1.0] * length
    return make_trajectory(
        [-1] + [0] * length, group_id=group_id, member=member, token_ids=tokens, behavior_logprobs=logprobs,
        **{"reward": 0.0, **fields},
    )  # fmt: skip


def group(group_id, rewards=(0.0, 1.0), **facts):
    return Group(group_id, tuple(trajectory(group_id, i, reward=r, **facts) for i, r in enumerate(rewards)))


def test_every_rule_has_a_case_here():
    assert {rule.name for rule in rules_from(AlarmsConfig())} == set(WRONG)


@pytest.mark.parametrize("rule", WRONG)
def test_a_rule_goes_off_once_per_episode(rule, tmp_path):
    watched = alarms(tmp_path)
    for step in (1, 2, 3):
        assert watched.observe(step, QUIET) == []
    assert names(watched.observe(4, QUIET | WRONG[rule])) == [rule]
    assert watched.observe(5, QUIET | WRONG[rule]) == []
    assert watched.observe(6, QUIET) == []
    assert names(watched.observe(7, QUIET | WRONG[rule])) == [rule]
    assert [(line["step"], line["event"], line["rule"]) for line in written(tmp_path)] == [
        (4, "raised", rule),
        (6, "cleared", rule),
        (7, "raised", rule),
    ]


def test_a_plugin_that_fails_is_named_and_its_groups_are_not_kept(tmp_path):
    watched = alarms(tmp_path)
    shares = {
        "attempts/failed_share": 0.05,
        "attempts/failed_share/tool/search": 0.5,
        "attempts/failed_share/agent/mine": 0.01,
    }
    [(rule, alarm)] = watched.observe(1, QUIET | shares)
    assert alarm.line().startswith(
        "alarm failed_share at step 1: attempts/failed_share/tool/search = 0.5 > 0.1; "
    )
    assert evidence([group(0)], rule, limit=8) == []
    assert watched.observe(2, QUIET | shares) == []
    assert [
        (alarm.rule, alarm.metric)
        for _, alarm in watched.observe(3, QUIET | {"attempts/failed_share/tool/other": 0.2})
    ] == [("failed_share", "attempts/failed_share/tool/other")]


def test_the_line_says_value_bound_and_what_to_do(tmp_path):
    [(_, alarm)] = alarms(tmp_path).observe(3, QUIET | {"learner/correction/ess": 0.125})
    assert alarm.line().startswith(
        "alarm ess_low at step 3: learner/correction/ess = 0.125 < 0.3; few tokens dominate the update: "
        "lower "
    )
    assert "\n" not in alarm.line()


@pytest.mark.parametrize(
    ("field", "rules"),
    [
        ("min_entropy_share", {"entropy_collapse"}),
        ("min_ess", {"ess_low"}),
        ("max_ratio", {"ratio_tail"}),
        ("max_length_change", {"length_growth", "length_collapse"}),
        ("max_logprob_gap", {"logprob_gap"}),
        ("max_moved", {"policy_moved"}),
        ("max_clip_share", {"clip_share"}),
        ("max_constant_groups", {"constant_groups"}),
        ("max_failed_share", {"failed_share"}),
    ],
)
def test_a_bound_that_is_none_is_off(field, rules):
    assert set(WRONG) - {rule.name for rule in rules_from(AlarmsConfig(**{field: None}))} == rules


@given(st.lists(st.floats(0.0, 1.0), max_size=40))
def test_raised_and_cleared_take_turns_and_agree_with_the_bound(tmp_path_factory, values):
    folder = tmp_path_factory.mktemp("turns")
    watched = alarms(folder, AlarmsConfig(min_ess=0.5))
    for step, value in enumerate(values):
        watched.observe(step, {"learner/correction/ess": value})
    lines = written(folder)
    assert [line["event"] for line in lines] == ["raised", "cleared"] * (len(lines) // 2) + ["raised"] * (
        len(lines) % 2
    )
    assert all(line["value"] < 0.5 if line["event"] == "raised" else line["value"] >= 0.55 for line in lines)
    if any(value < 0.5 for value in values):
        assert lines[0]["step"] == next(step for step, value in enumerate(values) if value < 0.5)


@given(
    st.lists(
        st.tuples(st.floats(0, 3), st.sampled_from([None, math.nan, 0.1, 0.29, 0.31, 0.9])), max_size=25
    ),
    st.integers(0, 25),
)
def test_a_resume_neither_forgets_nor_repeats(tmp_path_factory, steps, cut):
    def values(entropy, ess):
        return {"learner/entropy": entropy, **({} if ess is None else {"learner/correction/ess": ess})}

    whole, parts = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("parts")
    options = AlarmsConfig(window_steps=2)
    straight = alarms(whole, options)
    for step, pair in enumerate(steps):
        straight.observe(step, values(*pair))
    first = alarms(parts, options)
    for step, pair in enumerate(steps[: cut + 3]):  # steps after the checkpoint are lost and made again
        first.observe(step, values(*pair))
    second = alarms(
        parts,
        options,
        kept=[StepRecord("train", step, 0, 0.0, values(*pair)) for step, pair in enumerate(steps[:cut])],
    )
    for step, pair in list(enumerate(steps))[cut:]:
        second.observe(step, values(*pair))
    assert written(parts) == written(whole)


def test_drift_is_judged_between_windows_so_that_one_batch_of_short_tasks_is_none(tmp_path):
    """First window 100, bound 50: one batch of 10 leaves the mean of three steps at 70, two of them bring it
    to 40.
    """
    lengths = [90, 100, 110, 100, 100, 10, 100, 10, 10, 100]
    watched = alarms(tmp_path, AlarmsConfig(window_steps=3))
    for step, length in enumerate(lengths, start=1):
        watched.observe(step, {"rollout/response_tokens/mean": float(length)})
    [line] = written(tmp_path)
    assert (line["step"], line["rule"], line["value"], line["bound"]) == (8, "length_collapse", 40.0, 50.0)
    assert line["metric"] == "rollout/response_tokens/mean (mean of 3 steps)"


def test_what_is_not_measured_raises_nothing(tmp_path):
    assert alarms(tmp_path).observe(1, {"learner/clip_low": 1.0, "learner/correction/ess": math.nan}) == []


def test_evidence_is_what_the_rule_is_about():
    rules = {rule.name: rule for rule in rules_from(AlarmsConfig())}
    groups = [group(0, version=3), group(1, version=1, length=2), group(2, (1.0, 1.0), version=2, length=9)]
    kept = {name: [g.group_id for g in evidence(groups, rules[name], limit=1)] for name in rules}
    assert (kept["ess_low"], kept["length_growth"], kept["length_collapse"], kept["constant_groups"]) == (
        [1],
        [2],
        [1],
        [2],
    )
    assert [g.group_id for g in evidence(groups, rules["ess_low"], limit=2)] == [1, 2]
    assert evidence(groups, rules["ess_low"], limit=0) == []
    assert constant_group_share(groups) == pytest.approx(1 / 3)


def test_a_group_that_differs_from_its_greedy_attempt_is_not_constant():
    compared = Group(
        0, group(0, (1.0,)).trajectories, greedy=trajectory(0, 1, reward=0.0).replace(is_greedy=True)
    )
    assert constant_group_share([compared, group(1, (1.0,))]) == 0.5


def test_a_run_says_the_alarm_and_keeps_the_groups(tmp_path, capsys):
    config = Config.model_validate(
        {
            "trainer": {"run_dir": str(tmp_path / "run"), "logger": []},
            "tracking": {"alarms": {"min_ess": 0.5, "dump_groups": 1}},
        }
    )
    run_dir = RunDir.open(config.trainer, dump_config(config))
    said = []
    observer = observed(config, run_dir, said=said)
    groups = only_facts(group(0, version=1), group(1, version=0))
    facts = SimpleNamespace(
        learned_by=1,
        lags=Lineage.of([(1, 0)]).lags,
        version=2,
        groups=groups,
    )
    for step, ess in enumerate((0.9, 0.4, 0.4), start=1):
        observer.step(FinishedStep(step, updates=[{"correction/ess": ess}], **vars(facts)))
    observer.close()
    run_dir.close()
    assert [line.split(":")[0] for line in said] == ["alarm ess_low at step 2"]
    [file] = (tmp_path / "run" / "alarms").iterdir()
    assert file.name == "step_000002_ess_low.parquet"
    assert {t.group_id for t in decode(read_parquet(file))} == {1}
    assert [line["rule"] for line in written(tmp_path / "run")] == ["ess_low"]


def test_tokens_per_second_count_what_was_sampled_even_if_no_attempt_finished(tmp_path):
    """The 50 tokens and the attempt before the first step belong to a validation."""
    config = Config.model_validate({"trainer": {"run_dir": str(tmp_path / "run"), "logger": []}})
    run_dir = RunDir.open(config.trainer, dump_config(config))
    observer = observed(config, run_dir)
    facts = {"learned_by": 0, "lags": Lineage.of([(0, 0)]).lags, "version": 1, "groups": only_facts(group(0))}
    observer.begin_steps({"finished": 1.0, "sampled_tokens": 50.0})
    for step, sampled in enumerate((150.0, 150.0, 400.0), start=1):
        stats = {"finished": 2.0, "sampled_tokens": sampled}
        observer.step(FinishedStep(step, updates=[], rollout_stats=stats, **facts))
    observer.close()
    run_dir.close()
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    seconds = itertools.accumulate(record["time/step_s"] for record in records)
    sampled = [record["speed/sampled_tokens_per_s"] * s for record, s in zip(records, seconds, strict=True)]
    assert sampled == pytest.approx([100.0, 100.0, 350.0])
    finished = [r["speed/trajectories_per_s"] * r["time/step_s"] for r in records]
    assert finished == pytest.approx([1.0, 0.0, 0.0])


@pytest.mark.parametrize(("versions", "moved"), [((1, 3), 0.06), ((2, 3), 0.24), ((3, 3), None)])
def test_the_movement_per_version_is_the_gap_over_the_lag(tmp_path, versions, moved):
    """The learner has version 3. Mean lags 1, 0.5 and 0: fresh tokens say nothing about movement."""
    config = Config.model_validate({"trainer": {"run_dir": str(tmp_path / "run"), "logger": []}})
    run_dir = RunDir.open(config.trainer, dump_config(config))
    said = []
    observer = observed(config, run_dir, said=said)
    gap = 0.06 if moved == 0.06 else 0.12
    finished = FinishedStep(
        1,
        learned_by=3,
        lags=Lineage.of([(step, step) for step in range(4)]).lags,
        version=4,
        groups=only_facts(*(group(number, version=version) for number, version in enumerate(versions))),
        updates=[{"mismatch_mean": gap}],
    )
    observer.step(finished)
    observer.close()
    run_dir.close()
    [record] = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert record.get("learner/moved_per_version") == (None if moved is None else pytest.approx(moved))
    assert any(line.startswith("alarm policy_moved at step 1") for line in said) == (moved is not None)


def test_counts_of_a_step_are_sums_over_its_updates_the_critics_too(tmp_path):
    config = Config.model_validate({"trainer": {"run_dir": str(tmp_path / "run"), "logger": []}})
    run_dir = RunDir.open(config.trainer, dump_config(config))
    observer = observed(config, run_dir)
    own = {"num_tokens": 3.0, "is_skipped": 1.0, "non_finite_updates": 2.0, "ratio_max": 1.5, "loss": 4.0}
    for prefix in ("", "critic/"):
        first, last = ({prefix + name: value * factor for name, value in own.items()} for factor in (1, 3))
        facts = {
            "learned_by": 0,
            "lags": Lineage.of([(0, 0)]).lags,
            "version": 1,
            "groups": only_facts(group(0)),
        }
        observer.step(FinishedStep(1, updates=[first, last], **facts))
    observer.close()
    run_dir.close()
    expected = {
        "num_tokens": 12.0,
        "is_skipped": 4.0,
        "non_finite_updates": 6.0,
        "ratio_max": 4.5,
        "loss": 8.0,
    }
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for prefix, record in zip(("", "critic/"), records, strict=True):
        assert {name: record[f"learner/{prefix}{name}"] for name in own} == expected


def test_an_alarm_that_is_not_written_down_is_raised_all_the_same(tmp_path):
    options = AlarmsConfig(window_steps=1, min_ess=0.5)
    alarms = Alarms(rules_from(options), window_steps=1, file=tmp_path / "alarms.jsonl")
    with files_of_at_most(0):
        assert [alarm.rule for _, alarm in alarms.observe(1, {"learner/correction/ess": 0.1})] == ["ess_low"]
        with pytest.raises(OSError, match="too large"):
            alarms.write()
    alarms.observe(2, {"learner/correction/ess": 0.9})
    lines = [json.loads(line) for line in (tmp_path / "alarms.jsonl").read_text().splitlines()]
    assert [(line["step"], line["event"]) for line in lines] == [(1, "raised"), (2, "cleared")]
