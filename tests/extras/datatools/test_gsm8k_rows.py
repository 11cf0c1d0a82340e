"""GSM8K's files become rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl.config.data import DataConfig
from agentrl.data.dataset import Dataset
from agentrl.data.rows import AgentChoice
from agentrl.errors import DataError
from parts.converted import write_gsm8k

AGENTS = AgentChoice(lambda name: name, "single_turn_agent")


def row(text: str, **changes) -> dict:
    return {"data_source": "s", "prompt": [{"role": "user", "content": text}], **changes}


def parquet(path: Path, texts: list[str], *, row_group_size: int = 3) -> str:
    pq.write_table(pa.Table.from_pylist([row(text) for text in texts]), path, row_group_size=row_group_size)
    return str(path)


def dataset(
    paths: list[str], config: DataConfig | None = None, *, shuffle: bool = False, seed: int = 0, **options
) -> Dataset:
    return Dataset(paths, config or DataConfig(), agents=AGENTS, seed=seed, shuffle=shuffle, **options)


def texts(data: Dataset, positions) -> list[str]:
    return [data.task(position).messages[0].content for position in positions]


# ------------------------------------------------------------------------------------------------------ gsm8k

PROBLEMS = [
    {"question": "How many?", "answer": "Two and two.\n#### 4"},
    {"question": "How much?", "answer": "A lot: <<1000*2=2000>>2000.\n#### 2,000"},
    {"question": "How far?", "answer": "#### -3"},
]


def gsm8k_source(folder: Path) -> Path:
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in PROBLEMS))
    return folder


def test_gsm8k_becomes_rows_of_all_three_agents(tmp_path: Path):
    assert write_gsm8k(tmp_path / "out", gsm8k_source(tmp_path), agent="mixed") == {"train": 3, "test": 3}
    data = dataset([str(tmp_path / "out" / "train.parquet")])
    plain, tool, partner = (data.task(position) for position in range(3))
    assert [task.ground_truth for task in (plain, tool, partner)] == ["4", "2000", "-3"]
    assert [task.agent_name for task in (plain, tool, partner)] == [
        "single_turn_agent",
        "tool_agent",
        "interaction_agent",
    ]
    assert tool.tools_kwargs == {"calculator": {"create_kwargs": {"ground_truth": "2000"}}}
    assert partner.interaction_kwargs == {"name": "gsm8k", "query": "How far?", "ground_truth": "-3"}
    assert (plain.tools_kwargs, plain.interaction_kwargs) == ({}, None)
    assert plain.data_source == "openai/gsm8k"
    assert plain.messages[-1].content == "How many?"
    assert "#### answer" in plain.messages[0].content


def test_gsm8k_without_its_source_or_with_a_broken_line(tmp_path: Path):
    with pytest.raises(DataError, match=r"has no data"):
        write_gsm8k(tmp_path / "out", tmp_path)
    (tmp_path / "train_socratic.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=r"has neither train\.jsonl nor test\.jsonl"):
        write_gsm8k(tmp_path / "out", tmp_path)
    source = gsm8k_source(tmp_path)
    (source / "test.jsonl").write_text('{"question": "How many?", "answer": "4"}\n')
    with pytest.raises(DataError, match=r"test\.jsonl: row 0 \(line 1\): needs `question` and an `answer`"):
        write_gsm8k(tmp_path / "out", source)


def test_gsm8k_of_the_shared_folder(tmp_path: Path):
    shared = Path(os.environ.get("AGENTRL_SHARED", Path(__file__).resolve().parents[4] / "shared"))
    source = shared / "data" / "gsm8k"
    if not source.is_dir() and os.environ.get("CI") != "true":
        pytest.skip(f"{source} does not exist: set AGENTRL_SHARED to the folder that holds data/gsm8k")
    assert write_gsm8k(tmp_path, source, agent="tool_agent") == {"train": 7473, "test": 1319}
    data = dataset([str(tmp_path / "train.parquet"), str(tmp_path / "test.parquet")], shuffle=True)
    assert len(data) == 7473 + 1319
    assert {data.task(position).data_source for position in range(0, len(data), 500)} == {"openai/gsm8k"}


def test_building_data_needs_no_torch_no_ray_no_transformers():
    rooms = ", ".join(f"agentrl.extras.datatools.{name}" for name in ("command", "convert", "pairs", "show"))
    code = f"import sys, {rooms}; print({{'torch', 'ray', 'transformers'}} & set(sys.modules))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "set()"
