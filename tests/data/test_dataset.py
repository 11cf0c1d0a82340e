"""A dataset is a sequence without end: any position at once, the same on every run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config.agent import AgentConfig
from agentrl.config.data import DataConfig
from agentrl.data import files
from agentrl.data.checked_dataset import Playable, build_dataset
from agentrl.data.dataset import Dataset, DatasetReport
from agentrl.data.files import ParquetRows, file_ids, open_rows, write_rows
from agentrl.data.rows import AgentChoice
from agentrl.errors import DataError, PluginError
from agentrl.plugins import AgentLoop, Interaction, InteractionReply, Tool, ToolResult, load_plugins
from agentrl.types import Task

AGENTS = AgentChoice(lambda name: name, "single_turn_agent")


def row(text: str, **changes) -> dict:
    return {"data_source": "s", "prompt": [{"role": "user", "content": text}], **changes}


def parquet(path: Path, texts: list[str], *, row_group_size: int = 3) -> str:
    pq.write_table(pa.Table.from_pylist([row(text) for text in texts]), path, row_group_size=row_group_size)
    return str(path)


def json_lines(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps(row(text)) + "\n" for text in texts))
    return str(path)


def dataset(
    paths: list[str], config: DataConfig | None = None, *, shuffle: bool = False, seed: int = 0, **options
) -> Dataset:
    return Dataset(paths, config or DataConfig(), agents=AGENTS, seed=seed, shuffle=shuffle, **options)


def texts(data: Dataset, positions) -> list[str]:
    return [data.task(position).messages[0].content for position in positions]


WORDS = [f"word{i} é☃" for i in range(10)]


@pytest.mark.parametrize("write", [parquet, json_lines])
def test_rows_come_in_order_and_with_stable_ids(tmp_path: Path, write):
    data = dataset([write(tmp_path / ("a.parquet" if write is parquet else "a.jsonl"), WORDS)])
    assert len(data) == 10
    assert texts(data, range(10)) == WORDS
    assert texts(data, range(20, 30)) == WORDS
    assert [data.task(position).task_id for position in (0, 9, 10)] == ["a:0", "a:9", "a:0"]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), epochs=st.integers(1, 4))
def test_each_epoch_holds_every_row_once_in_an_order_of_its_own(tmp_path_factory, seed, epochs):
    path = parquet(tmp_path_factory.mktemp("d") / "a.parquet", WORDS)
    forward = dataset([path], shuffle=True, seed=seed)
    orders = [texts(forward, range(epoch * 10, epoch * 10 + 10)) for epoch in range(epochs)]
    assert all(sorted(order) == sorted(WORDS) for order in orders)
    assert (
        len({tuple(order) for order in orders}) == epochs
    )  # 10! orders: equal ones would be a seed not used
    backward = dataset([path], shuffle=True, seed=seed)
    again = [texts(backward, [position])[0] for position in reversed(range(epochs * 10))]
    assert again[::-1] == [text for order in orders for text in order]


def test_another_seed_is_another_order(tmp_path: Path):
    path = parquet(tmp_path / "a.parquet", WORDS)
    assert texts(dataset([path], shuffle=True, seed=1), range(10)) != texts(
        dataset([path], shuffle=True, seed=2), range(10)
    )


def test_files_of_both_kinds_follow_one_another_and_max_rows_cuts_across(tmp_path: Path):
    paths = [parquet(tmp_path / "a.parquet", WORDS[:4]), json_lines(tmp_path / "b.jsonl", WORDS[4:])]
    assert texts(dataset(paths), range(10)) == WORDS
    cut = dataset(paths, max_rows=6, measure=lambda task: 1)
    assert (len(cut), texts(cut, range(6))) == (6, WORDS[:6])
    assert [cut.task(position).task_id for position in (3, 4)] == ["a:3", "b:0"]
    assert file_ids(["x/train.parquet", "y/train.jsonl", "z/val.parquet"]) == ["train#0", "train#1", "val"]


def length(task: Task) -> int:
    return len(task.messages[0].content)


@pytest.mark.parametrize(
    ("policy", "kept", "report"),
    [
        ("filter", ["aa", "b"], DatasetReport(rows=4, filtered=2, truncated=0)),
        ("truncate_left", ["aa", "cccc", "b", "ddd"], DatasetReport(rows=4, filtered=0, truncated=2)),
    ],
)
def test_overlong_prompts_are_counted(tmp_path: Path, policy, kept, report):
    path = parquet(tmp_path / "a.parquet", ["aa", "cccc", "b", "ddd"])
    data = dataset([path], DataConfig(max_prompt_tokens=2, overlong_prompts=policy), measure=length)
    assert texts(data, range(len(data))) == kept
    assert data.report == report


def test_equal_rows_are_counted(tmp_path: Path):
    data = dataset([json_lines(tmp_path / "a.jsonl", ["a", "b", "a", "a"])], measure=length)
    assert data.report == DatasetReport(rows=4, filtered=0, truncated=0, repeated=2)
    different = [row("a", extra_info={"n": n}) for n in range(3)]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(one) + "\n" for one in different))
    assert dataset([str(tmp_path / "b.jsonl")], measure=length).report.repeated == 0


def test_overlong_prompts_as_error_name_the_row(tmp_path: Path):
    path = json_lines(tmp_path / "a.jsonl", ["aa", "cccc"])
    with pytest.raises(
        DataError,
        match=r"a\.jsonl: row 1 \(line 2\): field 'prompt': 4 tokens exceed data\.max_prompt_tokens=2",
    ):
        dataset([path], DataConfig(max_prompt_tokens=2, overlong_prompts="error"), measure=length)


def test_nothing_left_is_an_error(tmp_path: Path):
    path = parquet(tmp_path / "a.parquet", ["aaa", "bbb"])
    with pytest.raises(DataError, match=r"all 2 prompts exceed data\.max_prompt_tokens=1; raise it$"):
        dataset([path], DataConfig(max_prompt_tokens=1), measure=length)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="have no rows"):
        dataset([str(tmp_path / "empty.jsonl")])
    with pytest.raises(DataError, match=r"set data\.train_files"):
        dataset([])


def test_a_missing_or_foreign_file_is_named_with_the_nearest(tmp_path: Path):
    parquet(tmp_path / "train.parquet", ["a"])
    with pytest.raises(DataError, match=r"trian\.parquet' does not exist; did you mean .*train\.parquet'"):
        open_rows(str(tmp_path / "trian.parquet"))
    with pytest.raises(DataError, match=r"is a folder; name its files, such as .*train\.parquet'"):
        open_rows(str(tmp_path))
    with pytest.raises(DataError, match="nor does its folder"):
        open_rows(str(tmp_path / "nowhere" / "train.parquet"))
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(DataError, match=r"unknown suffix '\.csv'; use \.parquet or \.jsonl"):
        open_rows(str(tmp_path / "a.csv"))
    (tmp_path / "fake.parquet").write_text("not at all")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        open_rows(str(tmp_path / "fake.parquet"))


def test_broken_json_lines_name_their_line(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row("ok")) + "\n\n{broken\n")
    with pytest.raises(DataError, match=r"a\.jsonl: line 3: not valid JSON"):
        dataset([str(path)]).task(1)
    path.write_text('{"prompt": 1}\n[{}]\n')
    with pytest.raises(DataError, match=r"line 2: must be one JSON object per line, is list"):
        dataset([str(path)]).task(1)
    path.write_text('{\n"prompt": 1\n}\n{\n"prompt": 2\n}\n')
    with pytest.raises(DataError, match=r"line 1: not valid JSON: .*; write one object per line, or one ar"):
        dataset([str(path)]).task(0)
    path.write_text('{"difficulty": NaN}\n')
    with pytest.raises(DataError, match=r"line 1: not valid JSON: NaN is not JSON; use null or text$"):
        dataset([str(path)]).task(0)


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_one_array_of_rows_is_read_too(tmp_path: Path, indent, suffix):
    path = tmp_path / f"a.{suffix}"
    path.write_text("\n" + json.dumps([row("a"), row("b")], indent=indent))
    assert texts(dataset([str(path)]), range(2)) == ["a", "b"]
    path.write_text('[{"a": 1},\n]')
    with pytest.raises(DataError, match=r"a\.jsonl?: not valid JSON: trailing comma .*: line 1 column 10"):
        open_rows(str(path))
    path.write_text(json.dumps([row("a"), 3]))
    with pytest.raises(DataError, match=r"row 1: must be a JSON object, is int"):
        dataset([str(path)]).task(1)


def test_only_a_few_row_groups_stay_decoded(tmp_path: Path, monkeypatch):
    path = parquet(tmp_path / "a.parquet", WORDS, row_group_size=2)
    monkeypatch.setattr(files, "CACHE_BYTES", 1)
    rows = ParquetRows(path)
    for index in (0, 9, 4, 1):
        assert rows.row(index)["prompt"][0]["content"] == WORDS[index]
        assert len(rows._cache) == 1


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path):
    def rows():
        yield {"x": 1}
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        write_rows(tmp_path / "a.parquet", rows(), pa.schema([("x", pa.int64())]))
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------------ build


class Plain(AgentLoop):
    name = "plain"
    uses_tools = False

    async def run(self, task, session): ...


class WithTools(AgentLoop):
    name = "with_tools"

    async def run(self, task, session): ...


class Hammer(Tool):
    name = "hammer"
    description = "hits"
    parameters = {"type": "object"}  # noqa: RUF012

    async def call(self, arguments):
        return ToolResult("hit")


class Saw(Hammer):
    name = "saw"


class Partner(Interaction):
    name = "partner"

    async def respond(self, messages):
        return InteractionReply("", is_done=True)


class Counter:
    """Stands for the chat: one token per character and ten per tool."""

    def open(self, messages, tools):
        self.size = sum(len(message.content) for message in messages) + 10 * len(tools)
        return self

    def check_tools(self, tools, messages):
        pass

    def with_template_kwargs(self, given):
        return self

    def num_pending_tokens(self):
        return self.size


def build(path: str, check_reward=None, **options) -> Dataset:
    plugins = load_plugins()
    for registry, classes in (
        (plugins.agents, (Plain, WithTools)),
        (plugins.tools, (Hammer, Saw)),
        (plugins.interactions, (Partner,)),
    ):
        for cls in classes:
            registry.add(cls)
    playable = Playable(
        AgentConfig(default="with_tools", tools=("hammer",)), plugins, Counter(), check_reward
    )
    return build_dataset(DataConfig(max_prompt_tokens=15), [path], playable, **options)


def test_tools_that_are_offered_count_as_prompt(tmp_path: Path):
    rows = [
        row("123456", agent_name="plain"),
        row("12345"),
        row("123456"),
        row("1", extra_info={"tools_kwargs": {"saw": {}}}, agent_name="with_tools"),
        row("1", extra_info={"tools_kwargs": {"hammer": {}}}, agent_name="with_tools"),
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    data = build(str(path))
    assert [data.task(p).task_id for p in range(len(data))] == ["a:0", "a:1", "a:4"]
    assert data.report == DatasetReport(rows=5, filtered=2, truncated=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"agent_name": "nobody"}, "a.jsonl: row 0 (line 1): field 'agent_name': unknown agent 'nobody'"),
        (
            {"agent_name": "with_tools", "extra_info": {"tools_kwargs": {"drill": {}}}},
            "a.jsonl: row 0 (line 1): unknown tool 'drill'",
        ),
        (
            {"agent_name": "plain", "extra_info": {"interaction_kwargs": {"name": "x"}}},
            "a.jsonl: row 0 (line 1): unknown interaction 'x'",
        ),
    ],
)
def test_what_no_row_could_play_is_found_before_any_rollout(tmp_path: Path, changes, message):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row("x", **changes)) + "\n")
    with pytest.raises(PluginError) as error:
        build(str(path))
    assert message in str(error.value)


def test_what_a_reward_refuses_names_the_row(tmp_path: Path):
    def refuse(task: Task) -> None:
        raise DataError("no ground truth")

    path = parquet(tmp_path / "a.parquet", ["x"])
    with pytest.raises(DataError, match=r"a\.parquet: row 0: no ground truth"):
        build(path, check_reward=refuse)


def test_data_needs_no_torch_no_ray_no_transformers():
    code = (
        "import sys, agentrl.data.checked_dataset; print({'torch', 'ray', 'transformers'} & set(sys.modules))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "set()"
    )
