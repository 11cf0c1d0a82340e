"""`agentrl data`: from original files to rows that a run reads, what is said meanwhile, and that nothing is
lost by bad input.
"""

from __future__ import annotations

from pathlib import Path

import orjson
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from agentrl.chat.chat import Chat
from agentrl.chat.tiny import write_tiny_tokenizer
from agentrl.cli.app import app
from agentrl.config.data import DataConfig
from agentrl.config.reward import REWARD_PRESETS
from agentrl.data.dataset import Dataset
from agentrl.data.rows import AgentChoice
from agentrl.data.trajectories import encode, write_parquet
from agentrl.errors import DataError, PluginError, UserError
from agentrl.extras.sandbox.code_cases import read_cases
from agentrl.extras.storage.fetched import fetched_file, fetched_folder
from agentrl.extras.storage.sent import send_folder
from agentrl.extras.storage.storage import StoragePath
from agentrl.extras.supervised.config import RMDataConfig
from agentrl.extras.supervised.data import read_pairs
from agentrl.plugins import load_plugins
from agentrl.rewards.select import reward_of
from agentrl.types import Task
from parts.attempts import attempt

AGENTS = AgentChoice(lambda name: name, "single_turn_agent")


def data(*arguments: str | Path) -> str:
    """Run a command; its errors come through."""
    result = CliRunner().invoke(app, ["data", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def lines(path: Path, *rows: dict) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\n".join(map(orjson.dumps, rows)))
    return path


def tasks(path: Path) -> list[Task]:
    dataset = Dataset([str(path)], DataConfig(max_prompt_tokens=10_000), agents=AGENTS, seed=0, shuffle=False)
    return [dataset.task(position) for position in range(len(dataset))]


def gsm8k(folder: Path, num: int = 6) -> Path:
    for split in ("train", "test"):
        rows = [{"question": f"{split} {n}?", "answer": f"So <<{n}>>.\n#### 1,00{n}"} for n in range(num)]
        lines(folder / f"{split}.jsonl", *rows)
    lines(folder / "train_socratic.jsonl", {"question": "Other", "answer": "#### 1"})
    return folder


# ----------------------------------------------------------------------------------------- kinds of data sets


def test_gsm8k_without_an_agent_is_of_three_in_turn(tmp_path):
    said = data("gsm8k", tmp_path / "out", "--in", gsm8k(tmp_path / "in"))
    assert f"wrote {tmp_path}/out/train.parquet: 6 rows" in said
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["test.parquet", "train.parquet"]
    plain, tool, partner = tasks(tmp_path / "out/train.parquet")[:3]
    assert [task.agent_name for task in (plain, tool, partner)] == [
        "single_turn_agent",
        "tool_agent",
        "interaction_agent",
    ]
    assert (plain.data_source, plain.ground_truth, plain.messages[-1].content) == (
        "openai/gsm8k",
        "1000",
        "train 0?",
    )
    assert tool.tools_kwargs == {"calculator": {"create_kwargs": {"ground_truth": "1001"}}}
    assert "calculator" in tool.messages[0].content
    assert partner.interaction_kwargs == {"name": "gsm8k", "query": "train 2?", "ground_truth": "1002"}
    assert (plain.tools_kwargs, plain.interaction_kwargs) == ({}, None)
    assert tool.extra_info["need_tools_kwargs"] is True


def test_agent_tools_interaction_and_text_are_as_named(tmp_path):
    (tmp_path / "system.txt").write_text("Answer {briefly}.\n")
    text = ["--system", f"@{tmp_path / 'system.txt'}", "--template", "Q: {question}\nA {x}:"]
    style = ["--agent", "interaction_agent", "--tools", "python, calculator", "--interaction", "gsm8k", *text]
    data(
        "gsm8k",
        tmp_path / "out",
        "--in",
        gsm8k(tmp_path / "in"),
        "--split",
        "test",
        "--data-source",
        "mine",
        *style,
    )
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["test.parquet"]
    task = tasks(tmp_path / "out/test.parquet")[0]
    assert (task.agent_name, task.data_source, [*task.tools_kwargs]) == (
        "interaction_agent",
        "mine",
        ["python", "calculator"],
    )
    assert task.interaction_kwargs == {"name": "gsm8k", "query": "test 0?", "ground_truth": "1000"}
    assert [(message.role, message.content) for message in task.messages] == [
        ("system", "Answer {briefly}."),
        ("user", "Q: test 0?\nA {x}:"),
    ]


@pytest.mark.parametrize(
    ("options", "agent"),
    [
        (["--tools", "python"], "tool_agent"),
        (["--interaction", "gsm8k", "--tools", "python"], "interaction_agent"),
        ([], "single_turn_agent"),
    ],
)
def test_the_agent_is_what_the_rows_need(tmp_path, options, agent):
    source = lines(tmp_path / "aime_2024.jsonl", {"problem": "P?", "answer": "7"})
    data("aime", tmp_path / "out", "--in", source, *options)
    assert tasks(tmp_path / "out/aime_2024.parquet")[0].agent_name == agent


def test_an_agent_of_ones_own(tmp_path):
    plugin = tmp_path / "own.py"
    plugin.write_text(
        "from agentrl.plugins import AgentLoop\nclass Own(AgentLoop):\n    name = 'own'\n    async def "
        "run(self, task, session): ...\n"
    )
    source = lines(tmp_path / "aime_2024.jsonl", {"problem": "P?", "answer": "7"})
    data("aime", tmp_path / "out", "--in", source, "--agent", "own", "--plugin", plugin)
    assert tasks(tmp_path / "out/aime_2024.parquet")[0].agent_name == "own"


def test_aime_is_named_by_its_file(tmp_path):
    lines(tmp_path / "in/aime_2024.jsonl", {"ID": "2024-I-1", "Problem": "P?", "Solution": "S", "Answer": 7})
    lines(tmp_path / "in/other.jsonl", {"problem": "P?", "answer": "007"})
    data("aime", tmp_path / "out", "--in", tmp_path / "in")
    first, second = (tasks(tmp_path / f"out/{name}.parquet")[0] for name in ("aime_2024", "other"))
    assert (first.data_source, first.extra_info["id"], second.data_source) == (
        "aime_2024",
        "2024-I-1",
        "aime",
    )
    assert {reward_of(task.data_source, REWARD_PRESETS) for task in (first, second)} == {"aime"}


def test_math_and_code(tmp_path):
    lines(
        tmp_path / "math.jsonl",
        {"problem": "P?", "solution": r"\boxed{2}", "level": "Level 3", "type": "Algebra"},
    )
    lines(
        tmp_path / "code.jsonl",
        {"prompt": "Double it.", "tests": {"inputs": ["1"], "outputs": ["2"]}, "difficulty": "easy"},
    )
    data("math", tmp_path / "out", "--in", tmp_path / "math.jsonl")
    data("code", tmp_path / "out", "--in", tmp_path / "code.jsonl")
    math, code = (tasks(tmp_path / f"out/{name}.parquet")[0] for name in ("math", "code"))
    assert (math.ground_truth, math.extra_info["difficulty"], math.extra_info["subject"]) == (
        "2",
        "Level 3",
        "Algebra",
    )
    assert "boxed" in math.messages[0].content
    assert (read_cases(code.ground_truth).inputs, code.ability, code.extra_info["difficulty"]) == (
        ("1",),
        "code",
        "easy",
    )
    assert [reward_of(task.data_source, REWARD_PRESETS) for task in (math, code)] == ["math", "code"]


def test_any_data_set_by_its_columns(tmp_path):
    source = lines(tmp_path / "data.jsonl", *({"q": f"Q{n}?", "a": n, "hard": "yes"} for n in range(10)))
    columns = [
        "--prompt-column",
        "q",
        "--answer-column",
        "a",
        "--difficulty-column",
        "hard",
        "--data-source",
        "own",
    ]
    data("hf", source, tmp_path / "out", *columns, "--test-share", "0.3", "--seed", "4", "--ability", "quiz")
    train, test = (tasks(tmp_path / f"out/{split}.parquet") for split in ("train", "test"))
    assert (len(train), len(test)) == (7, 3)
    assert sorted(task.messages[0].content for task in train + test) == [f"Q{n}?" for n in range(10)]
    assert {(task.data_source, task.ability, task.extra_info["split"]) for task in test} == {
        ("own", "quiz", "test")
    }
    assert all(
        task.messages[0].content == f"Q{task.ground_truth}?" and len(task.messages) == 1 for task in train
    )


# ------------------------------------------------------------------------------------------------- preference


def test_pairs_in_all_their_forms_are_the_same_rows(tmp_path):
    turns = [{"role": "user", "content": "Hi"}]
    good, bad = {"role": "assistant", "content": "Hello!"}, {"role": "assistant", "content": "Go."}
    forms = [
        {"prompt": "Hi", "chosen": "Hello!", "rejected": "Go."},
        {"prompt": turns, "chosen": [good], "rejected": [bad]},
        {"prompt": "Hi", "chosen": [*turns, good], "rejected": [*turns, bad]},
        {"chosen": [*turns, good], "rejected": [*turns, bad]},
        {"prompt": "Hi", "chosen": "Go.", "rejected": "Go."},
    ]
    said = data("preference", tmp_path / "out", "--in", lines(tmp_path / "train.jsonl", *forms))
    assert (
        "1 pair with equal answers left out\n3 rows repeat another one: kept; --deduplicate leaves them out"
        in said
    )
    rows = pq.read_table(tmp_path / "out/train.parquet").to_pylist()
    assert [(row["prompt"], row["chosen"], row["rejected"]) for row in rows] == [(turns, [good], [bad])] * 4
    write_tiny_tokenizer(tmp_path)
    chat = Chat.load(str(tmp_path))
    read = read_pairs([str(tmp_path / "out/train.parquet")], RMDataConfig(), chat, load_plugins())
    texts = [chat.decode(sample.token_ids) for sample in read.samples]
    assert len(texts) == 4
    assert len(set(texts)) == 1
    assert all(text.index("Hello!") < text.index("Go.") for text in texts)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "Hi", "chosen": "Yes"},
            "field 'rejected': must be a list of {role, content}, is missing",
        ),
        ({"chosen": "Yes", "rejected": "No"}, "field 'chosen': has no prompt"),
        (
            {"prompt": "Hi", "chosen": "Yes", "rejected": [{"role": "user", "content": "x"}]},
            "field 'rejected': must end with a message of the",
        ),
    ],
)
def test_a_pair_that_is_none(tmp_path, row, message):
    with pytest.raises(DataError) as error:
        data("preference", tmp_path / "out", "--in", lines(tmp_path / "train.jsonl", row))
    assert f"train.jsonl: row 0 (line 1): {message}" in str(error.value)


