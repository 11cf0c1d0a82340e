"""`agentrl data show`: every kind of file can be looked at, and says what it holds."""

from __future__ import annotations

import datetime
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from agentrl.data.trajectories import encode, write_parquet
from agentrl.errors import DataError
from agentrl.extras.datatools.arithmetic import TASK_SCHEMA, write_arithmetic
from agentrl.extras.datatools.show import choose_rows, short_type, show_file
from parts.attempts import attempt


def shown(path: Path, *rows: int) -> str:
    console = Console(width=200, no_color=True, force_terminal=False)
    with console.capture() as capture:
        show_file(path, lambda count: rows, console)
    return capture.get()


def cells(text: str) -> list[list[str]]:
    """Return the cells of all tables in it, line by line."""
    return [
        [cell.strip() for cell in line.strip("│┃ ").replace("┃", "│").split("│")]
        for line in text.splitlines()
        if "│" in line or "┃" in line
    ]


def test_task_rows(tmp_path):
    write_arithmetic(tmp_path, seed=0, num_train=9, num_val=3, num_sft=3)
    text = shown(tmp_path / "train.parquet", 0)
    assert "train.parquet: 9 rows, 0.0 MB" in text
    assert ["prompt", "[{role, content}]"] in cells(text)
    counted = [row for row in cells(text) if row[0] == "arithmetic"]
    assert [(row[1], row[2]) for row in counted] == [
        ("tool_agent", "3"),
        ("single_turn_agent", "3"),
        ("interaction_agent", "3"),
    ]
    lengths = sorted(
        len(row["prompt"][0]["content"]) for row in pq.read_table(tmp_path / "train.parquet").to_pylist()[::3]
    )
    assert counted[0][3:] == [str(lengths[1]), str(lengths[2])]
    assert "row 0" in text
    first = pq.read_table(tmp_path / "train.parquet").slice(0, 1).to_pylist()[0]
    assert f"user  {first['prompt'][0]['content']}" in text
    assert f'"ground_truth": "{first["reward_model"]["ground_truth"]}"' in text


def test_conversations_with_tool_calls(tmp_path):
    write_arithmetic(tmp_path, seed=0, num_train=3, num_val=3, num_sft=30)
    rows = pq.read_table(tmp_path / "sft.parquet").to_pylist()
    index = next(i for i, row in enumerate(rows) if any(message["tool_calls"] for message in row["messages"]))
    text = shown(tmp_path / "sft.parquet", index)
    assert f'-> calculator({{"expression": "{rows[index]["expression"]}"}})' in text


def test_trajectories(tmp_path):
    write_parquet(
        tmp_path / "a.parquet", encode([attempt("Q1?", 1.0, reward=1.0), attempt("Q2?", 0.0)]), step=3
    )
    text = shown(tmp_path / "a.parquet", 1)
    assert ["s", "single_turn_agent", "2", "5", "5", "0.500", "2", "-", "2 completed"] in cells(text)
    assert "user  Q2?" in text
    assert "step: 3" in text
    assert "token_ids: 2 values" in text
    assert "accuracy=0" in text
    assert ["token_ids", "[int32]"] in cells(text)
    assert ["metrics", "{string: double}"] in cells(text)


def test_json_lines_and_long_values(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(
        b"\n".join(map(orjson.dumps, [{"q": "x" * 3000, "n": 1}, {"q": "[red]y", "n": None}]))
    )
    text = shown(tmp_path / "a.jsonl", 0, 1)
    assert ["q", "str"] in cells(text)
    assert ["n", "int or NoneType"] in cells(text)
    assert "(3,000 characters)" in text
    assert "q: [red]y" in text
    assert "data source" not in text


def test_values_are_shown_as_plugins_get_them(tmp_path):
    rows = [
        {"prompt": '[{"role": "user", "content": "Q?"}]', "reward_model": {"ground_truth": {"a": 1}}},
        {"prompt": "[1", "reward_model": {"ground_truth": {"b": [datetime.date(2026, 1, 2)]}}},
    ]
    info = [{"n": 1.5, "m": '{"x": null}'}, {"n": float("nan"), "m": None}]
    table = pa.Table.from_pylist(rows).append_column("extra_info", pa.array(info))
    pq.write_table(table, tmp_path / "a.parquet")
    text = shown(tmp_path / "a.parquet", 0, 1)
    assert "user  Q?" in text
    assert 'reward_model: {"ground_truth": {"a": 1}}' in text
    assert 'reward_model: {"ground_truth": {"b": ["2026-01-02"]}}' in text
    assert 'extra_info: {"n": NaN} (' in text
    assert "row 1: field 'extra_info.n': is nan" in " ".join(text.split())


def test_no_rows(tmp_path):
    pq.write_table(TASK_SCHEMA.empty_table(), tmp_path / "a.parquet")
    assert "a.parquet: 0 rows" in shown(tmp_path / "a.parquet")


def test_which_rows():
    assert choose_rows(5, row=None, is_random=False, first=2) == range(2)
    assert choose_rows(1, row=None, is_random=False, first=2) == range(1)
    assert choose_rows(5, row=4, is_random=False, first=1) == [4]
    assert {choose_rows(3, row=None, is_random=True, first=1)[0] for _ in range(100)} == {0, 1, 2}
    assert choose_rows(0, row=None, is_random=True, first=1) == range(0)
    with pytest.raises(DataError, match=r"--row=5: the file has 5 rows, counted from 0"):
        choose_rows(5, row=5, is_random=False, first=1)


def test_types_in_a_line():
    kind = pa.list_(pa.struct([("a", pa.large_string()), ("b", pa.large_list(pa.int64()))]))
    assert (short_type(kind), short_type(pa.large_list(pa.large_string())), short_type(pa.int32())) == (
        "[{a, b}]",
        "[string]",
        "int32",
    )
