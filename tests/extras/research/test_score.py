"""`agentrl score`: the rows stay as they are, each response gets its score, and what fails is counted, never
a zero.
"""

from __future__ import annotations

import datetime
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.config.schema import Config
from agentrl.errors import ConfigError, DataError, PluginError
from agentrl.extras.research.responses import StoredRow
from agentrl.extras.research.score import ScoredResponse, score_file
from agentrl.types import Message, Task

FUNCTION = """
import time
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    if solution_str == "hang":
        time.sleep(600)
    if solution_str == "raise":
        raise ValueError(f"cannot read {solution_str!r}")
    if solution_str == "leave":
        raise SystemExit(3)
    if solution_str == "die":
        __import__("os")._exit(3)
    if solution_str == "text":
        return "right"
    if solution_str == "skip":
        return None
    return {"score": bonus + len(solution_str), "acc": float(solution_str == ground_truth), "extra": (extra_info or {}).get("index")}

def slow(data_source, solution_str, ground_truth):
    Path(ground_truth).touch()
    time.sleep(600)

def as_verl_evaluates(data_source, solution_str, ground_truth):
    return solution_str == ground_truth

async def later(data_source, solution_str, ground_truth, extra_info):
    return float(extra_info["index"])
"""  # noqa: E501


@pytest.fixture
def function(tmp_path: Path) -> str:
    path = tmp_path / "my_reward.py"
    path.write_text(FUNCTION)
    return str(path)


def with_function(path: str, name: str = "compute_score", timeout_s: float = 30.0, **kwargs: float) -> Config:
    custom = {"path": path, "name": name, "kwargs": kwargs}
    return Config.model_validate({"reward": {"timeout_s": timeout_s, "custom_function": custom}})


def row(
    *responses: str | None, truth: str = "4", source: str = "openai/gsm8k", index: int = 0
) -> dict[str, object]:
    prompt = [{"role": "user", "content": "2 + 2?"}]
    reward_model = {"style": "rule", "ground_truth": truth}
    extra_info = {"index": index, "split": "test"}
    return {
        "data_source": source,
        "prompt": prompt,
        "responses": list(responses),
        "reward_model": reward_model,
        "extra_info": extra_info,
    }


def write(path: Path, *rows: dict[str, object]) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def score(path: Path, out: Path, config: Config, **options: Any) -> list[ScoredResponse]:
    return score_file(path, out, columns=config.data, reward=config.reward, agent=config.agent, **options)


def scores_of(path: Path, config: Config | None = None, **options: str) -> list[list[float | None]]:
    out = path.with_name("out.parquet")
    score(path, out, config or Config(), num_processes=1, **options)
    return pq.read_table(out).column(options.get("scores_key", "scores")).to_pylist()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(
        st.lists(st.sampled_from(["#### 4", "#### 5", "no number", ""]) | st.none(), max_size=5), max_size=20
    ),
    group_rows=st.integers(1, 7),
)
def test_rows_stay_as_they_are_and_each_response_has_its_score(rows, group_rows, tmp_path):
    table = pa.Table.from_pylist(
        [row(*responses, index=i) for i, responses in enumerate(rows)], schema=SCHEMA
    )
    moment = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    table = table.append_column("when", pa.array([moment] * len(rows), pa.timestamp("ms", "UTC")))
    table = table.append_column("kind", pa.array(["a"] * len(rows), pa.dictionary(pa.int32(), pa.string())))
    table = table.append_column("small", pa.array(range(len(rows)), pa.uint8())).replace_schema_metadata(
        {"made": "by a test"}
    )
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=group_rows)
    scored = score(tmp_path / "in.parquet", tmp_path / "out.parquet", Config(), num_processes=1)

    before, after = pq.ParquetFile(tmp_path / "in.parquet"), pq.ParquetFile(tmp_path / "out.parquet")
    assert after.read().drop_columns(["scores"]).equals(before.read(), check_metadata=True)
    assert after.schema_arrow.field("scores").type == pa.list_(pa.float64())
    groups = [
        [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] for file in (before, after)
    ]
    assert [n for n in groups[1] if n] == [n for n in groups[0] if n]
    expected = [
        [None if text is None else float(text == "#### 4") for text in responses] for responses in rows
    ]
    assert after.read().column("scores").to_pylist() == expected
    assert [one.score for one in scored] == [score for of_row in expected for score in of_row]
    assert [one.member for one in scored] == [member for of_row in rows for member in range(len(of_row))]


