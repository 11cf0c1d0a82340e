"""Rows in verl's schema -> Tasks; whatever is wrong names file, row and field."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl.config.agent import AgentConfig
from agentrl.config.data import DataConfig
from agentrl.data.checked_dataset import agent_choice
from agentrl.data.files import open_rows
from agentrl.data.reader import task_reader
from agentrl.data.row_place import RowPlace
from agentrl.data.rows import AgentChoice, read_row, without_nulls
from agentrl.errors import DataError, PluginError
from agentrl.plugins import load_plugins
from agentrl.types import Message, Task

PLACE = RowPlace("train.parquet", "train", 7)
KNOWN = {"single_turn_agent", "tool_agent", "interaction_agent", "mine"}


def resolve(name: str) -> str:
    name = {"tool": "tool_agent"}.get(name, name)
    if name not in KNOWN:
        raise PluginError(f"unknown agent {name!r}; registered: {', '.join(sorted(KNOWN))}")
    return name


AGENTS = AgentChoice(resolve, "single_turn_agent")


def row(**changes) -> dict:
    base = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"split": "train", "index": 7},
    }
    return {**base, **changes}


def read(config: DataConfig | None = None, **changes) -> Task:
    return read_row(row(**changes), PLACE, config or DataConfig(), AGENTS)


def test_a_plain_row():
    assert read() == Task(
        task_id="train:7",
        data_source="openai/gsm8k",
        messages=(Message("system", "Be brief."), Message("user", "1+1?")),
        agent_name="single_turn_agent",
        ground_truth="2",
        ability="math",
        extra_info={"split": "train", "index": 7},
    )


TOOLS = {"tools_kwargs": {"calculator": {"create_kwargs": {"ground_truth": "2"}}}}
PARTNER = {"interaction_kwargs": {"name": "gsm8k", "ground_truth": "2"}}


@pytest.mark.parametrize(
    ("changes", "agent"),
    [
        ({}, "single_turn_agent"),
        ({"agent_name": None}, "single_turn_agent"),
        ({"agent_name": "tool"}, "tool_agent"),
        ({"agent_name": "mine", "extra_info": {**TOOLS, **PARTNER}}, "mine"),
        ({"extra_info": TOOLS}, "tool_agent"),
        ({"extra_info": PARTNER}, "interaction_agent"),
        ({"extra_info": {**TOOLS, **PARTNER}}, "interaction_agent"),
        ({"extra_info": {"tools_kwargs": {}, "interaction_kwargs": {}}}, "single_turn_agent"),
    ],
)
def test_the_agent_is_the_named_one_or_follows_from_the_row(changes, agent):
    assert read(**changes).agent_name == agent


def test_columns_are_found_by_their_configured_names():
    config = DataConfig(
        data_source_key="source",
        prompt_key="chat",
        ability_key="skill",
        reward_model_key="truth",
        extra_info_key="info",
        agent_name_key="agent",
    )
    raw = {
        "source": "s",
        "chat": [{"role": "user", "content": "hi"}],
        "skill": "a",
        "truth": {"ground_truth": 3},
        "info": PARTNER,
        "agent": "mine",
    }
    task = read_row(raw, PLACE, config, AGENTS)
    assert (task.data_source, task.messages[0].content, task.ability, task.ground_truth, task.agent_name) == (
        "s",
        "hi",
        "a",
        3,
        "mine",
    )
    assert task.interaction_kwargs == PARTNER["interaction_kwargs"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": None}, "field 'prompt': must be a list of {role, content}, is missing"),
        ({"prompt": "hi"}, "field 'prompt': must be a list of {role, content}, is 'hi'"),
        ({"prompt": []}, "field 'prompt': must contain at least one message"),
        ({"prompt": ["hi"]}, r"field 'prompt[0]': must be an object"),
        (
            {"prompt": [{"role": "bot", "content": ""}]},
            "field 'prompt[0].role': must be one of system, user, assistant, tool, is 'bot'",
        ),
        (
            {"prompt": [{"role": "user", "content": None}]},
            "field 'prompt[0].content': must be a string, is missing",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            "field 'prompt[0].content[0]': has <image> more often than 'images' has images (0)",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "audio"}]}]},
            "field 'prompt[0].content[0]': video and sound are not supported",
        ),
        ({"images": [{"bytes": b""}]}, "field 'images': has 1 images, but 'prompt' has <image> 0 times"),
        ({"videos": ["a.mp4"]}, "field 'videos': video and sound are not supported"),
        ({"data_source": None}, "field 'data_source': must be a non-empty string, is missing"),
        ({"data_source": ""}, "field 'data_source': must be a non-empty string, is empty"),
        ({"reward_model": "rule"}, "field 'reward_model': must be an object, is 'rule'"),
        (
            {"extra_info": {"tools_kwargs": "{}"}},
            "field 'extra_info.tools_kwargs': must be an object, is '{}'",
        ),
        (
            {"extra_info": {"tools_kwargs": {"t": 1}}},
            "field 'extra_info.tools_kwargs.t': must be an object, is 1",
        ),
        (
            {"extra_info": {"tools_kwargs": {"t": {"create_kwargs": 1}}}},
            "field 'extra_info.tools_kwargs.t.create_kwargs': must be",
        ),
        (
            {"extra_info": {"interaction_kwargs": {"name": "", "query": "q"}}},
            "field 'extra_info.interaction_kwargs.name': must name the interaction",
        ),
        ({"agent_name": 3}, "field 'agent_name': must be a string, is 3"),
    ],
)
def test_a_malformed_row_names_file_row_and_field(changes, message):
    with pytest.raises(DataError) as error:
        read(**changes)
    assert str(error.value).startswith("train.parquet: row 7: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_agent_names_the_row_and_the_known_ones():
    with pytest.raises(
        PluginError,
        match=r"train\.parquet: row 7: field 'agent_name': unknown agent 'toll'; registered: inter",
    ):
        read(agent_name="toll")


def test_a_missing_ground_truth_is_left_to_the_reward():
    assert read(reward_model=None).ground_truth is None
    assert read(reward_model={"style": "rule"}).ground_truth is None


def test_text_parts_are_joined_and_empty_media_columns_are_no_media():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read(prompt=[{"role": "user", "content": parts}], images=[], videos=None).messages == (
        Message("user", "ab"),
    )


def test_few_shot_tool_calls_in_a_prompt():
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "calculator", "arguments": '{"expression": "1+1"}'},
    }
    prompt = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]
    assistant, answer = read(prompt=prompt).messages
    assert (assistant.content, assistant.tool_calls[0].arguments) == ("", {"expression": "1+1"})
    assert answer.tool_call_id == "c1"


def test_nulls_that_parquet_adds_by_merging_structs_are_taken_out_again(tmp_path: Path):
    rows = [
        row(
            extra_info={
                "tools_kwargs": {"calculator": {"create_kwargs": {"precision": 3}}},
                "note": '{"kept": null}',
            }
        ),
        row(extra_info={"tools_kwargs": {"search": {"create_kwargs": {"corpus": "wiki"}}}, "index": 1}),
        row(extra_info={"interaction_kwargs": {"name": "gsm8k", "query": "q"}, "steps": [1, None]}),
        row(extra_info={}),
    ]
    path = tmp_path / "mixed.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    tasks = [read_row(raw, PLACE, DataConfig(), AGENTS) for raw in open_rows(str(path)).rows(4)]
    assert [task.extra_info for task in tasks] == [raw["extra_info"] for raw in rows]
    assert [dict(task.tools_kwargs) for task in tasks] == [
        rows[0]["extra_info"]["tools_kwargs"],
        rows[1]["extra_info"]["tools_kwargs"],
        {},
        {},
    ]
    assert [task.agent_name for task in tasks] == [
        "tool_agent",
        "tool_agent",
        "interaction_agent",
        "single_turn_agent",
    ]


def test_without_nulls_reaches_every_depth_and_keeps_list_entries():
    assert without_nulls({"a": None, "b": {"c": None, "d": [None, {"e": None}]}}) == {"b": {"d": [None, {}]}}


READER = """
from agentrl.types import Message, Task

