"""The table of attempts that trackers show: which attempts, how much text, and that no text can do harm."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.tracking.attempt_table import (
    COLUMNS,
    MAX_CELL_CHARS,
    MAX_CONVERSATION_CHARS,
    AttemptRow,
    SampledAttempts,
    sampled,
)
from agentrl.tracking.conversation_text import shortened
from agentrl.types import Failure, Message, Outcome, ToolCall
from parts.trajectories import make_trajectory

ANY_TEXT = st.text(st.characters(), max_size=200)  # lone surrogates and control characters included


def attempt(row: int, member: int = 0, *, source: str = "s", **fields):
    return make_trajectory(
        [-1, 0, 0], group_id=row, member=member, data_source=source,
        **{"task_id": f"val:{row}", "reward": 0.5, **fields},
    )  # fmt: skip


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 3), st.booleans()), min_size=0, max_size=20),
    st.integers(1, 12),
    st.randoms(use_true_random=False),
)
def test_the_same_tasks_are_shown_whatever_the_order_and_the_outcomes(rows, limit, shuffler):
    def played(does_fail: bool):
        outcome = {"outcome": Outcome.TIMEOUT, "reward": None} if does_fail else {}
        return [
            attempt(row, member, source=source, **(outcome if fails else {}))
            for row, (source, n, fails) in enumerate(rows)
            for member in range(n)
        ]

    once, again = played(False), played(True)
    shuffler.shuffle(again)
    keys = [(t.task_id, t.member) for t in sampled(once, limit)]
    assert keys == [(t.task_id, t.member) for t in sampled(again, limit)]
    assert len(set(keys)) == len(keys) == min(limit, len(once))
    sources = {t.data_source for t in sampled(once, limit)}
    assert len(sources) == min(limit, len({source for source, _, _ in rows}))
    if any(member for _, member in keys):
        first = {f"val:{row}" for row in range(len(rows))}
        by_source = {t.data_source for t in sampled(once, limit) if t.member}
        shown = {task for task, member in keys if member == 0}
        assert {t for t in first - shown if rows[int(t[4:])][0] in by_source} == set()


@given(ANY_TEXT, st.integers(1, 300))
def test_a_shortened_text_keeps_both_ends_and_its_bound(text, limit):
    short = shortened(text, limit)
    assert len(short) <= limit
    assert short == text if len(text) <= limit else short[:1] == text[:1]


@given(ANY_TEXT, ANY_TEXT)
def test_no_text_of_a_model_leaves_its_cell_or_becomes_markup(said, failure):
    messages = (Message("user", said), Message("assistant", said))
    played = attempt(1, task_id=said, failure=Failure(failure), messages=messages)
    table = SampledAttempts.of([played, attempt(2)], step=3, version=4, limit=2)
    markdown = table.to_markdown()
    markdown.encode()
    lines = markdown.split("\n")
    assert [line.replace("\\|", "").count("|") for line in lines[:4]] == [len(COLUMNS)] * 4
    blocks = [line for line in lines[4:] if line.startswith("    ")]
    assert "<" not in "\n".join(line for line in lines if not line.startswith("    "))
    assert all(line.startswith(("    ", "**")) or not line for line in lines[4:])
    assert len(blocks) >= 2
    assert not [c for c in markdown if c < " " and c not in "\n\t"]
    assert json.loads(table.to_json())["columns"] == list(COLUMNS)


def test_a_row_says_what_became_of_the_attempt():
    call = ToolCall("1", "search", {"query": "x"})
    messages = (
        Message("user", "Who?"),
        Message("assistant", "", (call,), reasoning="hm"),
        Message("tool", "y" * 10_000, name="search"),
        Message("assistant", "nobody"),
    )
    metrics = {"num_turns": 2.0, "num_tool_calls": 1.0, "generate_s": 1.25, "tool_s": 0.5, "reward_s": 0.25}
    row = AttemptRow.of(attempt(5, messages=messages, metrics=metrics))
    assert (row.reward, row.num_turns, row.num_tool_calls, row.seconds) == (0.5, 2, 1, 2.0)
    assert row.conversation.startswith(
        '[user] Who?\n[assistant, thinking] hm\n[call] search {"query": "x"}\n'
    )
    assert row.conversation.endswith("\n[assistant] nobody")
    assert len(row.conversation) == MAX_CONVERSATION_CHARS
    failed = AttemptRow.of(attempt(5, outcome=Outcome.TIMEOUT, failure=Failure("z" * 1000), reward=None))
    assert (failed.outcome, failed.reward, len(failed.failure)) == ("timeout", None, MAX_CELL_CHARS)


@pytest.mark.parametrize("limit", [1, 3, 7])
def test_rows_of_a_large_validation_are_spread_over_it(limit):
    shown = [t.group_id for t in sampled([attempt(row) for row in range(1000)], limit)]
    gaps = [later - earlier for earlier, later in zip(shown, [*shown[1:], 1000], strict=True)]
    assert max(gaps) - min(gaps) <= 1