# ----------------------------------------------------------------------------------------- filter, difficulty


def test_a_band_of_difficulty_of_a_data_set_and_of_a_file_of_rows(tmp_path):
    source = gsm8k(tmp_path / "in")
    file = tmp_path / "attempts.parquet"
    write_parquet(
        file,
        encode(
            [
                attempt(f"train {n}?", float(right))
                for n in range(5)
                for right in ([0, 1] if n % 2 else [1, 1])
            ]
        ),
    )
    band = ["--difficulty-from", file, "--min-pass-rate", "0.1", "--max-pass-rate", "0.9"]
    said = data("gsm8k", tmp_path / "out", "--in", source, "--agent", "mixed", *band)
    assert (
        "2 kept, 0 below and 3 above left out, 1 without attempts left out, 6 of held-out splits kept" in said
    )
    assert [task.messages[-1].content for task in tasks(tmp_path / "out/train.parquet")] == [
        "train 1?",
        "train 3?",
    ]
    assert len(tasks(tmp_path / "out/test.parquet")) == 6
    data("gsm8k", tmp_path / "whole", "--in", source)
    said = data(
        "filter", tmp_path / "whole/train.parquet", tmp_path / "hard.parquet", *band, "--unattempted", "keep"
    )
    assert "2 kept, 0 below and 3 above left out, 1 without attempts kept" in said
    whole, kept = pq.read_table(tmp_path / "whole/train.parquet"), pq.read_table(tmp_path / "hard.parquet")
    assert kept.equals(whole.take([1, 3, 5]))


