"""Arguments of a chat template besides messages and tools are in every prompt, by config and by row. That
transformers renders the same is in test_template.py, rows to imitate are in test_sft_data.py.
"""

from __future__ import annotations

import datetime
from functools import cache
from pathlib import Path

import pytest
from agentrl.agents.single_turn_agent import SingleTurnAgent

from agentrl.chat.chat import Chat
from agentrl.chat.tiny import write_tiny_tokenizer
from agentrl.config.agent import AgentConfig
from agentrl.config.model import ModelConfig
from agentrl.data.checked_dataset import Playable
from agentrl.errors import ConfigError
from agentrl.plugins import load_plugins
from agentrl.rollout.message_session import UncountedChat
from agentrl.types import Message, Task
from parts.scripted import play

SOURCE = """
{%- if style is not defined %}{% set style = "plain" %}{% endif -%}
{%- if tools %}{{ '<|im_start|>system\\n' ~ (tools | tojson) ~ '<|im_end|>\\n' }}{% endif -%}
{%- for message in messages -%}
    {{- '<|im_start|>' ~ message.role ~ ('/' ~ (style | tojson) if message.role == 'user') ~ '\\n' ~ message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' ~ (call.function.arguments | tojson) ~ '}\\n</tool_call>' }}
    {%- endfor -%}
    {{- '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif -%}
{% endif -%}
"""  # noqa: E501
QUESTION = (Message("user", "?"),)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(SOURCE)
    return folder


@cache
def base(folder: Path) -> Chat:
    return Chat.load(str(folder))


def prompt_of(chat: Chat, messages=QUESTION) -> str:
    return chat.decode(chat.open(messages, []).next_prompt())


@pytest.mark.parametrize("own", [{}, {"style": "terse"}, {"style": ["a", 1]}, {"enable_thinking": False}])
def test_turns_are_encoded_one_by_one_as_the_whole_is(folder, own):
    """The check builds each generated conversation turn by turn and compares it with the whole render."""
    report = base(folder).with_template_kwargs(own).report_template(num=25)
    assert report.verdict == ("forks" if "enable_thinking" in own else "exact"), report.lines()


def test_a_rows_arguments_win_over_the_configs_and_the_others_stay(folder):
    model = ModelConfig(path=str(folder), chat_template_kwargs={"style": "a", "enable_thinking": False})
    chat = Chat.of(model)
    assert (
        prompt_of(chat) == '<|im_start|>user/"a"\n?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n'
    )
    row = chat.with_template_kwargs({"style": "b"})
    assert prompt_of(row) == prompt_of(chat).replace('"a"', '"b"')
    assert row is chat.with_template_kwargs({"style": "b"}), "rendering is set up once"
    assert chat.with_template_kwargs({}) is chat
    assert chat.template_kwargs == {"style": "a", "enable_thinking": False}


def test_what_an_attempt_shows_the_model_follows_its_row(folder):
    seen = []

    def say(turn: int, prompt: str) -> str:
        seen.append(prompt)
        return "#### 1"

    for own in ({}, {"enable_thinking": False, "style": "x"}):
        trajectory = play(
            say, agent=SingleTurnAgent, chat=base(folder), extra_info={"chat_template_kwargs": own}
        )
        assert trajectory.failure is None
        start = trajectory.token_ids[~trajectory.action_mask].tolist()
        assert base(folder).decode(start) == seen[-1] == prompt_of(base(folder).with_template_kwargs(own), [Message("user", "What is the answer?")])  # fmt: skip  # noqa: E501
    assert seen[0] != seen[1]


def test_the_prompt_is_measured_with_the_rows_arguments(folder):
    playable = Playable(AgentConfig(), load_plugins(), base(folder))
    lengths = []
    for own in ({}, {"enable_thinking": False}):
        task = Task("t", "s", QUESTION, "single_turn_agent", extra_info={"chat_template_kwargs": own})
        lengths.append(playable.num_prompt_tokens(task))
        assert lengths[-1] == len(base(folder).with_template_kwargs(own).open(QUESTION, []).next_prompt())
    assert lengths[0] < lengths[1]
    unknown = {"chat_template_kwargs": {"enable_thinkin": False}}
    task = Task("t", "s", QUESTION, "single_turn_agent", extra_info=unknown)
    with pytest.raises(ConfigError, match=r"^extra_info.chat_template_kwargs: .*'enable_thinkin'"):
        playable.check(task)


@pytest.mark.parametrize(
    ("own", "problem"),
    [
        ({"enable_thinkin": 1}, "'enable_thinkin'; did you mean 'enable_thinking'? it reads: enable"),
        ({"messages": []}, "'messages' is set by agentrl in each render"),
        ({"style": float("nan")}, "style=nan is no JSON value (float)"),
        ({"style": datetime.date(2026, 1, 1)}, "style=2026-01-01 is no JSON value (date)"),
        ({"style": {1: 2}}, "style={1: 2} is no JSON value (dict)"),
    ],
)  # fmt: skip
def test_an_argument_that_cannot_be_is_one_line(folder, own, problem):
    with pytest.raises(ConfigError) as caught:
        Chat.of(ModelConfig(path=str(folder), chat_template_kwargs=own))
    assert str(caught.value).startswith("model.chat_template_kwargs: ")
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_servers_of_messages_judge_the_names_themselves():
    chat = UncountedChat()
    assert chat.with_template_kwargs({"anything": 1}) is chat
    with pytest.raises(ConfigError, match="no JSON value"):
        chat.with_template_kwargs({"anything": {1}})
