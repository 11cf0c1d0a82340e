"""Templates without an end-of-turn token: a turn ends with the token that begins the next message, and the
block does not repeat it.
"""

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from agentrl.chat.chat import Chat, find_turn_ends
from agentrl.chat.conversation import Conversation
from agentrl.chat.probes import PROBE_TOOLS
from agentrl.chat.template import ChatTemplate
from agentrl.chat.tiny import build_tiny_tokenizer
from agentrl.errors import ConfigError
from agentrl.types import Message

SOURCE = (Path(__file__).parents[1] / "chat" / "templates" / "heads.jinja").read_text()
HEADS = ["<|user|>", "<|observation|>"]
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@cache
def tokenizer() -> Tokenizer:
    tokenizer = build_tiny_tokenizer()
    tokenizer.add_special_tokens([*HEADS, "<|assistant|>", "<|system|>"])
    return tokenizer


@cache
def chat(edits: str = "fork") -> Chat:
    template = ChatTemplate({"default": SOURCE}, {})
    ends = find_turn_ends(tokenizer(), template, [tokenizer().token_to_id("<|endoftext|>")])
    return Chat(tokenizer(), template, eos_token_ids=ends, tool_format="hermes", edits=edits)


def id_of(token: str) -> int:
    return tokenizer().token_to_id(token)


def after(text: str, stop: str | None, following: list[Message]) -> tuple[Conversation, list[int], list[int]]:
    """A conversation in which the model wrote `text` and `stop`; its tokens before the next block, and that
    block.
    """
    conversation = chat().open([Message("user", "a")], PROBE_TOOLS)
    conversation.next_prompt()
    sampled = [*chat().encode(text), *([id_of(stop)] if stop else [])]
    conversation.add_generation(sampled, is_truncated=stop is None)
    conversation.add_messages(following)
    before = list(conversation.token_ids)
    return conversation, before, conversation.next_prompt()


def test_the_tokens_that_begin_the_next_message_end_a_turn():
    assert chat().eos_token_ids == (*map(id_of, HEADS), id_of("<|endoftext|>"))


def test_a_token_that_begins_the_assistants_turn_too_ends_none():
    source = "{% for m in messages %}<|im_start|>{{ m.content }};{% endfor %}"
    template = ChatTemplate({"default": source + "{% if add_generation_prompt %}<|im_start|>{% endif %}"}, {})
    assert find_turn_ends(tokenizer(), template, [7]) == (7,)
    with pytest.raises(ConfigError, match=r"ends an assistant turn with .* has no eos_token_id"):
        find_turn_ends(tokenizer(), template, [])


def test_a_token_that_ends_the_users_message_ends_no_turn():
    source = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '<|im_end|>' if m.role != 'assistant' }}\n{% "
        "endfor %}"
    )
    assert find_turn_ends(tokenizer(), ChatTemplate({"default": source}, {}), [7]) == (7,)


RESULT = Message("tool", "noon", tool_call_id="call00000", name="now")


@pytest.mark.parametrize(
    ("text", "stop", "following"),
    [
        ("four", "<|user|>", Message("user", "b")),
        (CALL, "<|observation|>", RESULT),
        ("", "<|user|>", Message("user", "")),
    ],
)
def test_the_block_goes_on_behind_the_token_that_was_sampled(text, stop, following):
    conversation, before, block = after(text, stop, [following])
    assert conversation.num_forks == 0
    assert conversation.token_ids == before + block
    assert block[0] not in chat().eos_token_ids
    assert chat().decode(conversation.token_ids).count(stop) == 1 + (stop == "<|user|>")


@pytest.mark.parametrize(
    ("text", "following", "head"),
    [("fo", Message("user", "b"), "<|user|>"), (CALL, RESULT, "<|observation|>")],
)
def test_a_turn_that_was_cut_is_closed_with_the_token_of_what_follows(text, following, head):
    conversation, _, block = after(text, None, [following])
    assert (conversation.num_forks, block[0]) == (0, id_of(head))
    assert chat().decode(conversation.token_ids).count(head) == 1 + (head == "<|user|>")


@pytest.mark.parametrize(
    ("text", "stop", "following"),
    [
        ("four", "<|observation|>", [Message("user", "b")]),
        (CALL, "<|user|>", [RESULT]),
        ("four", "<|endoftext|>", [Message("user", "b")]),
    ],
)
def test_a_turn_that_ended_for_another_message_forks(text, stop, following):
    conversation, _, block = after(text, stop, following)
    assert (conversation.num_forks, conversation.last_edit) == (1, "ends an earlier turn with another token")
    shown = [chat()._renderer.shown(message) for message in conversation.messages]
    assert block == chat()._renderer.codec.encode_rendered(
        chat()._renderer.template.render(shown, PROBE_TOOLS, add_generation_prompt=True)
    )


@pytest.mark.parametrize(
    "following",
    [[], [Message("system", "x"), Message("user", "b")], [Message("assistant", "x"), Message("user", "b")]],
)
def test_a_message_that_begins_with_no_end_forks_and_stays_whole(following):
    conversation, _, block = after("four", "<|user|>", following)
    assert (conversation.num_forks, conversation.last_edit) == (
        1,
        "does not end an earlier turn with a stop token",
    )
    assert all(f"<|{message.role}|>\n{message.content}" in chat().decode(block) for message in following)


def test_the_template_is_exact_and_imitation_ends_each_turn_with_what_follows():
    assert chat("refuse").check_template(PROBE_TOOLS).verdict == "exact"
    call = chat()._renderer.view(CALL, turn=0, is_truncated=False, tools=PROBE_TOOLS)
    messages = [
        Message("user", "a"),
        call,
        RESULT,
        Message("assistant", "four"),
        Message("user", "b"),
        Message("assistant", "five"),
    ]
    replay = chat().render_training(messages, PROBE_TOOLS)
    said = [int(id) for id, is_said in zip(replay.token_ids, replay.mask, strict=True) if is_said]
    assert chat().decode(said) == f"{CALL}<|observation|>four<|user|>five<|user|>"
    text = chat().decode([int(id) for id in replay.token_ids])
    assert [text.count(head) for head in HEADS] == [3, 1]


@given(
    st.lists(
        st.tuples(st.sampled_from(["", "four", CALL]), st.sampled_from([*HEADS, "<|endoftext|>", None])),
        max_size=5,
    )
)
def test_every_row_is_what_was_sampled_and_what_the_template_shows(plan):
    conversation = chat().open([Message("user", "a")], PROBE_TOOLS)
    row: list[int] = []
    for text, stop in plan:
        forks = conversation.num_forks
        block = conversation.next_prompt()
        row = block if conversation.num_forks > forks else row + block
        sampled = [*chat().encode(text), *([id_of(stop)] if stop else [])]
        message = conversation.add_generation(sampled, is_truncated=stop is None)
        row = row + sampled
        assert conversation.token_ids == row
        results = [
            Message("tool", "noon", tool_call_id=call.id, name=call.name) for call in message.tool_calls
        ]
        conversation.add_messages(results or [Message("user", "b")])
    conversation.next_prompt()
    shown = [chat()._renderer.shown(message) for message in conversation.messages]
    whole = chat()._renderer.codec.encode_rendered(
        chat()._renderer.template.render(shown, PROBE_TOOLS, add_generation_prompt=True)
    )
    assert chat().decode(conversation.token_ids).split() == chat().decode(whole).split()
