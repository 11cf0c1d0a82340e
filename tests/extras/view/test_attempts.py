"""The table of attempts: what it finds is what plain Python finds in all rows."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.data.trajectories import encode, write_parquet
from agentrl.errors import ConfigError, DataError
from agentrl.evaluation.store import AttemptStore
from agentrl.extras.view.attempts import AttemptTable, Filters, Page
from agentrl.extras.view.columns import NUMBERS
from agentrl.extras.view.sources import open_sources
from agentrl.testing import play
from agentrl.types import SCORED_OUTCOMES
from parts.viewed import Stored, random_trajectory, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Stored]]:
    folder = tmp_path_factory.mktemp("viewed") / "run"
    return folder, write_run(folder, steps=4, groups=3)


def value_of(stored: Stored, name: str, everything: list[Stored]) -> Any:
    """Return a column's value of an attempt, from what was written and in plain Python; None: not known."""
    own, failed = stored.trajectory, stored.failed
    if name in ("step", "set"):
        return getattr(stored, name)
    if failed is not None:
        known = {"group": failed.group_id, "member": failed.member, "source": failed.data_source,
                 "agent": failed.agent_name, "outcome": failed.outcome.value, "became": failed.became,
                 "task": failed.task_id, "failure": failed.failure.text}  # fmt: skip
        return known.get(name)
    assert own is not None
    scored = own.outcome in SCORED_OUTCOMES
    sampled = [int(v) for v, mine in zip(own.versions, own.action_mask, strict=True) if mine]
    metric = {"turns": "num_turns", "calls": "num_tool_calls", "errors": "num_tool_errors"}
    if name in metric:
        return own.metrics[metric[name]]
    if name == "margin":
        file = stored.key.rpartition(":")[0]
        group = [
            one.trajectory.reward
            for one in everything
            if one.trajectory is not None
            and one.key.rpartition(":")[0] == file
            and one.trajectory.group_id == own.group_id
            and one.trajectory.outcome in SCORED_OUTCOMES
            and not one.trajectory.is_greedy
        ]
        return own.reward - sum(group) / len(group) if scored and group else None
    return {
        "group": own.group_id,
        "member": own.member,
        "source": own.data_source,
        "agent": own.agent_name,
        "outcome": own.outcome.value,
        "became": None,
        "policy": None,
        "task": own.task_id,
        "failure": None if own.failure is None else own.failure.text,
        "reward": own.reward if scored else None,
        "accuracy": float(own.reward > 0) if scored and not own.is_greedy else None,
        "sampled": len(sampled),
        "length": own.num_tokens,
        "lag": None if stored.learned_by is None else stored.learned_by - min(sampled),
        "seconds": own.metrics["generate_s"],
    }[name]


def said(stored: Stored) -> list[str]:
    own = stored.trajectory
    if own is None:
        return []
    calls = [call for message in own.messages for call in message.tool_calls]
    return [
        *(message.content for message in own.messages),
        *(str(call.arguments).replace("'", '"') for call in calls),
        *(call.name for call in calls),
    ]


def all_rows(table: AttemptTable, filters: Filters, **options: Any) -> list[Any]:
    """Page through a query, and check that each page is what was asked for."""
    rows: list[Any] = []
    while True:
        page = table.page(filters, offset=len(rows), limit=7, budget_s=60, **options)
        assert page.is_complete
        assert len(page.rows) == min(7, page.total - len(rows))
        rows += page.rows
        if len(rows) == page.total:
            return rows


def test_the_table_has_every_attempt_once_with_the_values_that_were_written(run) -> None:
    folder, stored = run
    rows = all_rows(AttemptTable(open_sources([folder])[0]), Filters())
    assert [row.key for row in rows] == [one.key for one in stored]
    for row, one in zip(rows, stored, strict=True):
        for name, value in row.values.items():
            wanted = value_of(one, name, stored)
            is_number = isinstance(wanted, (int, float))
            assert value == (pytest.approx(wanted, rel=1e-5, abs=1e-6) if is_number else wanted), (
                row.key,
                name,
            )


Keeps = Callable[[Any], bool]


@st.composite
def conditions(draw: st.DrawFn) -> dict[str, tuple[str, Keeps]]:
    """Return conditions by column, as they are written, with the same in Python."""
    found: dict[str, tuple[str, Keeps]] = {}
    for name in draw(st.lists(st.sampled_from(NUMBERS), max_size=2, unique=True)):
        low, high = sorted(draw(st.tuples(*[st.sampled_from([-1, 0, 0.5, 1, 1.5, 2, 3, 8, 20, 31])] * 2)))
        form = draw(st.sampled_from(["both", "low", "high", "one"]))
        text = {"both": f"{low}..{high}", "low": f"{low}..", "high": f"..{high}", "one": f"{low}"}[form]
        least = low if form != "high" else -math.inf
        most = {"both": high, "low": math.inf, "high": high, "one": low}[form]
        found[name] = (text, lambda v, a=least, b=most: v is not None and a <= np.float32(v) <= b)
    options = {"outcome": ["completed", "truncated", "timeout"], "agent": ["tool_agent"], "source": ["sums"],
               "set": ["training", "validation", "failed"], "became": ["dropped", "masked"]}  # fmt: skip
    for name in draw(st.lists(st.sampled_from(sorted(options)), max_size=2, unique=True)):
        kept = draw(st.lists(st.sampled_from(options[name]), min_size=1, unique=True))
        found[name] = (",".join(kept), lambda v, k=tuple(kept): v in k)
    for name in draw(st.lists(st.sampled_from(["task", "failure"]), max_size=1)):
        needle = draw(st.sampled_from(["T:1", "broke", "LUCK", "t:", "nothing"]))
        found[name] = (needle, lambda v, n=needle: v is not None and n.lower() in v.lower())
    return found


