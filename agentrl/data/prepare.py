"""Public data sets -> Parquet files in the row schema of `agentrl.data.rows`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from agentrl.data.files import JsonRows, open_rows, write_rows
from agentrl.errors import DataError

Gsm8kAgent = Literal["single_turn_agent", "tool_agent", "interaction_agent", "mixed"]
KINDS = ("single_turn_agent", "tool_agent", "interaction_agent")

GSM8K_INSTRUCTION = "Solve the problem step by step. End with a last line of the form `#### answer`, where answer is one number."
GSM8K_TOOL_INSTRUCTION = GSM8K_INSTRUCTION + " Use the calculator for every computation."

AIME_ANSWER = re.compile(r"0*[0-9]{1,3}")
AIME_INSTRUCTION = "Solve the problem step by step. The answer is a whole number from 0 to 999; put it into \\boxed{}."

_TEXT = pa.string()
_CREATE_KWARGS = pa.struct([("create_kwargs", pa.struct([("ground_truth", _TEXT)]))])
GSM8K_SCHEMA = pa.schema(
    [
        ("data_source", _TEXT),
        ("prompt", pa.list_(pa.struct([("role", _TEXT), ("content", _TEXT)]))),
        ("ability", _TEXT),
        ("reward_model", pa.struct([("style", _TEXT), ("ground_truth", _TEXT)])),
        (
            "extra_info",
            pa.struct(
                [
                    ("split", _TEXT),
                    ("index", pa.int64()),
                    ("question", _TEXT),
                    ("answer", _TEXT),
                    ("need_tools_kwargs", pa.bool_()),
                    ("tools_kwargs", pa.struct([("calculator", _CREATE_KWARGS)])),
                    ("interaction_kwargs", pa.struct([("name", _TEXT), ("query", _TEXT), ("ground_truth", _TEXT)])),
                ]
            ),
        ),
        ("agent_name", _TEXT),
    ]
)
AIME_SCHEMA = pa.schema(
    [
        ("data_source", _TEXT),
        ("prompt", pa.list_(pa.struct([("role", _TEXT), ("content", _TEXT)]))),
        ("ability", _TEXT),
        ("reward_model", pa.struct([("style", _TEXT), ("ground_truth", _TEXT)])),
        ("extra_info", pa.struct([("split", _TEXT), ("index", pa.int64()), ("id", _TEXT)])),
        ("agent_name", _TEXT),
    ]
)


def write_gsm8k(out_dir: str | Path, source_dir: str | Path, *, agent: Gsm8kAgent = "single_turn_agent") -> dict[str, int]:
    """Write `train.parquet` and `test.parquet` from GSM8K's `train.jsonl` and `test.jsonl`; return rows per split.

    `agent` plays every row; with `mixed` the three built-in agents take turns.

    Raises:
        DataError: a source file is missing, or a line is not `{question, answer}` with an answer after `####`.
    """
    written = {}
    for split in ("train", "test"):
        source = open_rows(str(Path(source_dir) / f"{split}.jsonl"))
        assert isinstance(source, JsonRows)
        written[split] = write_rows(Path(out_dir) / f"{split}.parquet", _gsm8k_rows(source, split, agent), GSM8K_SCHEMA)
    return written


def _gsm8k_rows(source: JsonRows, split: str, agent: Gsm8kAgent) -> Iterator[dict[str, Any]]:
    for index, raw in enumerate(source.rows(len(source))):
        question, answer = raw.get("question"), raw.get("answer")
        final = answer.rpartition("####")[2].strip() if isinstance(answer, str) and "####" in answer else ""
        if not isinstance(question, str) or not isinstance(answer, str) or not final:
            raise DataError(f"{source.path}: line {source.line(index)}: needs `question` and an `answer` that ends with `#### number`")
        name = KINDS[index % len(KINDS)] if agent == "mixed" else agent
        yield _gsm8k_row(name, split, index, question=question, answer=answer, truth=final.replace(",", ""))


def _gsm8k_row(agent: str, split: str, index: int, *, question: str, answer: str, truth: str) -> dict[str, Any]:
    uses_tools, interacts = agent == "tool_agent", agent == "interaction_agent"
    instruction = GSM8K_TOOL_INSTRUCTION if uses_tools else GSM8K_INSTRUCTION
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "system", "content": instruction}, {"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {
            "split": split,
            "index": index,
            "question": question,
            "answer": answer,
            "need_tools_kwargs": uses_tools,
            "tools_kwargs": {"calculator": {"create_kwargs": {"ground_truth": truth}}} if uses_tools else None,
            "interaction_kwargs": {"name": "gsm8k", "query": question, "ground_truth": truth} if interacts else None,
        },
        "agent_name": agent,
    }


def write_aime(out_dir: str | Path, source_dir: str | Path) -> dict[str, int]:
    """Write a Parquet file for each JSON-lines file of `source_dir`, of the same name; return rows per file.

    Raises:
        DataError: the folder has no such file, or a line is not `{problem, answer}` with a whole number from 0 to 999 as the answer.
    """
    files = sorted(Path(source_dir).glob("*.jsonl"))
    if not files:
        raise DataError(f"{str(source_dir)!r} has no JSON-lines file; it must hold files such as aime_2024.jsonl")
    written = {}
    for file in files:
        source = open_rows(str(file))
        assert isinstance(source, JsonRows)
        written[file.stem] = write_rows(Path(out_dir) / f"{file.stem}.parquet", _aime_rows(source, file.stem), AIME_SCHEMA)
    return written


def _aime_rows(source: JsonRows, split: str) -> Iterator[dict[str, Any]]:
    for index, raw in enumerate(source.rows(len(source))):
        problem, answer = raw.get("problem"), str(raw.get("answer"))
        if not isinstance(problem, str) or not AIME_ANSWER.fullmatch(answer):
            raise DataError(
                f"{source.path}: line {source.line(index)}: needs a `problem` and an `answer` from 0 to 999 (got {answer[:80]!r})"
            )
        yield {
            "data_source": "aime",
            "prompt": [{"role": "system", "content": AIME_INSTRUCTION}, {"role": "user", "content": problem}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"split": split, "index": index, "id": str(raw.get("id", index))},
            "agent_name": "single_turn_agent",
        }
