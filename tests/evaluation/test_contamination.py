"""Overlap with the training set: against a search by hand, for any texts, in any batches."""

from __future__ import annotations

import json
import random
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import DataError
from agentrl.evaluation import contamination
from agentrl.evaluation.contamination import (
    Overlap,
    Question,
    SourceOverlap,
    find_overlap,
    refuse_unreadable,
    words,
)

NATALIA = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. "
    "How many clips did Natalia sell altogether in April and May?"
)
WENG = (
    "Weng earns $12 an hour for babysitting. Yesterday, she just did 50 minutes of babysitting. How much did "
    "she earn?"
)


def training(folder, prompts, name="train.parquet") -> str:
    rows = [
        {"prompt": p if isinstance(p, str) else [{"role": "user", "content": text} for text in p]}
        for p in prompts
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / name)
    return str(folder / name)


def test_a_question_of_the_training_set_is_found_however_it_is_punctuated(tmp_path):
    file = training(
        tmp_path,
        [
            ["What is two and two?"],
            ["You are a tutor.", NATALIA.upper().replace(",", " -")],
            ["Another one."],
        ],
    )
    note = find_overlap([Question("gsm8k", "q:0", NATALIA), Question("gsm8k", "q:1", WENG)], [file])
    assert note.num_rows == 3
    assert note.sources == (SourceOverlap("gsm8k", 2, 1, 1),)
    assert note.worst == (Overlap("gsm8k", "q:0", 1.0, file, 1, NATALIA),)


def test_the_template_that_all_questions_share_is_no_contamination(tmp_path):
    template = (
        'Let\'s think step by step and output the final answer after "####". Then stop and say nothing more.'
    )
    file = training(tmp_path, [f"What is {i} times {i + 1}? {template}" for i in range(50)])
    questions = [Question("gsm8k", f"q:{i}", f"{text} {template}") for i, text in enumerate((NATALIA, WENG))]
    assert find_overlap(questions, [file]).num_overlapping == 0


def test_an_instruction_of_many_questions_is_no_contamination(tmp_path):
    """Even where the questions neither begin nor end with it."""
    middle = "now answer in one whole sentence that a child of ten years would understand at once"
    file = training(tmp_path, [middle])
    questions = [Question("mine", str(i), f"colour number {i} {middle} for case {i}") for i in range(10)]
    assert find_overlap(questions, [file]).num_overlapping == 0
    assert find_overlap(questions[:2], [file]).num_overlapping == 2


def test_short_questions_count_only_as_a_whole(tmp_path):
    file = training(
        tmp_path, ["What is the sum of 3 and 4, and why do you think that it is so?", "Is 7 prime?"]
    )
    questions = [
        Question("mine", "inside", "What is the sum of 3 and"),
        Question("mine", "whole", "is 7 PRIME"),
        Question("other", "no", "4?"),
    ]
    note = find_overlap(questions, [file])
    assert [(o.problem, o.share, o.row) for o in note.worst] == [("whole", 1.0, 1)]
    assert note.sources == (SourceOverlap("mine", 2, 1, 1), SourceOverlap("other", 1, 0, 0))


def by_hand(question: list[str], message: list[str]) -> float:
    """The share of the question's words in a phrase of 13 (or, of 8 to 12 words, all) that the message
    has.
    """
    length = min(13, len(question))
    if length < 8:
        return float(question == message and bool(question))
    grams = {tuple(message[i : i + length]) for i in range(len(message) - length + 1)}
    found = {
        i + d
        for i in range(len(question) - length + 1)
        if tuple(question[i : i + length]) in grams
        for d in range(length)
    }
    return len(found) / len(question)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 30), st.integers(1, 5))
def test_shares_are_those_of_a_search_by_hand(tmp_path_factory, seed, size, batch):
    rng = random.Random(seed)
    question = [rng.choice("abcdefgh") + str(rng.randrange(4)) for _ in range(size)]
    messages = []
    for _ in range(7):
        start, end = sorted((rng.randrange(size + 1), rng.randrange(size + 1)))
        noise = [
            [rng.choice("abcxyz") + str(rng.randrange(4)) for _ in range(rng.randrange(6))] for _ in range(2)
        ]
        messages.append([*noise[0], *question[start:end], *noise[1]])
    file = training(tmp_path_factory.mktemp("train"), [[" ".join(m)] for m in messages])
    before, contamination.STREAM_ROWS = contamination.STREAM_ROWS, batch
    try:
        note = find_overlap([Question("s", "q", " ".join(question))], [file])
    finally:
        contamination.STREAM_ROWS = before
    best = max(by_hand(question, message) for message in messages)
    assert [o.share for o in note.worst] == ([] if best == 0 else [pytest.approx(best)])


def test_json_lines_and_other_columns(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(json.dumps({"question": text}) for text in (WENG, NATALIA)))
    note = find_overlap([Question("gsm8k", "q", NATALIA)], [str(path)], prompt_key="question")
    assert [o.row for o in note.worst] == [1]


@pytest.mark.parametrize(
    "compare",
    [partial(find_overlap, [Question("s", "q", NATALIA)]), refuse_unreadable],
    ids=["after", "before"],
)
def test_what_cannot_be_compared_is_told(tmp_path, compare):
    file = training(tmp_path, ["x"])
    compare([file])
    with pytest.raises(DataError, match=r"has no column 'question'; it has prompt"):
        compare([file], prompt_key="question")
    with pytest.raises(DataError, match="does not exist"):
        compare([str(tmp_path / "no.parquet")])
    pq.write_table(pa.table({"prompt": [1, 2]}), tmp_path / "numbers.parquet")
    with pytest.raises(DataError, match=r"row 0: field 'prompt': must be text or a list of messages, is int"):
        compare([str(tmp_path / "numbers.parquet")])


def test_words_are_compared_without_case_width_and_marks():
    assert words("Let’s ﬁnd  $x^2$, ＡＢＣ!") == ["let", "s", "find", "x", "2", "abc"]