@given(
    chosen=conditions(),
    needle=st.sampled_from([None, "needle", "<SCRIPT", "calculator", '"expression"', "31m"]),
)
@settings(max_examples=60)
def test_a_filter_keeps_what_the_same_filter_in_python_keeps(run, chosen, needle) -> None:
    folder, stored = run
    texts = {name: text for name, (text, _) in chosen.items()} | ({"text": needle} if needle else {})
    rows = all_rows(TABLES.setdefault(folder, AttemptTable(open_sources([folder])[0])), Filters.parse(texts))
    assert [row.key for row in rows] == [
        one.key
        for one in stored
        if all(keeps(value_of(one, name, stored)) for name, (_, keeps) in chosen.items())
        and (needle is None or any(needle.lower() in text.lower() for text in said(one)))
    ]


TABLES: dict[Path, AttemptTable] = {}


@pytest.mark.parametrize("name", ["reward", "lag", "sampled", "group"])
@pytest.mark.parametrize("sign", ["", "-"])
def test_sorting_orders_all_rows_and_loses_none(run, name: str, sign: str) -> None:
    folder, stored = run
    rows = all_rows(AttemptTable(open_sources([folder])[0]), Filters(), sort=sign + name)
    assert sorted(row.key for row in rows) == sorted(one.key for one in stored)
    values = [row.values[name] for row in rows]
    known = [value for value in values if value is not None]
    assert values == known + [None] * (len(values) - len(known)), "what is not known comes last"
    assert known == sorted(known, reverse=sign == "-")


def test_a_tool_is_found_in_the_attempts_that_called_it(run) -> None:
    folder, stored = run
    table = AttemptTable(open_sources([folder])[0])
    called = [s.key for s in stored if s.trajectory and s.trajectory.metrics["num_tool_calls"]]
    assert [row.key for row in all_rows(table, Filters.parse({"tool": "calculator"}))] == called
    assert table.histogram(Filters(), "tool").counts == (len(called),)
    assert all_rows(table, Filters.parse({"tool": "search"})) == []


@pytest.mark.parametrize("name", ["outcome", "reward", "tool"])
def test_a_histogram_without_time_says_how_many_rows_it_counted(run, name: str) -> None:
    folder, _ = run
    table = AttemptTable(open_sources([folder])[0])
    whole = table.histogram(Filters(), name)
    part = AttemptTable(open_sources([folder])[0]).histogram(Filters(), name, budget_s=0)
    assert 0 < part.num_rows < whole.num_rows == table.page(Filters()).total
    assert sum(part.counts) + part.unknown < sum(whole.counts) + whole.unknown


@pytest.mark.parametrize("name", ["outcome", "reward", "sampled", "step", "set", "agent"])
def test_a_histogram_counts_the_rows_of_the_query(run, name: str) -> None:
    folder, stored = run
    table = AttemptTable(open_sources([folder])[0])
    found = table.histogram(Filters.parse({"set": "training,validation"}), name)
    values = [value_of(one, name, stored) for one in stored if one.set != "failed"]
    known = [value for value in values if value is not None]
    assert found.unknown == len(values) - len(known)
    assert sum(found.counts) == len(known)
    if found.labels:
        assert dict(zip(found.labels, found.counts, strict=True)) == {v: known.count(v) for v in set(known)}
    else:
        *low, last = [
            sum(a <= np.float32(v) < b for v in known)
            for a, b in zip(found.edges, found.edges[1:], strict=False)
        ]
        last += sum(np.float32(v) == found.edges[-1] for v in known)
        assert found.counts == (*low, last)


def test_a_query_without_time_still_ends_and_says_how_far_it_is(run) -> None:
    folder, stored = run
    table, pages = AttemptTable(open_sources([folder])[0]), list[Page]()
    while not pages or not pages[-1].is_complete:
        pages.append(table.page(Filters(), limit=500, budget_s=0))
    assert [page.searched for page in pages] == list(range(1, pages[-1].of + 1))
    assert [len(page.rows) for page in pages] == [page.total for page in pages]
    assert pages[-1].total == len(stored)


