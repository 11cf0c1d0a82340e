"""Two evaluations compared: the test against scipy's, the table, the files, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from typer.testing import CliRunner, Result

from agentrl.cli.app import app
from agentrl.errors import DataError
from agentrl.extras.research.compare import compare
from agentrl.extras.research.paired import sign_flip_test
from agentrl.figures.attempts import EvaluatedAttempt
from parts.attempts import attempts, evaluated
from parts.trajectories import make_trajectory


def evaluation(rows: dict[str, list[float | None]], **fields: Any) -> list[EvaluatedAttempt]:
    return [
        evaluated(problem, member, value, **fields)
        for problem, row in rows.items()
        for member, value in enumerate(row)
    ]


# --------------------------------------------------------------------------------------------------- the test


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-4, 4), min_size=1, max_size=9))
def test_the_p_value_is_the_share_of_all_signs(eighths):
    differences = np.array(eighths) / 4
    sums = [
        abs(sum(sign * size for sign, size in zip(signs, eighths, strict=True)))
        for signs in itertools.product((-1, 1), repeat=len(eighths))
    ]
    found = sign_flip_test(differences, num_attempts=4)
    assert found.is_exact
    assert found.p_value == pytest.approx(np.mean(np.array(sums) >= abs(sum(eighths))))


def test_with_one_attempt_each_it_is_mcnemars_exact_test():
    differences = np.array([1.0] * 31 + [-1.0] * 14 + [0.0] * 1274)
    assert sign_flip_test(differences, num_attempts=1).p_value == pytest.approx(
        stats.binomtest(31, 45).pvalue
    )


def test_other_differences_are_sampled():
    differences = np.random.default_rng(0).normal(0.1, 1.0, 40)
    found = sign_flip_test(differences, num_attempts=8)
    reference = stats.permutation_test(
        (differences,),
        lambda x, axis: x.mean(axis=axis),
        permutation_type="samples",
        n_resamples=20_000,
        rng=1,
    )
    assert not found.is_exact
    assert found.p_value == pytest.approx(reference.pvalue, abs=0.02)
    assert sign_flip_test(np.full(40, np.pi), num_attempts=8).p_value == pytest.approx(1 / 10_001)  # never 0


def test_where_nothing_differs_small_p_values_are_as_rare_as_they_say():
    rng = np.random.default_rng(3)
    chances = rng.beta(1, 1, 40)
    pairs = rng.binomial(8, chances, (400, 2, 40)) / 8
    p_values = np.array([sign_flip_test(b - a, num_attempts=8).p_value for a, b in pairs])
    for level in (0.05, 0.2, 0.5):
        assert (p_values <= level).mean() == pytest.approx(level, abs=0.06)


# --------------------------------------------------------------------------------------------- the comparison


def test_a_comparison_by_hand():
    a = evaluation({"p": [0, 0], "q": [1, 0], "r": [1, 1], "s": [0, 0]})
    b = evaluation({"p": [1, 1], "q": [1, 1], "r": [0, 1], "s": [0, 0]})
    found = compare(a, b)
    assert found.sources == (dataclasses.replace(found.overall, name="gsm8k"),)
    assert found.overall.difference.value == pytest.approx((1 + 0.5 - 0.5) / 4)
    assert (found.overall.num_won, found.overall.num_lost, found.overall.num_problems) == (2, 1, 4)
    assert [(pair.problem, pair.accuracy_a, pair.accuracy_b) for pair in found.won] == [
        ("p", 0.0, 1.0),
        ("q", 0.5, 1.0),
    ]
    assert [pair.problem for pair in found.lost] == ["r"]
    # Signs of (2, 1, -1): the sum is 2 or more, up to its sign, in 6 of 8 ways.
    assert (found.overall.p_value, found.overall.is_exact) == (0.75, True)
    low, high = found.overall.difference.low, found.overall.difference.high
    assert low is not None
    assert high is not None
    assert low < 0 < found.overall.difference.value < high


def test_swapping_the_evaluations_changes_the_sign_alone():
    rng = np.random.default_rng(5)
    a, b = (
        evaluation({f"p{i}": rng.integers(0, 2, 4).astype(float).tolist() for i in range(20)})
        for _ in range(2)
    )
    there, back = compare(a, b), compare(b, a)
    assert there.overall.difference.value == pytest.approx(-back.overall.difference.value)
    assert there.overall.difference.low == pytest.approx(-(back.overall.difference.high or 0))
    assert there.overall.p_value == back.overall.p_value
    assert len(there.won) == len(back.lost)


@pytest.mark.parametrize(("num_changed", "is_noted"), [(5, True), (6, False)])
def test_too_few_changes_to_tell_are_noted(num_changed, is_noted):
    a = evaluation({f"p{i}": [0] for i in range(20)})
    found = compare(a, evaluation({f"p{i}": [float(i < num_changed)] for i in range(20)}))
    assert (found.overall.p_value < 0.05) is not is_noted
    assert any("the p-value cannot be below 0.05" in note for note in found.notes) is is_noted


def test_sources_are_compared_apart_and_together():
    a = [*evaluation({"p": [0], "q": [0]}), *evaluation({"p": [1]}, source="aime")]
    b = [*evaluation({"p": [1], "q": [1]}), *evaluation({"p": [0]}, source="aime")]
    found = compare(a, b)
    assert [(one.name, one.difference.value) for one in found.sources] == [("aime", -1.0), ("gsm8k", 1.0)]
    assert found.overall.num_problems == 3


def test_problems_must_match_unless_the_common_ones_are_asked_for():
    a, b = evaluation({"p": [0], "q": [0], "r": [1]}), evaluation({"p": [1], "s": [1]})
    with pytest.raises(
        DataError,
        match=r"^1 problems are in both evaluations, 2 only in the first, 1 only in the second; use --common",
    ):
        compare(a, b)
    found = compare(a, b, only_common=True)
    assert found.overall.num_problems == 1
    assert found.notes[0].startswith("1 problems are in both")
    with pytest.raises(
        DataError, match=r"the evaluations have no problem in common: the first has 3, the second 1"
    ):
        compare(a, evaluation({"z": [1]}), only_common=True)


def test_attempts_without_a_score_are_no_wrong_answers():
    a, b = evaluation({"p": [1, None], "q": [1, 1]}), evaluation({"p": [1, 1], "q": [None, None]})
    found = compare(a, b)
    assert (found.overall.num_problems, found.overall.num_won, found.overall.num_lost) == (1, 0, 0)
    assert found.notes[0] == "1 of 2 problems have no score in one of the two evaluations and are left out"
    with pytest.raises(DataError, match=r"none of the 2 problems"):
        compare(a, evaluation({"p": [None], "q": [None]}))


# ------------------------------------------------------------------------------------------------ the command


def stored(path: Path, accuracies: dict[str, float]) -> Path:
    rows = [
        make_trajectory(
            [-1, 0], group_id=i, task_id=problem, data_source="gsm8k", agent_name="tool_agent", reward=value,
            metrics={"accuracy": value},
        )
        for i, (problem, value) in enumerate(accuracies.items())
    ]  # fmt: skip
    return attempts(path, *rows)


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["compare", *map(str, arguments)], env={"COLUMNS": "80"})


def test_the_command_prints_a_table_and_writes_files(tmp_path):
    a = stored(tmp_path / "a" / "attempts.parquet", {f"p{i}": float(i < 3) for i in range(12)})
    b = stored(tmp_path / "b.parquet", {f"p{i}": float(i > 0) for i in range(12)})
    done = invoke(a.parent, b, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "won: 9 of 9" in done.output
    assert "gsm8k 0.250 0.917 +0.667 [+0.190, +0.953] 0.021 9 1 12" in [
        " ".join(line.split()) for line in done.output.splitlines()
    ]
    # By hand: 8 / 14 -+ 1.96 * sqrt((12 / 14 - (8 / 14)**2) / 14); at most 1 of 10 signs of one kind in 22 of
    # 1,024 ways.
    assert "B - A = +0.667 [+0.190, +0.953], p = 0.021 (exact sign-flip test)" in done.output
    read = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert (read["a"], read["overall"]["num_won"], read["overall"]["num_lost"]) == (str(a.parent), 9, 1)
    page = (tmp_path / "out" / "comparison.md").read_text()
    assert "| gsm8k | 0.250 | 0.917 | +0.667 | [+0.190, +0.953] | 0.021 | 9 | 1 | 12 |" in page
    assert (
        "## Lost: 1\n\n| source | problem | A | B |\n| --- | --- | --- | --- |\n| gsm8k | p0 | 1.000 of 1 | "
        "0.000 of 1 |" in page
    )


def test_the_command_refuses_other_problems_and_compares_the_common_ones(tmp_path):
    a, b = stored(tmp_path / "a.parquet", {"p": 1.0, "q": 0.0}), stored(tmp_path / "b.parquet", {"p": 1.0})
    refused = invoke(a, b)
    assert isinstance(refused.exception, DataError)
    assert refused.exception.exit_code == 2
    assert "--common" in str(refused.exception)
    assert invoke(a, b, "--common").exit_code == 0
