"""The tasks of beside_lm_eval.py as files: documents and YAML for lm_eval, rows for `agentrl eval`.

Filters, metrics and stop texts are those of lm_eval's own gsm8k, which each YAML includes. Nothing is
downloaded: the documents are lines of GSM8K's files, or the rows of `agentrl data arithmetic`.

    gsm8k             lm_eval's prompt: five solved examples (the first ones), `Question: ... Answer:`
    gsm8k_zero_shot   verl's prompt: the question and an instruction (`--template gsm8k@1` of `agentrl eval`)
    arithmetic        the row's question alone, whatever agent the row names
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

TASKS = ("gsm8k", "gsm8k_zero_shot", "arithmetic")
NUM_SHOTS = 5
"""lm_eval's number of examples for GSM8K."""
STOP = ("Question:", "</s>", "<|im_end|>")
"""Stop texts of lm_eval's GSM8K."""
VERL_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
"""Written here once more, so that the two sides build the prompt independently."""


@dataclass(frozen=True, slots=True)
class TaskFiles:
    """One task: `yaml` for lm_eval; for `agentrl eval` the value of --on, and further options."""

    name: str
    yaml: Path
    on: str
    options: tuple[str, ...]


def write_task(
    name: str, folder: Path, *, data: Path, arithmetic: Path, base: Path, num_rows: int, max_tokens: int
) -> TaskFiles:
    """Write the files of a task into `folder`.

    Args:
        data: folder with gsm8k/train.jsonl and gsm8k/test.jsonl.
        arithmetic: rows of `agentrl data arithmetic`, a Parquet file.
        base: lm_eval's own gsm8k.yaml.

    Raises:
        ValueError: the task is unknown, or the data has fewer rows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    docs, shots = folder / "docs.jsonl", folder / "shots.jsonl"
    if name == "arithmetic":
        rows = pq.read_table(arithmetic).to_pylist()[:num_rows]
        written = write_lines(docs, map(arithmetic_doc, rows))
        yaml, on = {"doc_to_text": "{{question}}"}, str(arithmetic)
        options: tuple[str, ...] = ("--agent", "single_turn_agent")
    elif name in TASKS:
        problems = read_lines(data / "gsm8k" / "test.jsonl", num_rows)
        written = write_lines(docs, problems)
        if name == "gsm8k":
            examples = read_lines(data / "gsm8k" / "train.jsonl", NUM_SHOTS)
            write_lines(shots, examples)
            write_lines(folder / "rows.jsonl", few_shot_rows(problems, examples))
            yaml, on, options = {}, str(folder / "rows.jsonl"), ()
        else:
            yaml = {"doc_to_text": f"{{{{question}}}} {VERL_INSTRUCTION}"}
            on, options = "gsm8k", ("--data-dir", str(data), "--template", "gsm8k@1")
    else:
        raise ValueError(f"task {name!r} does not exist; available: {', '.join(TASKS)}")
    if written < num_rows:
        raise ValueError(f"task {name}: {num_rows} rows are wanted, but the data has {written}")
    config = task_config(name, base, docs, shots if name == "gsm8k" else None, max_tokens) | yaml
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(config, indent=1) + "\n")  # JSON is YAML
    return TaskFiles(name, file, on, (*options, "--rows", str(num_rows)))


def task_config(name: str, base: Path, docs: Path, shots: Path | None, max_tokens: int) -> dict[str, object]:
    """Return what a task's YAML changes of lm_eval's gsm8k. Without `shots` there are no examples."""
    files = {"test": str(docs)} | ({} if shots is None else {"train": str(shots)})
    split = None if shots is None else "train"
    return {
        "include": str(base),
        "task": f"agentrl_{name}",
        "tag": None,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": files},
        "training_split": split,
        "fewshot_split": split,
        "fewshot_config": None if shots is None else {"sampler": "first_n"},
        "num_fewshot": 0 if shots is None else NUM_SHOTS,
        "generation_kwargs": {
            "until": list(STOP),
            "do_sample": False,
            "temperature": 0.0,
            "max_gen_toks": max_tokens,
        },
    }


def arithmetic_doc(row: Mapping[str, Any]) -> dict[str, str]:
    """Return an arithmetic row as a document with the fields of GSM8K."""
    [message] = row["prompt"]
    return {"question": message["content"], "answer": f"#### {row['reward_model']['ground_truth']}"}


def few_shot_rows(
    problems: Iterable[Mapping[str, str]], examples: Sequence[Mapping[str, str]]
) -> Iterable[dict[str, Any]]:
    """Yield rows of `agentrl eval` with lm_eval's prompt: examples as turns, then the question."""
    solved = [message for example in examples for message in (_asked(example), _answered(example))]
    for index, problem in enumerate(problems):
        yield {
            "data_source": "openai/gsm8k",
            "prompt": [*solved, _asked(problem)],
            "reward_model": {"style": "rule", "ground_truth": problem["answer"].rpartition("#### ")[2]},
            "extra_info": {"index": index},
        }


def _asked(problem: Mapping[str, str]) -> dict[str, str]:
    return {"role": "user", "content": f"Question: {problem['question']}\nAnswer:"}


def _answered(problem: Mapping[str, str]) -> dict[str, str]:
    return {"role": "assistant", "content": problem["answer"]}


def read_lines(file: Path, count: int) -> list[dict[str, str]]:
    """Return the first `count` objects of a file of JSON lines."""
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in islice(lines, count)]


def write_lines(file: Path, objects: Iterable[Mapping[str, Any]]) -> int:
    """Write objects as JSON lines; return their number."""
    lines = [json.dumps(each) + "\n" for each in objects]
    file.write_text("".join(lines), encoding="utf-8")
    return len(lines)
