"""Duplicates, held-out shares, bands of difficulty: laws of what stays, and what a person is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.data.files import open_rows
from agentrl.errors import DataError
from agentrl.extras.datatools.convert import filter_rows
from agentrl.extras.datatools.pass_rates import read_pass_rates
from agentrl.extras.datatools.selection import Band, Candidate, Selection, hold_out, normalise, select
from agentrl.types import Outcome
from parts.attempts import attempt, attempts


def candidate(question: str, *, split: str = "train", answer: str = "1", index: int = 0) -> Candidate:
    row = {
        "prompt": [{"role": "user", "content": question}],
        "extra_info": {"split": split, "index": index, "question": question},
    }
    return Candidate(row, split, question=normalise(question), identity=normalise(question), answer=answer)


CANDIDATES = st.lists(
    st.builds(
        candidate,
        st.sampled_from(["A?", "a?", " a ?", "b", "B ", "c"]),
        split=st.sampled_from(["train", "test"]),
    )
)


# ------------------------------------------------------------------------------------------------- duplicates


@given(CANDIDATES)
def test_of_each_question_one_row_is_left_and_what_measures_keeps_its_own(candidates):
    if not candidates:
        return
    kept, _ = select(candidates, Selection(deduplicate=True))
    questions = [row.question for row in kept]
    assert sorted(questions) == sorted({row.question for row in candidates})
    tested = {row.question for row in candidates if row.split == "test"}
    assert {row.question for row in kept if row.split == "test"} == tested
    assert [candidates.index(row) for row in kept] == sorted(candidates.index(row) for row in kept)
    assert select(kept, Selection(deduplicate=True)) == (kept, [])


def test_duplicates_are_counted_whether_they_stay_or_not():
    rows = [
        candidate("How  many?"),
        candidate("how many?", answer="2"),
        candidate("How many?", split="test"),
        candidate("Else?"),
    ]
    kept, notes = select(rows, Selection())
    assert kept == rows
    assert notes == [
        "2 rows repeat another one (1 with another answer, 2 of another split): kept; --deduplicate leaves "
        "them out"
    ]
    kept, notes = select(rows, Selection(deduplicate=True))
    assert kept == [rows[2], rows[3]]
    assert notes == ["2 rows repeat another one (1 with another answer, 2 of another split): left out"]


# --------------------------------------------------------------------------------------------- held-out share


@given(st.integers(2, 60), st.floats(0.05, 0.9), st.integers(0, 2**31))
def test_a_share_of_the_questions_is_held_out_and_no_question_is_in_both(num, share, seed):
    rows = [candidate(f"question {index // 2 if index % 3 else index}", index=index) for index in range(num)]
    questions = {row.question for row in rows}
    if max(1, round(share * len(questions))) >= len(questions):
        return
    divided = hold_out(rows, share, seed=seed)
    test, train = ({row.question for row in divided if row.split == split} for split in ("test", "train"))
    assert not test & train
    assert len(test) == max(1, round(share * len(questions)))
    assert [row.row["extra_info"]["index"] for row in divided] == list(range(num))
    assert all(row.row["extra_info"]["split"] == row.split for row in divided)
    assert hold_out(rows, share, seed=seed) == divided


def test_another_seed_holds_out_other_questions():
    rows = [candidate(f"q{index}") for index in range(50)]
    assert hold_out(rows, 0.3, seed=1) != hold_out(rows, 0.3, seed=2)


def test_a_share_that_cannot_be_held_out():
    with pytest.raises(
        DataError,
        match=r"--test-share divides one split, but the data has train, test: choose one with --split",
    ):
        select([candidate("a"), candidate("b", split="test")], Selection(test_share=0.5))
    with pytest.raises(DataError, match=r"--test-share=0\.5 of 1 questions leaves none to train on"):
        select([candidate("a")], Selection(test_share=0.5))


# ------------------------------------------------------------------------------------------------- difficulty


def test_a_band_keeps_what_was_solved_sometimes(tmp_path):
    attempts(tmp_path / "other.parquet", attempt("Never?", 1.0))  # a file of attempts is read alone
    file = attempts(
        tmp_path / "attempts.parquet",
        *(attempt("Never?", 0.0) for _ in range(4)),
        *(attempt("always?", 1.0) for _ in range(4)),
        *(attempt("SOMETIMES ?", accuracy) for accuracy in (1.0, 0.0, 0.0, 0.0)),
        attempt("Sometimes ?", 1.0, outcome=Outcome.TIMEOUT),
        *(attempt("by its prompt", None, reward=reward, known=False) for reward in (0.0, 0.5)),
    )
    rows = [candidate(text) for text in ("Never?", "Always?", "Sometimes ?", "By its prompt", "Unasked?")] + [
        candidate("always?", split="test")
    ]
    rates = read_pass_rates(file)
    assert [rates.of(row) for row in rows] == [0.0, 1.0, 0.25, 0.5, None, 1.0]
    kept, notes = select(rows, Selection(band=Band(rates.of, 0.25, 0.9)))
    assert kept == [rows[2], rows[3], rows[5]]
    assert notes[-1] == (
        "pass rates from 0.25 to 0.9: 2 kept, 1 below and 1 above left out, 1 without attempts left out, 1 "
        "of held-out splits kept"
    )
    kept, notes = select(rows[:5], Selection(band=Band(read_pass_rates(tmp_path).of, 0.0, 0.2, "keep")))
    assert kept == [rows[0], rows[4]]
    assert notes == [
        "pass rates from 0 to 0.2: 1 kept, 0 below and 3 above left out, 1 without attempts kept"
    ]


def test_a_share_is_held_out_before_anything_is_filtered_by_difficulty(tmp_path):
    rows = [candidate(f"q{index}") for index in range(10)]
    rates = read_pass_rates(
        attempts(
            tmp_path / "a.parquet", *(attempt(f"q{index}", 1.0) for index in range(9)), attempt("q9", 0.5)
        )
    )
    kept, _ = select(rows, Selection(test_share=0.5, seed=3, band=Band(rates.of, 0.0, 0.9)))
    assert [row.question for row in kept if row.split == "test"] == [
        row.question for row in hold_out(rows, 0.5, seed=3) if row.split == "test"
    ]
    assert {row.question for row in kept if row.split == "train"} <= {"q9"}


def test_nothing_left_says_why(tmp_path):
    rates = read_pass_rates(attempts(tmp_path / "a.parquet", attempt("a", 1.0)))
    with pytest.raises(
        DataError, match=r"^no row is left; pass rates from 0 to 0\.5: 0 kept, 0 below and 1 above left out$"
    ):
        select([candidate("a")], Selection(band=Band(rates.of, 0.0, 0.5)))


def test_attempts_that_say_nothing(tmp_path):
    with pytest.raises(DataError, match="no Parquet file of attempts; give one"):
        read_pass_rates(tmp_path)
    with pytest.raises(DataError, match="no Parquet file of attempts; give one"):
        read_pass_rates(tmp_path / "nowhere.parquet")
    (tmp_path / "a.parquet").write_text("no Parquet")
    with pytest.raises(
        DataError,
        match=r"a\.parquet cannot be read as a Parquet file of trajectories: it is no whole Parquet file",
    ):
        read_pass_rates(tmp_path / "a.parquet")
    with pytest.raises(DataError, match="no attempt in it has a score"):
        read_pass_rates(attempts(tmp_path / "b.parquet", attempt("a", 1.0, outcome=Outcome.ABORTED)))
    with pytest.raises(
        DataError, match=r"pass rates from 0\.9 to 0\.1: both must be from 0 to 1, in ascending order"
    ):
        Band(lambda _: None, 0.9, 0.1)


# --------------------------------------------------------------------------------------------- filtered files


def task_row(**changes) -> dict:
    base = {"prompt": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": "1"}}
    return {**base, **changes}


def filtered(folder: Path, *rows: dict) -> list[dict]:
    path, out = folder / "a.jsonl", folder / "out.parquet"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    filter_rows(path, out, Selection())
    return list(open_rows(str(out)).rows(len(rows)))


def test_a_filtered_file_of_json_has_the_same_rows(tmp_path):
    rows = [task_row(extra_info='{"question": "q", "n": null}'), task_row(kind="a")]
    assert filtered(tmp_path, *rows) == [
        {**rows[0], "kind": None},
        {**rows[1], "extra_info": None},
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"reward_model": {"ground_truth": 2**70}},
            "row 1 (line 2): field 'reward_model': does not fit a Parquet",
        ),
        (
            {"reward_model": {"ground_truth": "1", "x": {"a": None}}},
            "field 'reward_model': would change as a Parquet",
        ),
        (
            {"prompt": "hello"},
            "row 1 (line 2): field 'prompt': must be a list of {role, content}, is 'hello'",
        ),
        ({"reward_model": {"ground_truth": [1]}}, "column 'reward_model' has values of different types"),
    ],
)
def test_rows_of_json_that_parquet_would_change_are_refused(tmp_path, changes, words):
    with pytest.raises(DataError) as error:
        filtered(tmp_path, task_row(), task_row(**changes))
    assert words in str(error.value)
    assert not (tmp_path / "out.parquet").exists()
