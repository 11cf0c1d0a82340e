"""Where a template edits the history, the conversation forks: what was sampled stays in its row, and the next
one is the render.
"""

import dataclasses
import json
import re
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from agentrl.chat.chat import Chat
from agentrl.chat.conversation import Conversation
from agentrl.chat.equality import is_same_json
from agentrl.chat.tiny import build_tiny_tokenizer
from agentrl.errors import ConfigError
from agentrl.types import Message, ToolCall
from parts.chats import template_chat

TEMPLATES = Path(__file__).parents[1] / "chat" / "templates"
FUNCTION = {
    "name": "calculator",
    "description": "Sums.",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1"}}\n</tool_call>'
THOUGHT = "<think>\nhm\n</think>\n\n"


def tokenizer_with_thoughts() -> Tokenizer:
    tokenizer = build_tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    return tokenizer


@cache
def chat_with(source: str, **options) -> Chat:
    return template_chat(tokenizer_with_thoughts(), source, **options)


def thinking(**options) -> Chat:
    return chat_with((TEMPLATES / "thinking.jinja").read_text(), **options)


def say(chat: Chat, conversation: Conversation, text: str) -> Message:
    conversation.next_prompt()
    return conversation.add_generation([*chat.encode(text), chat.eos_token_ids[0]], is_truncated=False)


def answer(message: Message, text: str = "1") -> list[Message]:
    return [Message("tool", text, tool_call_id=call.id, name=call.name) for call in message.tool_calls]


# ------------------------------------------------------------------------------------------------------ forks


def test_a_fork_begins_with_the_render_of_the_messages_and_drops_what_the_template_drops():
    chat = thinking()
    conversation = chat.open([Message("user", "a")], [])
    say(chat, conversation, THOUGHT + "four")
    before = list(conversation.token_ids)
    conversation.add_messages([Message("user", "b")])
    announced, total = conversation.num_pending_tokens(), conversation.num_next_tokens()
    block = conversation.next_prompt()
    assert conversation.num_forks == 1
    assert conversation.last_edit == "drops thinking"
    assert len(block) == announced == total == len(conversation.token_ids)
    assert conversation.token_ids == block
    assert "<think>" in chat.decode(before)
    expected = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nfour<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"  # noqa: E501
    assert chat.decode(block) == expected


def test_thinking_between_tool_calls_stays_and_only_a_user_who_speaks_forks():
    chat = thinking()
    conversation = chat.open([Message("user", "a")], TOOLS)
    for _ in range(3):
        conversation.add_messages(answer(say(chat, conversation, THOUGHT + CALL)))
    say(chat, conversation, THOUGHT + "done")
    assert conversation.num_forks == 0
    assert chat.decode(conversation.token_ids).count("<think>") == 4
    conversation.add_messages([Message("user", "b")])
    conversation.next_prompt()
    assert conversation.num_forks == 1
    assert chat.decode(conversation.token_ids).count("<think>") == 0
    assert chat.decode(conversation.token_ids).count("<tool_call>\n") == 3


def test_the_row_after_a_fork_grows_on():
    chat = thinking()
    conversation = chat.open([Message("user", "a")], [])
    say(chat, conversation, THOUGHT + "one")
    conversation.add_messages([Message("user", "b")])
    forked = conversation.next_prompt()
    say(chat, conversation, "two")
    conversation.add_messages([Message("user", "c")])
    conversation.next_prompt()
    assert conversation.num_forks == 1  # a turn without thoughts is shown as it is
    assert conversation.token_ids[: len(forked)] == forked


@pytest.mark.parametrize("turn", [THOUGHT + "four", "<think>\n\n</think>\n\nfour", "<think></think>four"])
def test_dropped_thoughts_fork_even_when_they_are_empty(turn):
    chat = thinking()
    conversation = chat.open([Message("user", "a")], [])
    say(chat, conversation, turn)
    conversation.add_messages([Message("user", "b")])
    conversation.next_prompt()
    assert conversation.num_forks == 1


SPELLINGS = [
    '{"name": "calculator", "arguments": {"expression": "1", "unit": "é"}}',
    '{"arguments":{"unit":"\\u00e9","expression":"1"},"name":"calculator"}',
    '{ "name" : "calculator" ,\n"arguments" : { "expression" : "1", "unit": "é" } }',
    '{"name": "calculator", "arguments": "{\\"expression\\": \\"1\\", \\"unit\\": \\"é\\"}"}',
]


@pytest.mark.parametrize("name", ["blocks", "thinking"])
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("frame", ["{}", "<tool_call>{}</tool_call>\n", "\n<tool_call>  {}\n\n</tool_call>"])
def test_how_a_model_spells_a_call_is_no_edit(name, spelling, frame):
    chat = chat_with((TEMPLATES / f"{name}.jinja").read_text())
    conversation = chat.open([Message("user", "a")], TOOLS)
    message = say(chat, conversation, frame.replace("{}", spelling))
    conversation.add_messages([*answer(message), *([] if message.tool_calls else [Message("user", "b")])])
    before = list(conversation.token_ids)
    conversation.next_prompt()
    assert conversation.num_forks == 0
    assert conversation.token_ids[: len(before)] == before


SINGLE_CALL = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.tool_calls %}<tool_call>{{ m.tool_calls[0].function | tojson }}</tool_call>{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""  # noqa: E501
OTHER_END = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{{ '<|im_end|>' if loop.last or m.role == 'user' else ';' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""  # noqa: E501


@pytest.mark.parametrize(
    ("source", "turn", "edit"),
    [
        (SINGLE_CALL, CALL, None),
        (SINGLE_CALL, CALL + CALL, "leaves out calls"),
        (SINGLE_CALL, "I compute. " + CALL, "leaves out what the assistant said"),
        (SINGLE_CALL, "four", None),
    ],
)
def test_what_a_template_leaves_out_of_a_turn_forks(source, turn, edit):
    chat = chat_with(source)
    conversation = chat.open([Message("user", "a")], TOOLS)
    message = say(chat, conversation, turn)
    conversation.add_messages(answer(message) or [Message("user", "b")])
    conversation.next_prompt()
    assert (conversation.num_forks, conversation.last_edit) == (int(edit is not None), edit)


def test_a_turn_that_becomes_history_with_another_end_forks():
    chat = chat_with(OTHER_END)
    conversation = chat.open([Message("user", "a")], [])
    say(chat, conversation, "four")
    conversation.add_messages([Message("user", "b")])
    conversation.next_prompt()
    assert conversation.last_edit == "does not end an earlier turn with a stop token"


NO_END = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{{ '' if m.role == 'assistant' else '<|im_end|>' }}
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CALLS_WITHOUT_END = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}
{{- '' if m.tool_calls else '<|im_end|>' }}
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.mark.parametrize(
    "following", [[Message("user", "b")], [Message("user", "b"), Message("user", "c")], []]
)
def test_a_template_that_shows_no_end_of_turns_forks_whoever_goes_on(following):
    """Also where the messages that follow end with the stop token: it is not taken for the turn's."""
    chat = chat_with(NO_END)
    conversation = chat.open([Message("user", "a")], [])
    say(chat, conversation, "four")
    conversation.add_messages(following)
    block = conversation.next_prompt()
    assert (conversation.num_forks, conversation.last_edit) == (
        1,
        "does not end an earlier turn with a stop token",
    )
    rest = "".join(f"<|im_start|>user\n{message.content}<|im_end|>\n" for message in following)
    assert (
        chat.decode(block)
        == f"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nfour\n{rest}<|im_start|>assistant\n"
    )


def test_turns_without_an_end_are_imitated_with_one_and_judged_as_forks():
    chat = chat_with(NO_END)
    messages = [
        Message("user", "a"),
        Message("assistant", "four"),
        Message("user", "b"),
        Message("assistant", "five"),
    ]
    replay = chat.render_training(messages, [])
    said = [int(id) for id, is_said in zip(replay.token_ids, replay.mask, strict=True) if is_said]
    assert chat.decode(said) == "four\n<|im_end|>five\n<|im_end|>"
    assert len(replay.segment_starts) == 2
    report = chat.report_template((), num=60)
    assert report.verdict == "forks"
    assert {f.sentence for f, _ in report.findings} == {
        "when a user speaks again: does not end an earlier turn with a stop token"
    }
    with pytest.raises(ConfigError, match=r"does not end an earlier turn.*or model\.template_edits=fork"):
        chat_with(NO_END, edits="refuse").check_template([])


def test_only_the_turns_without_an_end_fork():
    chat = chat_with(CALLS_WITHOUT_END)
    conversation = chat.open([Message("user", "a")], TOOLS)
    say(chat, conversation, "four")
    conversation.add_messages([Message("user", "b")])
    conversation.add_messages(answer(say(chat, conversation, CALL)))
    assert conversation.num_forks == 0
    conversation.next_prompt()
    assert conversation.last_edit == "does not end an earlier turn with a stop token"


def test_edits_can_be_refused():
    chat = thinking(edits="refuse")
    with pytest.raises(
        ConfigError,
        match=r"when a user speaks again: drops .*thinking; set model\.chat_template .* or "
        r"model\.template_edits=fork",
    ):
        chat.check_template([])
    chat.check_template([], has_user_turns=False)
    conversation = chat.open([Message("user", "a")], [])
    say(chat, conversation, THOUGHT + "four")
    conversation.add_messages([Message("user", "b")])
    with pytest.raises(ConfigError) as caught:
        conversation.next_prompt()
    lines = str(caught.value).splitlines()
    assert "'<think>'" in lines[2]
    assert "'<think>'" not in lines[3]


turns = st.tuples(
    st.booleans(), st.sampled_from(["", "four", "naïve 日本"]), st.integers(0, 2), st.booleans()
)


@given(st.lists(turns, min_size=1, max_size=5), st.data())
def test_every_row_keeps_what_was_sampled_and_begins_with_the_render(plan, data):
    """Any tokens may be sampled: rows only grow, and the first block of each is the template's render of the
    messages.
    """
    chat = thinking()
    conversation = chat.open([Message("user", "a")], TOOLS)
    rows: list[list[int]] = [[]]
    for thinks, text, num_calls, is_garbage in plan:
        forks = conversation.num_forks
        shown = [chat._renderer.shown(message) for message in conversation.messages]
        block = conversation.next_prompt()
        if conversation.num_forks > forks:
            rows.append([])
            render = chat._renderer.template.render(shown, TOOLS, add_generation_prompt=True)
            assert block == chat._renderer.codec.encode_rendered(render)
        rows[-1] += block
        sampled = (
            data.draw(st.lists(st.integers(0, 300), max_size=8))
            if is_garbage
            else chat.encode(THOUGHT * thinks + text + CALL * num_calls)
        )
        message = conversation.add_generation([*sampled, chat.eos_token_ids[0]], is_truncated=False)
        rows[-1] += [*sampled, chat.eos_token_ids[0]]
        assert conversation.token_ids == rows[-1]
        conversation.add_messages(answer(message) or [Message("user", "b")])
    assert len(rows) == conversation.num_forks + 1


# ---------------------------------------------------------------------------------------------------- extends

# So few leaves and keys that two values are often the same, or the same but for one leaf.
json_values = st.recursive(
    st.sampled_from([None, True, False, 0, 1, 0.0, -0.0, 1.0, 0.5, "", "1", "a"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=4,
)


def canonical(value):
    """The text that a value shares with all that JSON holds for the same."""
    return re.sub(
        r"-0\.0\b", "0.0", json.dumps(json.loads(json.dumps(value), parse_int=float), sort_keys=True)
    )


def rewritten(value):
    """The same value in other words."""
    if isinstance(value, dict):
        return {key: rewritten(inner) for key, inner in reversed(value.items())}
    if isinstance(value, list):
        return tuple(map(rewritten, value))
    return float(value) if type(value) is int else value


@settings(max_examples=500)
@given(json_values, json_values)
def test_json_values_are_compared_as_json(left, right):
    assert is_same_json(left, right) == (canonical(left) == canonical(right))


@given(json_values)
def test_a_json_value_in_other_words_is_the_same(value):
    assert is_same_json(value, value)
    assert is_same_json(value, rewritten(value))
    assert not is_same_json(value, [value])


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (1, True),
        (0.0, False),
        (None, 0),
        ("1", 1),
        ([1, 2], [2, 1]),
        ([1], [1, 1]),
        ({"a": 1}, {"b": 1}),
        ({}, []),
    ],
)
def test_other_json_values_are_others(left, right):
    assert not is_same_json(left, right)
    assert not is_same_json(right, left)


def test_a_list_of_messages_that_goes_on_extends_the_conversation():
    chat = thinking()
    conversation = chat.open([Message("user", "a")], TOOLS)
    said = say(chat, conversation, THOUGHT + "So: " + CALL)
    sent_back = dataclasses.replace(said, content=f" {said.content}\n", reasoning="")
    sent_back = dataclasses.replace(
        sent_back, tool_calls=(dataclasses.replace(said.tool_calls[0], arguments={"expression": "1"}),)
    )
    result = answer(said)
    assert conversation.extends([Message("user", "a"), sent_back, *result]) == result
    assert conversation.extends([Message("user", "a"), sent_back]) == []
    assert conversation.extends([Message("user", "a")]) is None
    assert conversation.extends([Message("user", "A"), sent_back, *result]) is None


@pytest.mark.parametrize(
    "change",
    [
        {"content": "other"},
        {"role": "user"},
        {"tool_calls": ()},
        {"tool_calls": (ToolCall("call00000", "calculator", {"expression": "2"}),)},
        {"tool_calls": (ToolCall("call00000", "other", {"expression": "1"}),)},
        {"tool_calls": (ToolCall("other", "calculator", {"expression": "1"}),)},
        {"reasoning": "other"},
    ],
)
def test_an_edited_message_does_not(change):
    chat = thinking()
    conversation = chat.open([Message("user", "a")], TOOLS)
    said = say(chat, conversation, THOUGHT + "So: " + CALL)
    assert conversation.extends([Message("user", "a"), said]) == []
    assert conversation.extends([Message("user", "a"), dataclasses.replace(said, **change)]) is None
