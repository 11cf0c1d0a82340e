"""Tokens are the truth: what is built turn by turn equals the template's render of the whole, and only
grows.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agentrl.chat.chat import Chat
from agentrl.chat.codec import Codec
from agentrl.chat.tiny import SPECIAL_TOKENS, TEMPLATE_FILE, build_tiny_tokenizer
from agentrl.errors import ConfigError, DataError
from agentrl.types import Message, ToolCall
from parts.chats import template_chat

TEMPLATES = Path(__file__).parents[1] / "chat" / "templates"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Computes <b>sums</b> é.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]


@dataclass(frozen=True)
class Style:
    """A template, its tokenizer, and how a model writes calls under it."""

    source: str
    tokenizer: Callable[[], Tokenizer]
    named: dict[str, str]
    write_calls: Callable[[str, tuple[ToolCall, ...]], str]
    end_of_turn: str
    tool_format: str = "hermes"


def spaced_tokenizer() -> Tokenizer:
    """One token per character, spaces as marks that also open a text: the way of sentencepiece tokenizers."""
    letters = [chr(i) for i in range(33, 127)] + ["▁", "\n", "<unk>", *(f"<0x{i:02X}>" for i in range(256))]
    vocab = {letter: id for id, letter in enumerate(letters)}
    merges = [("▁", letter) for letter in "abcdefgh"]
    vocab.update({f"▁{letter}": len(letters) + i for i, (_, letter) in enumerate(merges)})
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<s>", "</s>", "[INST]", "[/INST]"])
    brackets = [
        "[TOOL_CALLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
    ]
    tokenizer.add_special_tokens(brackets)
    return tokenizer


def headers_tokenizer() -> Tokenizer:
    tokenizer = build_tiny_tokenizer()
    tokenizer.add_special_tokens(["<|begin|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"])
    return tokenizer


def thinking_tokenizer() -> Tokenizer:
    tokenizer = build_tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    return tokenizer


def hermes_lines(text: str, calls: tuple[ToolCall, ...]) -> str:
    parts = [
        f'<tool_call>\n{{"name": "{c.name}", "arguments": '
        f"{json.dumps(c.arguments, ensure_ascii=False)}}}\n</tool_call>"
        for c in calls
    ]
    return "\n".join([*([text] if text else []), *parts])


def tiny_calls(text: str, calls: tuple[ToolCall, ...]) -> str:
    bodies = [json.dumps({"name": c.name, "arguments": c.arguments}, ensure_ascii=False) for c in calls]
    return text + "".join(f"<tool_call>{body}</tool_call>" for body in bodies)


def header_calls(text: str, calls: tuple[ToolCall, ...]) -> str:
    bodies = [
        f'{{"name": "{c.name}", "parameters": {json.dumps(c.arguments, ensure_ascii=False)}}}' for c in calls
    ]
    return "; ".join(bodies) if calls else text


def bracket_calls(text: str, calls: tuple[ToolCall, ...]) -> str:
    bodies = [
        json.dumps({"name": c.name, "arguments": c.arguments, "id": c.id}, ensure_ascii=False) for c in calls
    ]
    return f"[TOOL_CALLS] [{', '.join(bodies)}]" if calls else f" {text}"


def read(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


STYLES = {
    "tiny": Style(TEMPLATE_FILE.read_text(), build_tiny_tokenizer, {}, tiny_calls, "<|im_end|>"),
    "blocks": Style(read("blocks"), build_tiny_tokenizer, {}, hermes_lines, "<|im_end|>"),
    "thinking": Style(read("thinking"), thinking_tokenizer, {}, hermes_lines, "<|im_end|>"),
    "headers": Style(
        read("headers"),
        headers_tokenizer,
        {"bos_token": "<|begin|>"},
        header_calls,
        "<|eot_id|>",
        "llama3_json",
    ),
    "brackets": Style(
        read("brackets"),
        spaced_tokenizer,
        {"bos_token": "<s>", "eos_token": "</s>"},
        bracket_calls,
        "</s>",
        "mistral",
    ),
}


@cache
def chat_of(name: str) -> Chat:
    style = STYLES[name]
    return template_chat(
        style.tokenizer(),
        style.source,
        end=style.end_of_turn,
        named=style.named,
        tool_format=style.tool_format,
    )


@cache
def reference(name: str) -> PreTrainedTokenizerFast:
    style = STYLES[name]
    return PreTrainedTokenizerFast(
        tokenizer_object=style.tokenizer(), chat_template=style.source, **style.named
    )


def as_dicts(messages: list[Message]) -> list[dict]:
    return [as_dict(message) for message in messages]


def as_dict(message: Message) -> dict:
    calls = [
        {"type": "function", "id": c.id, "function": {"name": c.name, "arguments": dict(c.arguments)}}
        for c in message.tool_calls
    ]
    optional = {"tool_calls": calls or None, "name": message.name, "tool_call_id": message.tool_call_id}
    return {
        "role": message.role,
        "content": message.content,
        **{key: value for key, value in optional.items() if value is not None},
    }


# ------------------------------------------------------------------------------------------------- generators

letters = st.characters(codec="utf-8", exclude_characters="<>[]|\ufdd0\ufdd1\ufdd2\ufdd3")
contents = st.text(letters, max_size=12)
answers = st.text(letters, min_size=1, max_size=12).map(lambda text: "a" + text + "z")
arguments = st.dictionaries(
    st.sampled_from(["expression", "unit", "ä"]),
    st.one_of(contents, st.integers(), st.booleans()),
    max_size=2,
)


@st.composite
def conversations(draw, *, has_user_turns: bool = True, has_system: bool = True) -> list[Message]:
    """A prompt, then up to four assistant turns, each followed by its tool results or by a user."""
    messages = [Message("system", draw(contents))] if has_system and draw(st.booleans()) else []
    messages.append(Message("user", draw(contents)))
    for turn in range(draw(st.integers(0, 4))):
        num_calls = draw(st.integers(0 if has_user_turns else 1, 3))
        calls = tuple(
            ToolCall(f"call{turn:03d}{i:02d}", "calculator", draw(arguments)) for i in range(num_calls)
        )
        messages.append(Message("assistant", "" if calls else draw(answers), calls))
        messages += [Message("tool", draw(contents), tool_call_id=call.id, name=call.name) for call in calls]
        if not calls:
            messages.append(Message("user", draw(contents)))
    return messages


def build(name: str, messages: list[Message]) -> list[int]:
    """Play `messages` through a Conversation, the assistant's turns written as a model would, and return its
    tokens.
    """
    chat, style = chat_of(name), STYLES[name]
    first = next((i for i, message in enumerate(messages) if message.role == "assistant"), len(messages))
    conversation = chat.open(messages[:first], TOOLS)
    conversation.next_prompt()
    for message in messages[first:]:
        if message.role == "assistant":
            conversation.next_prompt()
            written = style.write_calls(message.content, message.tool_calls)
            anchored = chat.encode(style.end_of_turn + written)[
                1:
            ]  # spaces at the start of a text are marked by some tokenizers
            conversation.add_generation([*anchored, chat.eos_token_ids[0]], is_truncated=False)
        else:
            conversation.add_messages([message])
    conversation.next_prompt()
    return conversation.token_ids


# ------------------------------------------------------------------------------------------------------- laws


@pytest.mark.parametrize("name", STYLES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_tokens_built_by_turns_equal_the_render_of_the_whole(name, data):
    has_system = name != "brackets"  # that template knows no system role
    messages = data.draw(conversations(has_system=has_system))
    hf = reference(name)
    text = hf.apply_chat_template(as_dicts(messages), tools=TOOLS, add_generation_prompt=True, tokenize=False)
    assert build(name, messages) == hf.encode(text, add_special_tokens=False)


@settings(max_examples=60, deadline=None)
@given(
    ids=st.lists(st.lists(st.integers(0, 366), max_size=8), min_size=1, max_size=4),
    texts=st.lists(contents, min_size=4, max_size=4),
)
def test_whatever_is_sampled_stays_byte_for_byte_and_the_tokens_only_grow(ids, texts):
    conversation = chat_of("tiny").open([Message("user", "q")], TOOLS)
    expected: list[int] = []
    for sampled, text in zip(ids, texts, strict=False):
        announced = conversation.num_pending_tokens()
        block = conversation.next_prompt()
        assert announced == len(block)
        assert conversation.num_pending_tokens() == 0
        assert conversation.next_prompt() == []
        expected += block
        conversation.add_generation(sampled, is_truncated=False)
        expected += sampled
        assert conversation.token_ids == expected
        conversation.add_messages([Message("user", text)])


@pytest.mark.parametrize("name", STYLES)
def test_a_block_does_not_depend_on_what_was_sampled(name):
    chat = chat_of(name)
    blocks = []
    for words in ("Done.", "{{ no }}", "", "four"):
        conversation = chat.open([Message("user", "q")], TOOLS)
        conversation.next_prompt()
        conversation.add_generation([*chat.encode(words), chat.eos_token_ids[0]], is_truncated=False)
        conversation.add_messages([Message("user", "Really?")])
        blocks.append(conversation.next_prompt())
    assert all(block == blocks[0] for block in blocks)


def test_the_separator_after_the_end_of_a_turn_belongs_to_the_next_block():
    chat = chat_of("tiny")
    conversation = chat.open([Message("user", "1+1=?")], [])
    assert (
        chat.decode(conversation.next_prompt())
        == "<|im_start|>user\n1+1=?<|im_end|>\n<|im_start|>assistant\n"
    )
    conversation.add_generation(chat.encode("3<|im_end|>"), is_truncated=False)
    conversation.add_messages([Message("user", "No.")])
    assert (
        chat.decode(conversation.next_prompt())
        == "\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("sampled", ["3", ""])
def test_a_turn_cut_at_the_token_limit_is_closed_first(sampled):
    chat = chat_of("tiny")
    conversation = chat.open([Message("user", "1+1=?")], [])
    conversation.next_prompt()
    conversation.add_generation(chat.encode(sampled), is_truncated=True)
    conversation.add_messages([Message("user", "No.")])
    assert (
        chat.decode(conversation.next_prompt())
        == "<|im_end|>\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_model_may_speak_twice_in_a_row():
    chat = chat_of("tiny")
    conversation = chat.open([Message("user", "?")], [])
    conversation.next_prompt()
    conversation.add_generation(chat.encode("a<|im_end|>"), is_truncated=False)
    assert chat.decode(conversation.next_prompt()) == "\n<|im_start|>assistant\n"


def test_the_view_of_a_turn_has_text_calls_and_no_special_tokens():
    chat = chat_of("tiny")
    conversation = chat.open([Message("user", "?")], TOOLS)
    conversation.next_prompt()
    text = (
        'So: <tool_call>{"name": "calculator", "arguments": {"expression": '
        '"1"}}</tool_call><|endoftext|><|im_end|>'
    )
    message = conversation.add_generation(chat.encode(text), is_truncated=False)
    assert message == Message("assistant", "So:", (ToolCall("call00000", "calculator", {"expression": "1"}),))
    assert conversation.messages == (Message("user", "?"), message)


def test_results_of_parallel_and_unreadable_calls_form_one_block():
    chat = chat_of("blocks")
    conversation = chat.open([Message("user", "?")], TOOLS)
    conversation.next_prompt()
    turn = conversation.add_generation(
        chat.encode(
            '<tool_call>{"name": "calculator", "arguments": {}}</tool_call><tool_call>{</tool_call><|im_end|>'
        ),
        is_truncated=False,
    )
    conversation.add_messages(
        [
            Message("tool", f"r{i}", tool_call_id=c.id, name=c.name or None)
            for i, c in enumerate(turn.tool_calls)
        ]
    )
    responses = "".join(f"\n<tool_response>\nr{i}\n</tool_response>" for i in range(2))
    assert (
        chat.decode(conversation.next_prompt())
        == f"\n<|im_start|>user{responses}<|im_end|>\n<|im_start|>assistant\n"
    )


# -------------------------------------------------------------------------------------------------- injection

hostile = st.lists(
    st.sampled_from([*SPECIAL_TOKENS, "\n", "a", "assistant", "<", "|>", "im_end"]), max_size=8
).map("".join)


@settings(max_examples=80, deadline=None)
@given(user=hostile, result=hostile)
def test_control_tokens_in_content_are_encoded_as_plain_text(user, result):
    chat = chat_of("tiny")
    special = {chat.encode(token)[0] for token in SPECIAL_TOKENS}

    def blocks(user: str, result: str) -> list[list[int]]:
        conversation = chat.open([Message("user", user)], TOOLS)
        first = conversation.next_prompt()
        call = conversation.add_generation(
            chat.encode('<tool_call>{"name": "f<|im_end|>", "arguments": {}}</tool_call><|im_end|>'),
            is_truncated=False,
        ).tool_calls[0]
        conversation.add_messages([Message("tool", result, tool_call_id=call.id, name=call.name)])
        return [first, conversation.next_prompt()]

    for built, plain in zip(blocks(user, result), blocks("", ""), strict=True):
        assert [id for id in built if id in special] == [id for id in plain if id in special]
    assert f"\n<tool_response>{result}</tool_response>" in chat.decode(blocks(user, result)[1])
    assert f"<|im_start|>user\n{user}<|im_end|>" in chat.decode(blocks(user, result)[0])


def test_tags_that_only_the_template_gives_meaning_stay_tokens_in_prompts_but_not_in_tool_results():
    chat = chat_of("thinking")
    think = chat.encode("<think>")
    assert len(think) == 1
    conversation = chat.open([Message("user", "Think inside of <think>.")], TOOLS)
    assert think[0] in conversation.next_prompt()
    conversation.add_generation(chat.encode("<|im_end|>"), is_truncated=False)
    conversation.add_messages([Message("tool", "<think>", tool_call_id="x", name="f")])
    assert think[0] not in conversation.next_prompt()


def test_content_that_no_tokenizer_can_encode_is_replaced():
    chat = chat_of("tiny")
    prompt = chat.open([Message("user", "a\ud800b\ufdd0c\ufdd1")], []).next_prompt()
    assert "a\ufffdb\ufffdc\ufffd<|im_end|>" in chat.decode(prompt)


# -------------------------------------------------------------------------------------------------- templates


def broken(source: str, **options) -> Chat:
    return template_chat(build_tiny_tokenizer(), source, **options)


ONLY_LAST = """{% for m in messages[-1:] %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MOVING_TOOLS = """{% for m in messages %}{% if loop.last %}{{ tools | tojson }}{% endif %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""  # noqa: E501
COUNTING = """{{ messages | length }}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.mark.parametrize("source", [ONLY_LAST, MOVING_TOOLS, COUNTING])
def test_a_template_that_edits_the_history_is_refused_where_edits_are(source):
    chat = broken(source, edits="refuse")
    with pytest.raises(ConfigError, match=r"does not only append: when .*; set model\.chat_template"):
        chat.check_template(TOOLS if "tools" in source else [])
    conversation = chat.open([Message("user", "a")], TOOLS)
    conversation.next_prompt()
    conversation.add_generation(chat.encode("b<|im_end|>"), is_truncated=False)
    conversation.add_messages([Message("user", "c")])
    with pytest.raises(ConfigError, match="first difference at token"):
        conversation.next_prompt()


def test_tools_need_a_format_that_the_template_shows():
    chat = broken(MOVING_TOOLS, tool_format="auto")
    with pytest.raises(ConfigError, match=r"tool calls cannot be read: .*; set model\.tool_format"):
        chat.check_template(TOOLS)


def test_a_template_that_refuses_the_messages_says_which():
    chat = chat_of("brackets")
    with pytest.raises(ConfigError, match=r"\[user user\].*must alternate"):
        chat.open([Message("user", "a"), Message("user", "b")], []).next_prompt()


# --------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("name", ["tiny", "blocks", "headers", "brackets"])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_training_tokens_are_the_render_and_the_mask_is_what_the_assistant_writes(name, data):
    chat, style = chat_of(name), STYLES[name]
    messages = [
        *data.draw(conversations(has_system=name != "brackets")),
        Message("assistant", data.draw(answers)),
    ]
    built = chat.render_training(messages, TOOLS)
    ids, mask = built.token_ids, built.mask
    assert built.segment_starts == (0,)
    hf = reference(name)
    whole = hf.encode(
        hf.apply_chat_template(as_dicts(messages), tools=TOOLS, tokenize=False), add_special_tokens=False
    )
    assert whole[: len(ids)] == ids.tolist()
    assert chat.decode(whole[len(ids) :]) in ("", "\n")
    spans = [
        style.write_calls(m.content, m.tool_calls) + style.end_of_turn
        for m in messages
        if m.role == "assistant"
    ]
    expected = [token for span in spans for token in chat.encode(style.end_of_turn + span)[1:]]
    assert ids[mask].tolist() == expected


def test_training_keeps_the_thinking_that_the_model_has_to_write():
    chat = chat_of("thinking")
    thought = "<think>\nhm\n</think>\n\nfour"
    built = chat.render_training(
        [
            Message("user", "?"),
            Message("assistant", thought),
            Message("user", "."),
            Message("assistant", thought),
        ],
        [],
    )
    assert chat.decode(built.token_ids[built.mask].tolist()) == f"{thought}<|im_end|>{thought}<|im_end|>"
    rows = np.split(built.token_ids, built.segment_starts[1:])
    assert ["<think>" in chat.decode(row.tolist()) for row in rows] == [True, True]
    assert chat.decode(rows[1].tolist()).count("<think>") == 1


def test_training_survives_a_stop_token_in_the_text_and_refuses_conversations_without_an_assistant():
    chat = chat_of("tiny")
    call = ToolCall("call00000", "f", {"x": ["<|im_end|>"]})
    built = chat.render_training([Message("user", "?"), Message("assistant", "a <|im_end|> b", (call,))], [])
    written = built.token_ids[built.mask].tolist()
    assert (
        chat.decode(written)
        == 'a <|im_end|> b<tool_call>{"name": "f", "arguments": {"x": ["<|im_end|>"]}}</tool_call><|im_end|>'
    )
    assert written.count(chat.eos_token_ids[0]) == 1
    with pytest.raises(DataError, match="no assistant message"):
        chat.render_training([Message("user", "?")], [])


# ------------------------------------------------------------------------------------------------- truncation


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(letters, max_size=60),
    limit=st.integers(76, 120),
    how=st.sampled_from(["left", "right", "middle"]),
)
def test_a_truncated_prompt_fits_and_keeps_its_frame(text, limit, how):
    chat = chat_of("tiny")
    conversation = chat.open([Message("system", "Rules."), Message("user", text)], TOOLS)
    before = conversation.num_pending_tokens()
    assert conversation.truncate_prompt(limit, how) == (before > limit)
    assert conversation.num_pending_tokens() <= limit
    kept = conversation.messages[1].content
    assert {"left": text.endswith(kept), "right": text.startswith(kept), "middle": len(kept) <= len(text)}[
        how
    ]
    decoded = chat.decode(conversation.next_prompt())
    assert decoded.startswith("<|im_start|>system\nRules.\nTools:")
    assert decoded.endswith(f"<|im_start|>user\n{kept}<|im_end|>\n<|im_start|>assistant\n")


def test_truncation_drops_no_more_than_needed_and_says_when_the_frame_is_too_long():
    chat = chat_of("tiny")
    conversation = chat.open([Message("user", "0123456789")], [])
    frame = conversation.num_pending_tokens() - 10
    assert conversation.truncate_prompt(frame + 4, "middle")
    assert conversation.messages[0].content == "0189"
    with pytest.raises(DataError, match="even without its user messages"):
        conversation.truncate_prompt(frame - 1, "left")


def test_truncation_drops_a_character_even_for_a_token_that_spans_none(monkeypatch):
    chat = chat_of("tiny")
    spans = [
        (0, 0),
        *((place, place + 1) for place in range(10)),
    ]  # as of a tokenizer that puts a mark before
    monkeypatch.setattr(Codec, "token_spans", lambda _, text: spans[: len(text) + 1])
    conversation = chat.open([Message("user", "0123456789")], [])
    assert conversation.truncate_prompt(conversation.num_pending_tokens() - 1, "left")
    assert conversation.messages[0].content == "123456789"