def test_a_new_step_is_found_and_what_is_kept_stays_within_its_bytes(tmp_path: Path) -> None:
    stored = write_run(tmp_path)
    table = AttemptTable(open_sources([tmp_path])[0], max_kept_bytes=64)
    filters = Filters.parse({"reward": "0..", "turns": "1.."})
    before = all_rows(table, filters)
    made = [random_trajectory(random.Random(5), group=70, member=m, version=4) for m in range(3)]
    write_parquet(tmp_path / "trajectories/step_000004.parquet", encode(made), step=4, learned_by=4)
    added = [t for t in made if t.outcome in SCORED_OUTCOMES]
    assert len(all_rows(table, filters)) == len(before) + len(added)
    assert len(all_rows(table, Filters())) == len(stored) + 3
    assert table._store._num_bytes <= 64 or len(table._store._kept) == 1


def test_one_file_of_attempts_alone_is_enough(tmp_path: Path) -> None:
    stored = [s for s in write_run(tmp_path) if s.key.startswith("trajectories/step_000002")]
    file = tmp_path / "trajectories" / "step_000002.parquet"
    for source in open_sources([file, tmp_path / "trajectories"]):
        rows = all_rows(AttemptTable(source), Filters.parse({"step": "2"}))
        assert [row.key for row in rows] == [s.key.removeprefix("trajectories/") for s in stored]


@pytest.mark.parametrize(
    ("conditions", "sort", "complaint"),
    [
        ({"colour": "red"}, "newest", "there is no column 'colour'; columns: step,"),
        ({"reward": "high"}, "newest", "reward='high' is no number and no range of numbers, such as 3, 3..5"),
        ({}, "task", "sort='task': sort by newest, step,"),
    ],
)
def test_a_wrong_question_is_one_line(run, conditions, sort: str, complaint: str) -> None:
    with pytest.raises(DataError) as caught:
        AttemptTable(open_sources([run[0]])[0]).page(Filters.parse(conditions), sort=sort)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_looked_at_is_refused_with_the_cure(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text("no")
    (tmp_path / "bad.parquet").write_text("no")
    for path, complaint in (
        ("missing", "does not exist; give the folder of a run or of an evaluation"),
        ("empty", "contains no metrics.jsonl, no attempts.parquet and no other *.parquet"),
        ("text.txt", "is no Parquet file; give a folder or a file *.parquet"),
    ):
        with pytest.raises(ConfigError, match="give") as caught:
            open_sources([tmp_path / path])
        assert complaint in str(caught.value)
    with pytest.raises(DataError, match=r"bad\.parquet cannot be read as a Parquet file of trajectories"):
        AttemptTable(open_sources([tmp_path / "bad.parquet"])[0]).page(Filters())
    with pytest.raises(ConfigError, match="given twice"):
        open_sources([tmp_path / "bad.parquet", tmp_path / "empty" / ".." / "bad.parquet"])


def test_an_evaluation_that_goes_on_is_read_from_its_store(tmp_path: Path) -> None:
    """Also while another process writes; in the end its file is read instead."""
    made = [random_trajectory(random.Random(i), group=i, member=0, version=1) for i in range(7)]
    with AttemptStore(tmp_path / "attempts.sqlite") as store:
        store.add([(f"k{i}", one) for i, one in enumerate(made[:3])])
        (source,) = open_sources([tmp_path])
        table = AttemptTable(source)
        assert (source.kind, source.is_live) == ("evaluation", True)
        assert [row.values["group"] for row in all_rows(table, Filters())] == [0, 1, 2]
        store.add([(f"k{i}", one) for i, one in enumerate(made[3:], start=3)])
        rows = all_rows(table, Filters.parse({"set": "evaluation"}))
        assert sorted(row.values["group"] for row in rows) == list(range(7))
        keys = {row.key for row in rows}
        assert len(keys) == 7
        assert keys > {row.key for row in all_rows(table, Filters.parse({"group": "..2"}))}
    assert not source.is_live
    write_parquet(tmp_path / "attempts.parquet", encode(made))
    assert [row.key for row in all_rows(table, Filters())] == [f"attempts.parquet:{i}" for i in range(7)]


def test_words_are_found_in_each_conversation_of_an_attempt(tmp_path: Path) -> None:
    nim = Path(__file__).parents[3] / "examples" / "nim.py"
    game = {"agent": "nim", "environment": "pile", "reward": "won", "plugins": [str(nim)]}
    own = [
        play([first, second], prompt="7", environment_kwargs={"stones": 7}, **game)
        for first, second in (("3", "is 2 right?"), ("no idea", "2"))
    ]
    write_parquet(tmp_path / "own.parquet", encode(own))
    table = AttemptTable(open_sources([tmp_path / "own.parquet"])[0])
    for words, expected in (("is 2 right?", [0]), ("no idea", [1]), ("7", [0, 1]), ("nobody said this", [])):
        rows = all_rows(table, Filters.parse({"text": words}))
        assert sorted(int(row.key.rpartition(":")[2]) for row in rows) == expected
