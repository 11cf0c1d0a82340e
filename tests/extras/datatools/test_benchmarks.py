"""Benchmarks by name: from a folder, from AGENTRL_DATA, else from the hub; all of the published problems,
each one scorable.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import orjson
import pyarrow.parquet as pq
import pytest

from agentrl.config.reward import REWARD_PRESETS
from agentrl.errors import DataError
from agentrl.extras.answers.aime import parse_integer
from agentrl.extras.answers.gsm8k import extract_answer, is_correct
from agentrl.extras.datatools.benchmarks import BENCHMARKS, FOLDER_VARIABLE, find, write_benchmark
from agentrl.extras.datatools.originals import OriginalSource
from agentrl.extras.datatools.task_rows import RowStyle
from agentrl.rewards.select import reward_of

PROBLEMS = {
    "gsm8k": {"question": "Q?", "answer": "#### 4"},
    "aime_2024": {"ID": "2024-I-1", "Problem": "Q?", "Solution": "S", "Answer": 4},
    "aime_2025": {"id": "I-1", "problem": "Q?", "answer": "004"},
    "math_500": {
        "problem": "Q?",
        "solution": "S",
        "answer": "4",
        "level": 2,
        "subject": "Algebra",
        "unique_id": "test/a/1.json",
    },
}


def folder_with(folder: Path, name: str, path: str) -> Path:
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_bytes(orjson.dumps(PROBLEMS[name]))
    return folder


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_from_each_of_its_places(tmp_path, monkeypatch, name):
    paths = [path for path in BENCHMARKS[name].paths if path.endswith(".jsonl")]
    for number, path in enumerate(paths):
        folder = folder_with(tmp_path / str(number), name, path)
        assert [(problem.question, problem.ground_truth.lstrip("0")) for problem in find(name, folder)] == [
            ("Q?", "4")
        ]
        monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
        row = pq.read_table(write_benchmark(name, tmp_path / "out")).to_pylist()[0]
        assert (row["data_source"], row["extra_info"]["split"], row["agent_name"]) == (
            name,
            "test",
            "single_turn_agent",
        )
        assert row["prompt"][0]["content"] == BENCHMARKS[name].system
    assert reward_of(name, REWARD_PRESETS) == {"math_500": "math", "gsm8k": "gsm8k"}.get(name, "aime")


def test_rows_in_a_style(tmp_path):
    style = RowStyle("tool_agent", ("python",), system="", template="{question} Think.")
    file = write_benchmark(
        "gsm8k", tmp_path / "out", folder=folder_with(tmp_path, "gsm8k", "gsm8k/test.jsonl"), style=style
    )
    row = pq.read_table(file).to_pylist()[0]
    assert (row["agent_name"], row["prompt"]) == ("tool_agent", [{"role": "user", "content": "Q? Think."}])
    assert row["extra_info"]["tools_kwargs"] == {"python": {"create_kwargs": {"ground_truth": "4"}}}


def test_where_a_benchmark_is_not(tmp_path, monkeypatch):
    with pytest.raises(
        DataError,
        match=r"^no benchmark 'gms8k'; known: gsm8k, aime_2024, aime_2025, math_500, or a Parquet file",
    ):
        find("gms8k")
    with pytest.raises(DataError, match=r"^benchmark math_500: '.*' has none of math_500/test\.jsonl, "):
        find("math_500", tmp_path)
    asked: list[OriginalSource] = []

    def no_network(source: OriginalSource):
        asked.append(source)
        raise DataError("no network")

    monkeypatch.setattr("agentrl.extras.datatools.benchmarks.open_originals", no_network)
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    where = (
        r"^benchmark gsm8k: put its file at gsm8k/test\.jsonl in the folder \$AGENTRL_DATA \(AGENTRL_DATA is "
        r"not set\); no network$"
    )
    with pytest.raises(DataError, match=where):
        find("gsm8k")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(DataError, match=re.escape(f"({str(tmp_path)!r} does not contain it)")):
        find("gsm8k")
    assert asked == [OriginalSource("openai/gsm8k", subset="main", split="test")] * 2


def test_the_page_names_all_benchmarks_and_their_files():
    page = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
    for name, benchmark in BENCHMARKS.items():
        assert re.search(
            rf"^\| `{name}` \|.*`{re.escape(benchmark.paths[0])}`.*`{re.escape(benchmark.hub_name)}`",
            page,
            re.MULTILINE,
        )


# ----------------------------------------------------------------------------------------- the original files


@pytest.fixture(scope="module")
def originals() -> Path:
    shared = Path(os.environ.get("AGENTRL_SHARED", Path(__file__).resolve().parents[4] / "shared"))
    if not (shared / "data").is_dir() and os.environ.get("CI") != "true":
        pytest.skip(
            f"{shared / 'data'} does not exist: set AGENTRL_SHARED to the folder that holds data/gsm8k and "
            "data/aime"
        )
    return shared / "data"


@pytest.mark.parametrize("name", ["gsm8k", "aime_2024", "aime_2025"])
def test_the_published_problems_are_all_there_once(originals, name):
    problems = find(name, originals)
    assert len(problems) == BENCHMARKS[name].num_problems
    assert len({problem.question for problem in problems}) == len(problems)
    assert [problem.index for problem in problems] == list(range(len(problems)))


def test_each_of_their_answers_is_one_that_its_reward_reads(originals):
    for problem in find("gsm8k", originals):
        assert is_correct(extract_answer(problem.solution, strict=True), problem.ground_truth)
    for name in ("aime_2024", "aime_2025"):
        assert all(parse_integer(problem.ground_truth) is not None for problem in find(name, originals))