def read(row):
    return Task(task_id="", data_source=row["kind"], messages=(Message("user", row["q"]),), agent_name=row.get("agent", ""))

def returns_text(row):
    return "task"

def raises(row):
    return row["missing"]
"""  # noqa: E501


def test_a_reader_of_ones_own(tmp_path: Path):
    source = tmp_path / "my_reader.py"
    source.write_text(READER)
    tasks = task_reader(DataConfig(reader=f"{source}:read"), AGENTS)
    assert tasks({"kind": "k", "q": "hi"}, PLACE) == Task(
        "train:7", "k", (Message("user", "hi"),), "single_turn_agent"
    )
    assert tasks({"kind": "k", "q": "hi", "agent": "tool"}, PLACE).agent_name == "tool_agent"
    with pytest.raises(PluginError, match=r"train\.parquet: row 7: unknown agent 'x'"):
        tasks({"kind": "k", "q": "hi", "agent": "x"}, PLACE)
    with pytest.raises(
        DataError, match=r"train\.parquet: row 7: .*must return an agentrl\.types\.Task, returned str"
    ):
        task_reader(DataConfig(reader=f"{source}:returns_text"), AGENTS)({}, PLACE)
    with pytest.raises(DataError, match=r"train\.parquet: row 7: .* failed: KeyError: 'missing'"):
        task_reader(DataConfig(reader=f"{source}:raises"), AGENTS)({}, PLACE)


@pytest.mark.parametrize(
    ("reader", "message"),
    [
        ("no_colon", "must have the form module:function or file.py:function"),
        ("no_such_module_anywhere:read", "no_such_module_anywhere"),
        ("/nowhere/reader.py:read", "does not exist"),
        ("json:nothing", "json has no function 'nothing'"),
    ],
)
def test_a_reader_that_cannot_be_found(reader, message):
    with pytest.raises(DataError) as error:
        task_reader(DataConfig(reader=reader), AGENTS)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "agent", [None, "tool_agent"], ids=["gsm8k_multiturn_w_tool", "gsm8k_tool_agent_loop"]
)
def test_rows_of_verls_tool_examples_have_a_partner_without_a_name_which_is_ignored(agent):
    """As verl's scripts write them: what a partner would get stands beside the tools, with no word of which
    partner.
    """
    extra_info = {
        "index": 3,
        "need_tools_kwargs": True,
        "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "2"}}},
        "interaction_kwargs": {"query": "1+1?", "ground_truth": "2", "name": None},
    }
    task = read(extra_info=extra_info, agent_name=agent)
    assert (task.agent_name, task.interaction_kwargs) == ("tool_agent", None)
    assert task.tools_kwargs == extra_info["tools_kwargs"]
    strict = AgentChoice(resolve, "single_turn_agent", has_partners=True)
    with pytest.raises(
        DataError, match="must name the interaction that answers, is missing; the row has ground_truth, query"
    ):
        read_row(row(extra_info=extra_info, agent_name=agent), PLACE, DataConfig(), strict)


@pytest.mark.parametrize(
    ("agent", "has_partners"),
    [
        ({}, False),
        ({"verl_interaction_config": "partners.yaml"}, True),
        ({"interaction_config": {"gsm8k": {"reward": "turn"}}}, True),
    ],
)
def test_a_name_is_asked_for_where_interactions_are_configured(agent, has_partners):
    config = AgentConfig.model_validate(agent)
    assert agent_choice(config, load_plugins()).has_partners is has_partners