def test_a_file_filtered_into_itself_is_whole(tmp_path):
    rows = [
        {
            "data_source": "s",
            "prompt": [{"role": "user", "content": text}],
            "reward_model": {"ground_truth": "1"},
        }
        for text in "aAb"
    ]
    file = lines(tmp_path / "rows.jsonl", *rows)
    data("filter", file, tmp_path / "rows.parquet")
    data("filter", tmp_path / "rows.parquet", tmp_path / "rows.parquet", "--deduplicate")
    assert [row["prompt"][0]["content"] for row in pq.read_table(tmp_path / "rows.parquet").to_pylist()] == [
        "a",
        "b",
    ]


# ----------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            ["--agent", "tool_agnt"],
            PluginError,
            "unknown agent 'tool_agnt' (did you mean 'tool_agent'?); registered: ",
        ),
        (["--tools", "hammer"], PluginError, "unknown tool 'hammer'"),
        (["--interaction", "nobody"], PluginError, "unknown interaction 'nobody'"),
        (
            ["--agent", "single_turn_agent", "--tools", "python"],
            DataError,
            "agent 'single_turn_agent' uses no tools: remove --tools",
        ),
        (
            ["--agent", "mixed", "--tools", "python"],
            DataError,
            "agent 'mixed' uses three agents with fixed tools and interaction",
        ),
        (
            ["--template", "no place"],
            DataError,
            "the template 'no place' must contain {question} in the place of the question",
        ),
        (["--system", "@/nowhere.txt"], DataError, "--system='@/nowhere.txt' cannot be read"),
        (
            ["--test-share", "0.2"],
            DataError,
            "--test-share divides one split, but the data has test, train: choose one with --split",
        ),
        (["--max-pass-rate", "0.9"], UserError, "--min-pass-rate and --max-pass-rate need --difficulty-from"),
        (["--split", "dev"], DataError, "has no split 'dev'; it has test, train"),
    ],
)
def test_a_wrong_option_is_one_line_and_nothing_is_written(tmp_path, options, error, message):
    with pytest.raises(error) as raised:
        data("gsm8k", tmp_path / "out", "--in", gsm8k(tmp_path / "in"), *options)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_a_bad_row_leaves_what_was_there(tmp_path):
    source, out = gsm8k(tmp_path / "in"), tmp_path / "out"
    data("gsm8k", out, "--in", source)
    before = {path: path.read_bytes() for path in out.iterdir()}
    with (source / "train.jsonl").open("a") as file:  # test.jsonl, which comes first, is whole
        file.write('\n{"question": "Q", "answer": "no mark"}\n')
    with pytest.raises(
        DataError,
        match=r"train\.jsonl: row 6 \(line 7\): needs `question` and an `answer` that ends with `#### "
        r"number`",
    ):
        data("gsm8k", out, "--in", source, "--agent", "single_turn_agent")
    assert {path: path.read_bytes() for path in out.iterdir()} == before


