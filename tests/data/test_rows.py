"""Rows in verl's schema -> Tasks; whatever is wrong names file, row and field."""

from __future__ import annotations

import datetime
import decimal
import functools
import json
import uuid
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config.agent import AgentConfig
from agentrl.config.data import DataConfig
from agentrl.data.checked_dataset import agent_choice
from agentrl.data.files import open_rows
from agentrl.data.reader import task_reader
from agentrl.data.row_place import RowPlace
from agentrl.data.row_values import decode_json, plain
from agentrl.data.rows import AgentChoice, read_row
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
        ({"prompt": "[hi"}, "field 'prompt': is not valid JSON"),
        ({"reward_model": "rule"}, "field 'reward_model': must be an object, is 'rule'"),
        (
            {"extra_info": {"tools_kwargs": "[]"}},
            "field 'extra_info.tools_kwargs': must be an object, is '[]'",
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


def test_a_structured_ground_truth_is_the_same_from_parquet_and_from_json_lines(tmp_path: Path):
    truths = [
        {"orders": {"90": "sent"}, "items": [{"sku": "a", "n": 1}, {"sku": "b"}]},
        {"orders": {"83": "lost"}, "items": [None, {"n": 2}], "none": []},
        {"orders": {}, "items": []},
    ]
    rows = [row(reward_model={"style": "rule", "ground_truth": truth}) for truth in truths]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    for name in ("a.parquet", "a.jsonl"):
        file = open_rows(str(tmp_path / name))
        for found in (file.rows(3), (file.row(index) for index in range(3))):
            tasks = [read_row(raw, PLACE, DataConfig(), AGENTS) for raw in found]
            assert [task.ground_truth for task in tasks] == truths


def test_nulls_that_somebody_wrote_are_kept(tmp_path: Path):
    """In JSON lines, in JSON text, in lists and in maps; in a struct they cannot be told apart."""
    info = {"unit": None, "tools_kwargs": {"search": None, "calculator": {"create_kwargs": {"x": None}}}}
    of_row = {"calculator": {"create_kwargs": {"x": None}}}
    (tmp_path / "a.jsonl").write_text(json.dumps(row(extra_info=info)) + "\n")
    number = pa.int64()
    kind = pa.struct([("m", pa.map_(pa.string(), number)), ("s", number), ("l", pa.list_(number))])
    extra = pa.array([{"m": [("a", None)], "s": None, "l": [None]}], kind)
    table = pa.Table.from_pylist([row(extra_info=json.dumps(info))]).append_column("mapped", extra)
    pq.write_table(table, tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        [raw] = open_rows(str(tmp_path / name)).rows(1)
        task = read_row(raw, PLACE, DataConfig(), AGENTS)
        assert task.extra_info == {"unit": None, "tools_kwargs": of_row}
        assert task.tools_kwargs == of_row
    task = read_row(raw, PLACE, DataConfig(extra_info_key="mapped"), AGENTS)
    assert task.extra_info == {"m": {"a": None}, "l": [None]}


def test_structures_may_be_json_text():
    call = {"name": "f", "arguments": {"city": "Bern", "unit": None}}
    texts = {
        "prompt": json.dumps([{"role": "user", "content": "?", "tool_calls": [{"function": call}]}]),
        "reward_model": json.dumps({"ground_truth": "[1]"}),
        "extra_info": json.dumps(
            {"tools_kwargs": '{"f": {"create_kwargs": "{\\"x\\": null}"}}', "note": "{}"}
        ),
    }
    task = read(**texts)
    assert task.messages[0].tool_calls[0].arguments == {"city": "Bern", "unit": None}
    assert task.ground_truth == "[1]"
    assert task.tools_kwargs == {"f": {"create_kwargs": {"x": None}}}
    assert task.extra_info == {"tools_kwargs": task.tools_kwargs, "note": "{}"}
    assert read(extra_info=" ", reward_model="null").ground_truth is None
    with pytest.raises(DataError, match=r"row 7: field 'extra_info': is not valid JSON \(.*\): '{broken'"):
        read(extra_info="{broken")


def test_integers_of_any_size_are_exact(tmp_path: Path):
    sizes = [2**64 - 1, 2**64 + 1, -(2**63) - 1, 123456789012345678901234567890]
    columns = [{"reward_model": {"ground_truth": size}, "extra_info": {"n": [size]}} for size in sizes]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row(**one)) + "\n" for one in columns))
    texts = [row(**{name: json.dumps(value) for name, value in one.items()}) for one in columns]
    pq.write_table(pa.Table.from_pylist(texts), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        for raw, size in zip(open_rows(str(tmp_path / name)).rows(4), sizes, strict=True):
            task = read_row(raw, PLACE, DataConfig(), AGENTS)
            assert (task.ground_truth, task.extra_info) == (size, {"n": [size]})
            assert type(task.ground_truth) is int
    (tmp_path / "a.jsonl").write_text('{"n": ' + "1" * 400 + "}\n")
    with pytest.raises(DataError, match=r"a\.jsonl: line 1: not valid JSON: number is infinity"):
        open_rows(str(tmp_path / "a.jsonl")).row(0)


IN_PARQUET = {
    "moment": (datetime.datetime(2026, 1, 2, 3, 4, 5), "2026-01-02T03:04:05"),
    "zoned": (datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), "2026-01-02T00:00:00+00:00"),
    "day": (datetime.date(2026, 1, 2), "2026-01-02"),
    "time": (datetime.time(3, 4), "03:04:00"),
    "long": (datetime.timedelta(days=1, seconds=2), "1 day, 0:00:02"),
    "price": (decimal.Decimal("1.50"), "1.50"),
    "blob": (b"\xff\x00", "/wA="),
}


