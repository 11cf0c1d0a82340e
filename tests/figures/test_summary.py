"""From trajectories to attempts, and from attempts to the figures of an evaluation."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.data.trajectories import encode, write_parquet
from agentrl.errors import DataError
from agentrl.figures.attempts import EvaluatedAttempt, attempt_of, attempts_of, read_attempts
from agentrl.figures.summary import FEW, OVERALL, SourceSummary, summarise
from agentrl.types import Failure, Message, Outcome, RewardEvent, ToolCall, Trajectory
from parts.attempts import evaluated
from parts.trajectories import make_trajectory


def trajectory(
    *,
    value: float | None = 1.0,
    outcome: Outcome = Outcome.COMPLETED,
    failure: str | None = None,
    **fields: Any,
) -> Trajectory:
    """Two tokens of prompt, a turn of two, one of context, a turn of one."""
    defaults: dict[str, Any] = {
        "metrics": {}
        if value is None
        else {"num_tool_errors": 1.0, "reward/gsm8k": value, "reward/gsm8k/format": 1.0, "accuracy": value},
        "extra_info": {"level": 3, "reward_details": {"gsm8k": {"answer": "42"}}},
        "messages": (Message("assistant", "", (ToolCall("1", "calculator", {}),)),),
    }
    return make_trajectory(
        [-1, -1, 0, 0, -1, 1],
        member=2,
        task_id="test/7",
        data_source="openai/gsm8k",
        agent_name="tool_agent",
        rewards=()
        if value is None
        else (RewardEvent("gsm8k", value, 5), RewardEvent("length_penalty", -0.25, 5)),
        outcome=outcome,
        failure=failure,
        **{**defaults, **fields},
    )


def attempts(rows: Sequence[Sequence[float | None]], **fields: Any) -> list[EvaluatedAttempt]:
    """One row of accuracies per problem."""
    return [
        evaluated(f"p{i}", member, value, **fields)
        for i, row in enumerate(rows)
        for member, value in enumerate(row)
    ]


# --------------------------------------------------------------------------------------------------- attempts


def test_an_attempt_by_hand():
    assert attempt_of(trajectory()) == EvaluatedAttempt(
        source="openai/gsm8k",
        problem="test/7",
        member=2,
        accuracy=1.0,
        reward=0.75,
        answer="42",
        format=1.0,
        is_truncated=False,
        num_tokens=3,
        num_turns=2,
        num_tool_calls=1,
        num_tool_errors=1,
        failure=None,
        difficulty="3",
        agent="tool_agent",
    )


def test_a_failure_is_no_wrong_answer():
    failed = attempt_of(
        trajectory(value=None, outcome=Outcome.MODEL_ERROR, failure=Failure("no server answered"))
    )
    assert (failed.accuracy, failed.reward, failed.answer, failed.format) == (None, None, None, None)
    assert failed.failure == "no server answered"
    assert attempt_of(trajectory(outcome=Outcome.ABORTED)).failure == "aborted"
    truncated = attempt_of(trajectory(value=0.0, outcome=Outcome.TRUNCATED))
    assert (truncated.accuracy, truncated.is_truncated, truncated.failure) == (0.0, True, None)


def test_what_no_reward_has_seen_has_no_score():
    generated = attempt_of(trajectory(value=None, extra_info={}))
    assert (generated.accuracy, generated.difficulty, generated.failure) == (
        None,
        None,
        "not scored by any reward",
    )


@pytest.mark.parametrize(("answer", "text"), [(42, "42"), ("1/2", "1/2"), (None, None), ([1, 2], "[1, 2]")])
def test_answers_are_text(answer, text):
    assert attempt_of(trajectory(extra_info={"reward_details": {"mine": {"answer": answer}}})).answer == text


def test_attempts_of_tables_and_files(tmp_path):
    batch = encode([trajectory(), trajectory(value=0.0)])
    expected = [attempt_of(trajectory()), attempt_of(trajectory(value=0.0))]
    assert attempts_of(batch) == expected
    assert attempts_of(pa.Table.from_batches([batch, batch])) == expected * 2
    write_parquet(tmp_path / "run" / "attempts.parquet", encode([trajectory()]), step=3)
    write_parquet(tmp_path / "run" / "questions.parquet", encode([trajectory()]))
    assert (
        read_attempts(tmp_path / "run")
        == read_attempts(tmp_path / "run" / "attempts.parquet")
        == expected[:1]
    )
    (tmp_path / "run" / "attempts.parquet").unlink()
    assert read_attempts(tmp_path) == expected[:1]


def test_large_files_are_read_some_rows_at_a_time(tmp_path):
    rows = [
        trajectory().replace(member=member, metrics={"accuracy": float(member % 2)}) for member in range(2500)
    ]
    write_parquet(tmp_path / "attempts.parquet", encode(rows))
    assert read_attempts(tmp_path) == [attempt_of(row) for row in rows]


def test_what_is_no_evaluation_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"no such file"):
        read_attempts(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"no \*.parquet in this folder"):
        read_attempts(tmp_path)
    (tmp_path / "text.parquet").write_text("no Parquet")
    with pytest.raises(DataError, match=r"text\.parquet cannot be read as a Parquet file of trajectories"):
        read_attempts(tmp_path / "text.parquet")
    pq.write_table(pa.table({"prompt": ["?"]}), tmp_path / "text.parquet")
    with pytest.raises(DataError, match=r"text.parquet: contains no trajectories"):
        read_attempts(tmp_path / "text.parquet")
    (tmp_path / "text.parquet").unlink()
    write_parquet(tmp_path / "step_1.parquet", encode([trajectory()]))
    write_parquet(tmp_path / "step_2.parquet", encode([trajectory()]))
    with pytest.raises(DataError, match=r"attempt 2 at problem 'test/7' occurs twice"):
        read_attempts(tmp_path)


# ---------------------------------------------------------------------------------------------------- figures


def test_figures_by_hand():
    found = summarise(
        attempts([[1, 1, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]], num_tokens=20, num_tool_calls=2)
    ).overall
    assert (found.name, found.num_problems, found.num_attempts, found.n, found.num_solved) == (
        OVERALL,
        3,
        12,
        4,
        2,
    )
    assert found.accuracy is not None
    assert found.accuracy.value == pytest.approx(0.25)
    assert [at.k for at in found.pass_at] == [1, 2, 3, 4]
    assert [at.estimate.value for at in found.pass_at] == pytest.approx(
        [1 / 4, (5 / 6 + 1 / 2) / 3, (1 + 3 / 4) / 3, 2 / 3]
    )
    assert found.majority_at[-1].estimate.value == pytest.approx((0.5 + 0 + 0) / 3)
    assert [at.estimate for at in found.best_of_at] == [
        at.estimate for at in found.pass_at
    ]  # the reward is the accuracy
    assert found.num_tokens is not None
    assert (found.num_tokens.value, found.num_tokens.low, found.num_tokens.high) == (20, 20, 20)
    assert found.tool_use_rate is not None
    assert found.tool_use_rate.value == 1.0
    assert found.failure_rate.value == 0.0


def test_attempts_without_a_score_are_left_out_and_counted():
    found = summarise(attempts([[1, None], [0, 1], [None, None], [0, 0]])).overall
    assert found.accuracy is not None
    assert found.accuracy.value == pytest.approx((1 + 0.5 + 0) / 3)
    assert (found.num_problems, found.num_scored_problems, found.num_scored) == (4, 3, 5)
    assert [(at.k, at.num_problems) for at in found.pass_at] == [(1, 3), (2, 2)]
    assert found.failure_rate.value == pytest.approx(3 / 8)
    assert "1 of 4 problems have no score and are left out" in found.warnings
    assert any("1 of 4 problems have fewer than 2 scored attempts" in warning for warning in found.warnings)


def test_an_evaluation_that_failed_altogether_still_says_so():
    found = summarise(attempts([[None, None], [None, None]])).overall
    assert (found.accuracy, found.pass_at, found.majority_at, found.num_tokens) == (None, (), (), None)
    assert found.failure_rate.value == 1.0


@pytest.mark.parametrize("num_solved", [FEW - 1, FEW])
def test_few_solved_problems_carry_a_warning(num_solved):
    found = summarise(attempts([[1.0]] * num_solved + [[0.0]] * 20)).overall
    assert any(f"{num_solved} of" in warning for warning in found.warnings) == (num_solved < FEW)


def test_parts_of_a_point_count_in_the_mean_and_solve_nothing():
    found = summarise(attempts([[0.5, 0.75], [0.25, 1.0]])).overall
    assert found.accuracy is not None
    assert found.accuracy.value == pytest.approx(0.625)
    assert found.pass_at[-1].estimate.value == 0.5


def test_sources_and_difficulties_are_apart():
    easy = [evaluated(f"p{i}", 0, 1.0, difficulty="1") for i in range(3)]
    hard = [evaluated(f"q{i}", 0, 0.0, difficulty="5") for i in range(2)]
    other = [
        evaluated("p0", 0, 0.0, source="aime_2024")
    ]  # the same task id in another source is another problem
    found = summarise([*hard, *easy, *other])
    assert [(source.name, source.num_problems) for source in found.sources] == [
        ("aime_2024", 1),
        ("gsm8k", 5),
    ]
    assert found.overall.num_problems == 6
    by_difficulty: tuple[SourceSummary, ...] = found.sources[1].by_difficulty
    assert [(one.name, one.num_problems, one.num_solved) for one in by_difficulty] == [
        ("1", 3, 3),
        ("5", 2, 0),
    ]
    assert found.sources[0].by_difficulty == ()


def test_figures_travel_as_json():
    found = summarise(attempts([[1, 0], [None, None]]))
    read = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert read["overall"]["accuracy"]["value"] == 0.5
    assert read["sources"][0]["pass_at"][1]["k"] == 2


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([0.0, 1.0, None]), min_size=3, max_size=3), min_size=1, max_size=6),
    st.randoms(),
)
def test_the_order_of_attempts_does_not_matter(rows, random):
    first = attempts(rows)
    one, other = summarise(first).overall, summarise(random.sample(first, len(first))).overall
    assert [at.num_problems for at in one.pass_at] == [at.num_problems for at in other.pass_at]
    values = [at.estimate.value for at in one.pass_at]
    np.testing.assert_allclose(values, [at.estimate.value for at in other.pass_at])
    if all(None not in row for row in rows):
        assert all(
            later >= earlier - 1e-12 for earlier, later in itertools.pairwise(values)
        )  # more tries, never worse


def test_nothing_is_no_evaluation():
    with pytest.raises(ValueError, match="no attempts"):
        summarise([])
