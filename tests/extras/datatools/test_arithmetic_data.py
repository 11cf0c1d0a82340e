"""The quickstart's data: splits are disjoint by expression, rows are readable, shares are as configured."""

import json
from collections import Counter
from fractions import Fraction

import pyarrow.parquet as pq
import pytest
from agentrl.tools import calculator
from hypothesis import given
from hypothesis import strategies as st

from agentrl.chat.chat import Chat
from agentrl.chat.tiny import write_tiny_tokenizer
from agentrl.config.data import DataConfig
from agentrl.data.row_place import RowPlace
from agentrl.data.rows import AgentChoice, read_row
from agentrl.errors import ConfigError, DataError
from agentrl.extras.answers.gsm8k import extract_answer, is_correct
from agentrl.extras.answers.gsm8k_partner import FEEDBACK
from agentrl.extras.datatools import arithmetic
from agentrl.extras.datatools.arithmetic import ArithmeticMix, normalize, split_of, write_arithmetic
from agentrl.types import Message, ToolCall

SIZES = {"num_train": 600, "num_val": 240, "num_sft": 1500}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("arithmetic")
    write_arithmetic(path, seed=1, **SIZES)
    return path


def rows(folder, name: str) -> list[dict]:
    return pq.read_table(folder / f"{name}.parquet").to_pylist()


def tasks(folder, name: str):
    agents = AgentChoice(resolve=lambda agent: agent, default="single_turn_agent")
    return [
        read_row(row, RowPlace(name, name, index), DataConfig(), agents)
        for index, row in enumerate(rows(folder, name))
    ]


def test_no_validation_expression_is_trained_on_in_whatever_order(folder):
    trained = {normalize(row["expression"]) for row in rows(folder, "sft")}
    trained |= {normalize(row["extra_info"]["expression"]) for row in rows(folder, "train")}
    validated = [normalize(row["extra_info"]["expression"]) for row in rows(folder, "val")]
    assert not trained & set(validated)
    assert {split_of(expression, val_percent=20) for expression in trained} == {"train"}
    assert {split_of(expression, val_percent=20) for expression in validated} == {"val"}


@given(st.integers(10, 99), st.integers(10, 99), st.integers(1, 9), st.integers(0, 100))
def test_mirror_images_share_a_split(a, b, c, percent):
    families = [
        [f"{a}*{b}+{c}", f"{b}*{a}+{c}", f"{c}+{b}*{a}"],
        [f"{a}*{b}-{c}", f"{b} * {a} - {c}"],
        [f"{a}+{b}", f"{b}+{a}"],
    ]
    for family in families:
        assert len({split_of(expression, val_percent=percent) for expression in family}) == 1
    assert normalize("34*12+5") == normalize("5+12*34") != normalize("12*34-5")
    assert normalize("9-4") != normalize("4-9")


def test_the_same_seed_writes_the_same_rows(folder, tmp_path):
    write_arithmetic(tmp_path / "again", seed=1, **SIZES)
    write_arithmetic(tmp_path / "other", seed=2, **SIZES)
    for name in ("train", "val", "sft"):
        assert rows(folder, name) == rows(tmp_path / "again", name)
        assert rows(folder, name) != rows(tmp_path / "other", name)


def test_a_mix_has_its_kinds_alone_in_turn(tmp_path):
    mix = ArithmeticMix(kinds=arithmetic.read_kinds("interaction, tool"), sft_tool_use=0.2)
    write_arithmetic(tmp_path, seed=1, mix=mix, num_train=10, num_val=10, num_sft=1000)
    for name in ("train", "val"):
        assert [row["extra_info"]["kind"] for row in rows(tmp_path, name)] == ["interaction", "tool"] * 5
    conversations = rows(tmp_path, "sft")
    assert [row["kind"] for row in conversations] == ["interaction", "tool"] * 500
    num_calls = sum(any(message["tool_calls"] for message in row["messages"]) for row in conversations)
    assert 70 <= num_calls <= 130


@pytest.mark.parametrize("text", ["", "tools", "tool,,easy", "tool,tool"])
def test_kinds_that_are_none_are_told(text):
    with pytest.raises(ConfigError, match=f"--kinds={text}: should be one or more of tool, easy, inter"):
        arithmetic.read_kinds(text)


@pytest.mark.parametrize("name", ["train", "val"])
def test_rows_become_tasks_of_three_kinds_in_turn(folder, name):
    read = tasks(folder, name)
    assert len(read) == SIZES[f"num_{name}"]
    assert [task.agent_name for task in read[:3]] == ["tool_agent", "single_turn_agent", "interaction_agent"]
    for index, task in enumerate(read):
        info, expression = task.extra_info, task.extra_info["expression"]
        assert (info["index"], info["split"], task.data_source) == (index, name, "arithmetic")
        assert calculator.evaluate(expression) == Fraction(task.ground_truth)
        assert expression in task.messages[0].content
        assert info["needs_tool"] == (info["kind"] == "tool") == ("calculator" in task.tools_kwargs)
        query = {"name": "gsm8k", "query": task.messages[0].content, "ground_truth": task.ground_truth}
        assert task.interaction_kwargs == (query if info["kind"] == "interaction" else None)