def test_values_that_json_does_not_have_are_text(tmp_path: Path):
    given = {name: value for name, (value, _) in IN_PARQUET.items()}
    texts = {name: text for name, (_, text) in IN_PARQUET.items()}
    info = {**given, "nested": [{"day": given["day"]}]}
    table = pa.Table.from_pylist([row(extra_info=info, reward_model={"ground_truth": given["price"]})])
    places = table.schema.get_field_index("data_source")
    pq.write_table(
        table.set_column(places, "data_source", table["data_source"].dictionary_encode()),
        tmp_path / "a.parquet",
    )
    [raw] = open_rows(str(tmp_path / "a.parquet")).rows(1)
    task = read_row(raw, PLACE, DataConfig(), AGENTS)
    assert task.extra_info == {**texts, "nested": [{"day": "2026-01-02"}]}
    assert (task.data_source, task.ground_truth) == ("openai/gsm8k", "1.50")
    assert json.loads(json.dumps(task.extra_info)) == task.extra_info


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("nan"), "field 'extra_info.a[1].b': is nan, which JSON does not have; use null or text"),
        (float("-inf"), "field 'extra_info.a[1].b': is -inf"),
        ({1, 2}, "field 'extra_info.a[1].b': is of type set; use text, numbers"),
        (functools.reduce(lambda inner, _: [inner], range(200), 0), "has more than 100 levels of lists"),
    ],
)
def test_values_that_cannot_be_stored_name_row_and_field(value, words):
    with pytest.raises(DataError) as error:
        read(extra_info={"a": [0, {"b": value}]})
    assert str(error.value).startswith("train.parquet: row 7: ")
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (pa.array([None, 1_700_000_000_123_456_789], pa.timestamp("ns")), "Nanosecond resolution"),
        (pa.array([0, 10**7], pa.date32()), "date value out of range"),
    ],
)
def test_what_python_cannot_represent_names_row_and_column(tmp_path: Path, column, words):
    pq.write_table(pa.table({"data_source": ["a", "b"], "when": column}), tmp_path / "a.parquet")
    file = open_rows(str(tmp_path / "a.parquet"))
    for read_all in (lambda: file.row(1), lambda: list(file.rows(2))):
        with pytest.raises(DataError, match=rf"a\.parquet: row 1: field 'when': cannot be read: .*{words}"):
            read_all()
    assert file.row(0)["data_source"] == "a"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"])),
        lambda inner: (
            st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner)
        ),
        max_leaves=20,
    )
)
def test_json_is_read_as_it_is_in_every_form(value):
    assert decode_json(json.dumps(value)) == value
    assert plain(value, PLACE, "x") == value
    assert read(extra_info={"v": value}).extra_info == {"v": value}
    assert read(extra_info=json.dumps({"v": value})).extra_info == {"v": value}


def test_numbers_of_numpy_are_those_of_python():
    given = {"i": np.int64(3), "f": np.float32(0.5), "a": np.array([[1, 2]], np.uint64), "b": np.bool_(True)}
    read_back = plain({**given, "d": np.datetime64("2026-01-02"), "u": uuid.UUID(int=1), 5: ()}, PLACE, "x")
    assert read_back == {
        "i": 3, "f": 0.5, "a": [[1, 2]], "b": True, "d": "2026-01-02",
        "u": "00000000-0000-0000-0000-000000000001", "5": [],
    }  # fmt: skip
    assert json.loads(json.dumps(read_back)) == read_back


def test_a_column_that_is_not_there_is_named_with_those_that_are():
    raw = row()
    raw["question"] = raw.pop("prompt")
    with pytest.raises(DataError) as error:
        read_row(raw, PLACE, DataConfig(), AGENTS)
    assert "field 'prompt': is missing; the row has data_source, ability, " in str(error.value)
    assert str(error.value).endswith("question; name its column in data.prompt_key")


@pytest.mark.parametrize("key", ["function_call", "thinking"])
def test_messages_with_keys_of_another_spelling_are_refused(key):
    prompt = [{"role": "assistant", "content": "a", key: {"name": "f"}}]
    with pytest.raises(DataError, match=rf"field 'prompt\[0\]\.{key}': is not read; write "):
        read(prompt=prompt)
    assert read(prompt=[{"role": "user", "content": "a", key: None}]).messages == (Message("user", "a"),)


READER = """
import datetime, decimal
import numpy
from agentrl.types import Message, Task

def read(row):
    return Task(task_id="", data_source=row["kind"], messages=(Message("user", row["q"]),), agent_name=row.get("agent", ""))

def returns_text(row):
    return "task"

def returns_dates(row):
    info = {"day": datetime.date(2026, 1, 2), "n": numpy.int64(3)}
    return Task("", "k", (Message("user", "q"),), "", ground_truth=decimal.Decimal("1.5"), extra_info=info)

def returns_a_set(row):
    return Task("", "k", (Message("user", "q"),), "", ground_truth={1})

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
    dated = task_reader(DataConfig(reader=f"{source}:returns_dates"), AGENTS)({}, PLACE)
    assert (dated.ground_truth, dated.extra_info) == ("1.5", {"day": "2026-01-02", "n": 3})
    with pytest.raises(DataError, match=r"train\.parquet: row 7: field 'ground_truth': is of type set"):
        task_reader(DataConfig(reader=f"{source}:returns_a_set"), AGENTS)({}, PLACE)
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
