"""benchmarks/beside_lm_eval.py without lm_eval: both sides get the same tasks, no disagreement is missed."""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import jinja2
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from agentrl.evaluation.templates import TEMPLATES
from agentrl.extras.answers.gsm8k import parse_number
from agentrl.extras.datatools.arithmetic import evaluate, write_arithmetic

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
NUM_ROWS = 4


def module(name, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(name)


@pytest.fixture
def tasks(monkeypatch):
    return module("lm_eval_tasks", monkeypatch)


@pytest.fixture
def sides(monkeypatch):
    return module("beside_lm_eval", monkeypatch)


@pytest.fixture
def write(tasks, tmp_path):
    """Write a task of made-up problems and arithmetic rows; return its files and its folder."""
    (tmp_path / "data" / "gsm8k").mkdir(parents=True)
    for split in ("train", "test"):
        lines = [
            {"question": f"{split} {{{{x}}}} {number} \u2019s?", "answer": f"So {number}.\n#### {number},000"}
            for number in range(1, 8)
        ]
        tasks.write_lines(tmp_path / "data" / "gsm8k" / f"{split}.jsonl", lines)
    write_arithmetic(tmp_path / "sums", seed=0, num_train=1, num_val=6, num_sft=1)

    def written(name, num_rows=NUM_ROWS):
        return tasks.write_task(
            name,
            tmp_path / name,
            data=tmp_path / "data",
            arithmetic=tmp_path / "sums" / "val.parquet",
            base=Path("/lm_eval/gsm8k.yaml"),
            num_rows=num_rows,
            max_tokens=9,
        ), tmp_path / name

    return written


def lines_of(file):
    return [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]


def test_a_few_shot_row_is_what_lm_eval_asks(write):
    """Its YAML adds nothing to lm_eval's gsm8k but the files: the first five examples, then the question."""
    task, folder = write("gsm8k")
    config, rows = yaml.safe_load(task.yaml.read_text()), lines_of(task.on)
    assert config["include"] == "/lm_eval/gsm8k.yaml"
    assert "doc_to_text" not in config
    assert (config["num_fewshot"], config["fewshot_config"]) == (5, {"sampler": "first_n"})
    documents = lines_of(config["dataset_kwargs"]["data_files"]["test"])
    examples = lines_of(config["dataset_kwargs"]["data_files"]["train"])
    assert len(documents) == len(rows) == NUM_ROWS
    assert [each["question"][:8] for each in examples] == ["train {{"] * 5
    for document, row in zip(documents, rows, strict=True):
        asked = [f"Question: {each['question']}\nAnswer:" for each in [*examples, document]]
        said = [message["content"] for message in row["prompt"]]
        assert said[::2] == asked
        assert said[1::2] == [each["answer"] for each in examples]
        assert [message["role"] for message in row["prompt"]] == ["user", "assistant"] * 5 + ["user"]
        truth = document["answer"].split("#### ")[1].replace(",", "")
        assert parse_number(row["reward_model"]["ground_truth"]) == int(truth)
    assert folder in task.yaml.parents


def test_both_sides_of_the_zero_shot_task_ask_the_same(write):
    """lm_eval renders its wording with Jinja, `agentrl eval` fills in its template. Braces stay."""
    task, _ = write("gsm8k_zero_shot")
    config = yaml.safe_load(task.yaml.read_text())
    assert config["num_fewshot"] == 0
    assert config["training_split"] is None
    name = task.options[task.options.index("--template") + 1]
    for document in lines_of(config["dataset_kwargs"]["data_files"]["test"]):
        [ours] = TEMPLATES[name].messages(document["question"])
        assert jinja2.Template(config["doc_to_text"]).render(document) == ours.content


def test_arithmetic_documents_are_the_rows(write):
    task, _ = write("arithmetic")
    config = yaml.safe_load(task.yaml.read_text())
    documents = lines_of(config["dataset_kwargs"]["data_files"]["test"])
    rows = pq.read_table(task.on).to_pylist()[:NUM_ROWS]
    assert [each["question"] for each in documents] == [row["prompt"][0]["content"] for row in rows]
    values = [evaluate(row["extra_info"]["expression"]) for row in rows]
    assert [each["answer"] for each in documents] == [f"#### {value}" for value in values]
    assert config["doc_to_text"] == "{{question}}"


@pytest.mark.parametrize("name", ["gsm8k", "gsm8k_zero_shot", "arithmetic"])
def test_every_task_is_greedy_with_one_length_and_number_of_rows(name, write, tasks):
    task, _ = write(name)
    assert yaml.safe_load(task.yaml.read_text())["generation_kwargs"] == {
        "until": list(tasks.STOP), "do_sample": False, "temperature": 0.0, "max_gen_toks": 9,
    }  # fmt: skip
    assert task.options[-2:] == ("--rows", str(NUM_ROWS))


def test_a_task_that_cannot_be_written_is_refused(write):
    with pytest.raises(ValueError, match="task gsm8k: 9 rows are wanted, but the data has 7"):
        write("gsm8k", num_rows=9)
    with pytest.raises(ValueError, match="task 'mmlu' does not exist; available: gsm8k, gsm8k_zero_shot"):
        write("mmlu")


# ------------------------------------------------------------------------------------------------- comparison


def row_of(sides, ids, *, is_right=True, answer="18", text="#### 18", prompt=(1, 2)):
    reading = sides.Reading(answer, is_right)
    return sides.Row(prompt, ids, [-0.25] * len(ids), text, {"strict": reading, "flexible": reading})


def test_an_attempt_is_read_with_its_verdicts(sides):
    """Verdicts are those that the evaluation stored; answers are read from the text, strictly and not."""
    attempt = {
        "task_id": "rows:0", "token_ids": [1, 2, 3, 4], "action_mask": [False, False, True, True],
        "behavior_logprobs": [0.0, 0.0, -0.5, -0.25],
        "messages": [{"content": "6*7?"}, {"content": "It is 42."}],
        "metrics": [("reward/gsm8k/accuracy_strict", 0.0), ("reward/gsm8k/accuracy_flexible", 1.0)],
        "extra_info": json.dumps({"reward_details": {"gsm8k": {"answer": None}}}),
    }  # fmt: skip
    read = {"strict": sides.Reading(None, False), "flexible": sides.Reading("42", True)}
    assert sides.our_row(attempt) == sides.Row([1, 2], [3, 4], [-0.5, -0.25], "It is 42.", read)


def test_a_row_of_lm_eval_is_read_by_its_filters(sides):
    row = {
        "prompt_ids": [1], "ids": [3], "logprobs": [-0.5], "text": "42",
        "read": {
            "strict-match": {"answer": "[invalid]", "is_right": False},
            "flexible-extract": {"answer": "42", "is_right": True},
        },
    }  # fmt: skip
    read = {"strict": sides.Reading(None, False), "flexible": sides.Reading("42", True)}
    assert sides.their_row(row) == sides.Row([1], [3], [-0.5], "42", read)


def test_equal_sides_have_no_differences(sides):
    rows = [row_of(sides, [5, 6], is_right=right) for right in (True, False)]
    found = sides.compare(rows, rows)
    assert found["is_same"]
    assert found["differing"] == []
    assert (found["same_prompts"], found["same_tokens"]) == (2, 2)
    assert found["same_verdicts"] == found["same_answers"] == {"strict": 2, "flexible": 2}
    assert found["other_answers"] == []


@given(
    ours=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    theirs=st.lists(st.integers(0, 3), min_size=1, max_size=6),
)
def test_the_first_token_that_differs_is_found(ours, theirs):
    with pytest.MonkeyPatch.context() as patch:
        sides = module("beside_lm_eval", patch)
        found = sides.first_difference(row_of(sides, ours), row_of(sides, theirs))
    assert (found is None) == (ours == theirs)
    if found is not None:
        assert ours[:found] == theirs[:found]
        assert ours[found : found + 1] != theirs[found : found + 1]


def test_what_the_server_sampled_after_a_stop_text_is_no_difference(sides):
    ours, theirs = row_of(sides, [5, 6], text="18\nQuestion:"), row_of(sides, [5, 6, 7], text="18\n")
    assert sides.first_difference(ours, theirs) is None
    assert sides.first_difference(replace(ours, text="18"), theirs) == 2


def test_each_disagreement_is_listed_with_its_cause(sides):
    right = row_of(sides, [5, 6])
    wrong = row_of(sides, [5, 7], is_right=False, answer="17")
    same_tokens = row_of(sides, [5, 6], is_right=False, answer=None)
    other_prompt = row_of(sides, [5, 6], prompt=(1, 2, 3))
    found = sides.compare([right] * 4, [right, wrong, same_tokens, other_prompt])
    assert [each["row"] for each in found["differing"]] == [1, 2, 3]
    assert [each["cause"] for each in found["differing"]] == [
        "generation: token 1 is 6 (-0.250000) and 7 (-0.250000), with its log-probability",
        "reading",
        "prompt: 2 and 3 tokens",
    ]
    verdicts = {"agentrl": True, "lm_eval": False}
    assert [each["verdicts"] for each in found["differing"]] == [
        {"strict": verdicts, "flexible": verdicts},
        {"strict": verdicts, "flexible": verdicts},
        {},
    ]
    assert found["differing"][1]["answers"]["strict"] == {"agentrl": "18", "lm_eval": None}
    assert not found["is_same"]
    assert (found["same_prompts"], found["same_tokens"]) == (3, 3)


@pytest.mark.parametrize(
    ("ours", "theirs", "is_same"),
    [
        ("18", "18", True), ("18", "$18.", True), ("1234", "1,234.00", True), ("7/2", "3.5", True),
        (None, None, True), (None, "...", True), (None, "18", False), ("18", None, False), ("-3", "3", False),
    ],
)  # fmt: skip
def test_answers_are_compared_as_numbers(ours, theirs, is_same, sides):
    """Beside the verdicts, which are the same for two different wrong answers."""
    rows = [row_of(sides, [5], answer=answer, is_right=False) for answer in (ours, theirs)]
    found = sides.compare(rows[:1], rows[1:])
    assert found["same_answers"] == {"strict": is_same, "flexible": is_same}
    listed = {"row": 0, "text": "#### 18", "agentrl": ours, "lm_eval": theirs}
    assert found["other_answers"] == (
        [] if is_same else [listed | {"reading": name} for name in ("strict", "flexible")]
    )
    assert found["differing"] == []


def test_counts_can_agree_while_rows_do_not(sides):
    """The same number of right answers is not the same answers: the rows are compared, too."""
    right, wrong = row_of(sides, [5]), row_of(sides, [5], is_right=False)
    found = sides.compare([right, wrong], [wrong, right])
    assert found["is_same"]
    assert [each["cause"] for each in found["differing"]] == ["reading", "reading"]


def test_sides_of_different_length_are_refused(sides):
    row = row_of(sides, [5])
    with pytest.raises(ValueError, match="agentrl has 1 rows, lm_eval 2"):
        sides.compare([row], [row, row])


def test_a_task_replaces_its_earlier_figures_and_keeps_the_others(sides, tmp_path):
    out = tmp_path / "figures.json"
    sides.store(out, [{"task": "gsm8k", "rows": 1}])
    sides.store(out, [{"task": "arithmetic", "rows": 2}])
    sides.store(out, [{"task": "gsm8k", "rows": 3}])
    assert {run["task"]: run["rows"] for run in json.loads(out.read_text())["runs"]} == {
        "arithmetic": 2,
        "gsm8k": 3,
    }


def test_an_environment_without_lm_eval_is_missing(sides, tmp_path):
    assert sides.find_peer(tmp_path / "python") is None
    assert sides.find_peer(Path(sys.executable)) is None