SCHEMA = pa.Table.from_pylist([row("text")]).schema


def test_the_file_may_take_its_own_place_and_is_whole_or_absent(tmp_path):
    path = write(tmp_path / "in.parquet", row("#### 4"))
    score(path, path, Config(), num_processes=1)
    assert pq.read_table(path).column("scores").to_pylist() == [[1.0]]
    wrong = write(tmp_path / "wrong.parquet", row("#### 4"), row("#### 4", source="nobody/knows"))
    with pytest.raises(DataError, match="wrong:1: no reward for data_source 'nobody/knows'"):
        score(wrong, tmp_path / "absent.parquet", Config(), num_processes=1)
    assert {file.name for file in tmp_path.iterdir()} == {"in.parquet", "wrong.parquet"}


def test_the_data_source_chooses_the_reward(tmp_path):
    path = write(
        tmp_path / "in.parquet",
        row("#### 4"),
        row("\\boxed{\\frac{1}{2}}", truth="0.5", source="lighteval/MATH"),
    )
    assert scores_of(path) == [[1.0], [1.0]]


@given(
    st.lists(st.sampled_from(["<think>\n", "\n</think>\n", "a", "\n", "</think>"]), max_size=8).map("".join)
)
def test_a_reward_sees_the_whole_response(response):
    task = Task("t", "s", (Message("user", "?"),), "")
    assert StoredRow(task, (response,)).attempted(response).response_text == response


def test_a_thought_is_no_answer(tmp_path):
    path = write(
        tmp_path / "in.parquet",
        row("<think>\n#### 4\n</think>\nI do not know.", "<think>\n#### 5\n</think>\n#### 4"),
    )
    assert scores_of(path) == [[0.0, 1.0]]


def test_what_hangs_raises_or_dies_is_counted_with_its_reason_and_never_zero(tmp_path, function):
    path = write(tmp_path / "in.parquet", row("hang", "raise", "leave", "die", "text", "skip", "4", None))
    scored = score(path, tmp_path / "out.parquet", with_function(function, timeout_s=5.0), num_processes=2)
    assert [one.score for one in scored] == [None, None, None, None, None, None, 1.0, None]
    failures = [one.failure for one in scored]
    assert failures[:3] == ["timed out after 5 s", "ValueError", "PluginQuit"]
    assert str(failures[3]).startswith("the reward's process ")
    assert failures[4:] == [
        "the custom reward function returned no score",
        "does not apply",
        None,
        "no response",
    ]
    assert "cannot read 'raise' (my_reward.py:9)" in str(scored[1].message)
    assert pq.read_table(tmp_path / "out.parquet").column("scores").to_pylist() == [
        [None, None, None, None, None, None, 1.0, None]
    ]


def test_a_function_gets_what_verl_gives_it_and_its_own_arguments(tmp_path, function):
    path = write(tmp_path / "in.parquet", row("4", "22", index=7), row("4", truth="5", index=8))
    out = tmp_path / "out.parquet"
    scored = score(path, out, with_function(function, bonus=0.5), num_processes=1)
    assert [(one.score, one.accuracy) for one in scored] == [(1.5, 1.0), (2.5, 0.0), (1.5, 0.0)]
    assert scores_of(path, with_function(function, "as_verl_evaluates")) == [[1.0, 0.0], [0.0]]
    assert scores_of(path, with_function(function, "later")) == [[7.0, 7.0], [8.0]]


def test_columns_may_have_other_names_and_the_prompt_may_be_absent(tmp_path):
    renamed = {"source": "openai/gsm8k", "answers": ["#### 4", "#### 5"], "truth": {"ground_truth": "4"}}
    path = write(tmp_path / "in.parquet", renamed)
    config = Config.model_validate({"data": {"data_source_key": "source", "reward_model_key": "truth"}})
    assert scores_of(path, config, response_key="answers", scores_key="marks") == [[1.0, 0.0]]