def test_validation_expressions_are_different_and_too_many_are_refused(folder, tmp_path):
    expressions = [row["extra_info"]["expression"] for row in rows(folder, "val")]
    assert len(set(expressions)) == len(expressions)
    with pytest.raises(
        DataError, match=r"the validation split has \d+ expressions of kind '\w+', but 3000 are needed"
    ):
        write_arithmetic(tmp_path, seed=0, num_train=3, num_val=9000, num_sft=3)


def test_only_tool_rows_multiply_and_every_answer_is_a_positive_number(folder):
    for name in ("train", "val"):
        for task in tasks(folder, name):
            assert ("*" in task.extra_info["expression"]) == task.extra_info["needs_tool"]
            assert int(task.ground_truth) > 0


# ------------------------------------------------------------------------------------------------- warm start


def to_message(raw: dict) -> Message:
    calls = [
        ToolCall(call["id"], call["function"]["name"], calculator_arguments(call))
        for call in raw["tool_calls"] or []
    ]
    return Message(raw["role"], raw["content"], tuple(calls), raw["tool_call_id"], raw["name"])


def calculator_arguments(call: dict) -> dict:
    return json.loads(call["function"]["arguments"])


def is_right(message: dict, expression: str) -> bool:
    return is_correct(extract_answer(message["content"], strict=True), str(arithmetic.evaluate(expression)))


def test_conversations_answer_as_well_as_configured(folder):
    mix, seen = ArithmeticMix(), {kind: Counter() for kind in arithmetic.KINDS}
    for row in rows(folder, "sft"):
        answers = [message for message in row["messages"] if message["role"] == "assistant"]
        seen[row["kind"]]["rows"] += 1
        seen[row["kind"]]["first"] += is_right(answers[0], row["expression"])
        seen[row["kind"]]["last"] += is_right(answers[-1], row["expression"])
        seen[row["kind"]]["retries"] += len(answers) - 1
        seen[row["kind"]]["calls"] += bool(answers[0]["tool_calls"])

    def share(kind: str, what: str, of: str = "rows") -> float:
        return seen[kind][what] / seen[kind][of]

    assert share("tool", "calls") == share("tool", "last") == pytest.approx(mix.sft_tool_use, abs=0.08)
    assert share("easy", "last") == pytest.approx(mix.sft_easy_right, abs=0.08)
    assert share("interaction", "first") == pytest.approx(mix.sft_first_right, abs=0.08)
    retried_right = (seen["interaction"]["last"] - seen["interaction"]["first"]) / seen["interaction"][
        "retries"
    ]
    assert retried_right == pytest.approx(mix.sft_retry_right, abs=0.08)


def test_conversations_follow_tool_and_interaction_to_the_letter(folder):
    assert arithmetic.FEEDBACK == FEEDBACK
    for row in rows(folder, "sft"):
        assert row["tools"] == (["calculator"] if row["kind"] == "tool" else [])
        for before, message in zip(row["messages"], row["messages"][1:], strict=False):
            if message["role"] == "tool":
                expression = calculator_arguments(before["tool_calls"][0])["expression"]
                assert message["content"] == calculator.format_number(calculator.evaluate(expression))
            if message["role"] == "user":
                assert message["content"] == FEEDBACK
                assert not is_right(before, row["expression"])


def test_a_whole_dialog_is_short(folder, tmp_path):
    write_tiny_tokenizer(tmp_path)
    chat, schema = Chat.load(str(tmp_path)), calculator.Calculator().schema()
    for row in rows(folder, "sft")[:300]:
        built = chat.render_training(
            [to_message(raw) for raw in row["messages"]], [schema] if row["tools"] else []
        )
        assert len(built.token_ids) <= 120
        assert 0 < built.mask.sum() <= 48
        assert built.segment_starts == (0,)


def test_the_mix_decides(tmp_path):
    shares = {"sft_tool_use": 1.0, "sft_easy_right": 1.0, "sft_first_right": 0.0}
    mix = ArithmeticMix(**shares, sft_tries=1, factors=(2, 3), phrasings=("{}",), val_percent=50)
    write_arithmetic(tmp_path, seed=0, num_train=30, num_val=3, num_sft=60, mix=mix)
    for row in rows(tmp_path, "sft"):
        right = is_right(row["messages"][-1], row["expression"])
        assert right == (row["kind"] != "interaction")
        assert row["messages"][0]["content"] == row["expression"]
        assert len(row["messages"]) == (4 if row["kind"] == "tool" else 2)