def test_a_kind_without_files_says_how_to_name_them(tmp_path, monkeypatch):
    monkeypatch.delenv("AGENTRL_DATA", raising=False)
    with pytest.raises(
        DataError,
        match="give the original files of code with --in: a file, a folder, or a dataset of the hub",
    ):
        data("code", tmp_path / "out")
    lines(tmp_path / "code" / "train.jsonl", {"prompt": "Q", "tests": ["assert 1"]})
    monkeypatch.setenv("AGENTRL_DATA", str(tmp_path))
    assert "train.parquet: 1 row" in data("code", tmp_path / "out")


def test_rows_come_from_object_storage_and_go_there(s3, tmp_path):
    send_folder(gsm8k(tmp_path / "in"), StoragePath.of(f"{s3.url}/in"))
    said = data("gsm8k", f"{s3.url}/rows", "--in", f"{s3.url}/in")
    data("gsm8k", tmp_path / "rows", "--in", tmp_path / "in")
    rows = fetched_folder(f"{s3.url}/rows")
    assert f"wrote {s3.url}/rows/train.parquet: 6 rows" in said
    for name in ("train.parquet", "test.parquet"):
        own, local = (pq.read_table(folder / name) for folder in (rows, tmp_path / "rows"))
        assert own.num_rows == local.num_rows > 0
    said = data("filter", f"{s3.url}/rows/train.parquet", f"{s3.url}/some/few.parquet", "--deduplicate")
    assert f"wrote {s3.url}/some/few.parquet: 6 rows" in said
    kept = pq.read_table(fetched_file(f"{s3.url}/some/few.parquet"))
    assert kept.equals(pq.read_table(rows / "train.parquet"))
    assert "agent_name: single_turn_agent" in data("show", f"{s3.url}/some/few.parquet")
    said = data("arithmetic", f"{s3.url}/sums", "--train", "5", "--val", "4", "--sft", "3")
    assert said == f"wrote train.parquet, val.parquet and sft.parquet to {s3.url}/sums\n"
    assert pq.read_table(fetched_folder(f"{s3.url}/sums") / "sft.parquet").num_rows == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gsm8k", "ftp://x/y", "--in", "in"], "ftp://x/y' has the scheme ftp://"),
        (["gsm8k", "out", "--in", "s3://"], "names no bucket"),
        (["filter", "file:///nowhere/rows.parquet", "out.parquet"], "rows.parquet' does not exist"),
        (["filter", "rows.parquet", "s3://bucket/few.jsonl"], "must end in .parquet"),
        (["show", "s3://user:word@bucket/rows.parquet"], "contains credentials"),
    ],
)
def test_a_url_that_names_no_place_is_one_line(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    gsm8k(tmp_path / "in")
    result = CliRunner().invoke(app, ["data", *arguments])
    assert result.exit_code != 0
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)
    assert "word" not in str(result.exception)