@pytest.mark.parametrize(
    "kind",
    [pa.list_(pa.large_string()), pa.large_list(pa.string()), pa.list_(pa.string(), 2), pa.list_(pa.null())],
    ids=str,
)
def test_lists_of_texts_of_every_kind_are_read(kind, tmp_path):
    texts = [None, None] if kind == pa.list_(pa.null()) else ["#### 4", None]
    table = (
        pa.Table.from_pylist([row("x")])
        .drop_columns(["responses"])
        .append_column("responses", pa.array([texts], kind))
    )
    pq.write_table(table, tmp_path / "in.parquet")
    assert scores_of(tmp_path / "in.parquet") == [[None if text is None else 1.0 for text in texts]]
    assert pq.read_schema(tmp_path / "out.parquet").field("responses").type == kind


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"responses": "#### 4"}, "column 'responses' must contain lists of texts, is string"),
        ({"responses": [1, 2]}, "column 'responses' must contain lists of texts, is list<element: int64>"),
        ({"data_source": ""}, "row 0: field 'data_source': must name a data source, is empty"),
        ({"reward_model": "4"}, "row 0: field 'reward_model': must be an object, is '4'"),
        ({"prompt": [{"role": "robot", "content": "?"}]}, r"row 0: field 'prompt\[0\].role': must be one of"),
        ({"reward_model": {"style": "rule"}}, "ground_truth"),
        ({"scores": [1.0]}, "a column 'scores' already exists; choose another with --scores-key"),
    ],
)
def test_a_wrong_row_is_named_before_anything_is_scored(change, problem, tmp_path):
    path = write(tmp_path / "in.parquet", {**row("#### 4"), **change})
    with pytest.raises(DataError, match=problem):
        score(path, tmp_path / "out.parquet", Config(), num_processes=1)


def test_a_wrong_function_is_named(tmp_path, function):
    path = write(tmp_path / "in.parquet", row("4"))
    with pytest.raises(PluginError, match="has no 'compute'"):
        score(path, path, with_function(function, "compute"), num_processes=1)
    batch = Config.model_validate({"reward": {"custom_function": {"path": function, "scope": "batch"}}})
    with pytest.raises(ConfigError, match="scope=batch: stored responses are scored one by one"):
        score(path, path, batch, num_processes=1)


def test_the_command_shows_a_table_and_the_reasons(tmp_path, function):
    path = write(tmp_path / "in.parquet", row("4", "raise"), row("no", "4", source="mine"))
    out = tmp_path / "folder" / "out.parquet"
    options = [
        "--function",
        f"{function}:compute_score",
        "--kwargs",
        json.dumps({"bonus": 1.0}),
        "--processes",
        "1",
    ]
    shown = CliRunner().invoke(app, ["score", str(path), "--out", str(out), *options], catch_exceptions=False)
    assert (
        "openai/gsm8k: 1 not scored: ValueError (first: row in:0, response 1: reward 'custom': ValueError: "
        "cannot read" in shown.output
    )
    assert pq.read_table(out).column("scores").to_pylist() == [[2.0, None], [3.0, 2.0]]
    lines = [
        [cell.strip() for cell in line.split("│") if cell.strip()]
        for line in shown.output.splitlines()
        if "│" in line
    ]
    assert [line[:4] for line in lines] == [
        ["mine", "1", "2", "0"],
        ["openai/gsm8k", "1", "2", "1"],
        ["all", "2", "4", "1"],
    ]
    assert [float(line[4].split(" ")[0]) for line in lines] == [2.5, 2.0, 2.25]  # mean score
    assert [float(line[5].split(" ")[0]) for line in lines] == [0.5, 1.0, 0.75]  # mean@2
    assert [line[6].partition(" ")[0].rstrip("0") for line in lines] == [
        "1.",
        "-",
        "1.",
    ]  # pass@2, of problems with two scores


def test_ctrl_c_leaves_everything_as_it_was_and_no_process(tmp_path, function):
    begun, out = tmp_path / "begun", tmp_path / "out.parquet"
    path = write(tmp_path / "in.parquet", row("4", truth=str(begun)))
    out.write_text("earlier")
    command = [
        sys.executable,
        "-m",
        "agentrl.cli",
        "score",
        str(path),
        "--out",
        str(out),
        "--function",
        f"{function}:slow",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while not begun.exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, f"interrupted; {out} is unchanged\n")
    assert {file.name for file in tmp_path.iterdir()} - {"__pycache__"} == {
        "begun",
        "in.parquet",
        "my_reward.py",
        "out.parquet",
    }
    assert out.read_text() == "earlier"


@pytest.mark.parametrize(
    "options",
    [["--function", "my_reward.py"], ["--kwargs", "{}x"], ["--kwargs", '{"a": 1}'], ["--kwargs", "[1]"]],
)
def test_wrong_options_are_refused_in_one_line(options, tmp_path):
    path = write(tmp_path / "in.parquet", row("4"))
    assert "--" in str(CliRunner().invoke(app, ["score", str(path), "--out", str(path), *options]).exception)
