"""Conversations with images: placeholders are tokens of the context, and what is sampled stays as it is."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.chat.chat import Chat
from agentrl.errors import ConfigError, DataError
from agentrl.types import Message
from parts.scripted import tiny_chat
from parts.vision import stored, write_seeing_model

SIZES = [(56, 84), (30, 30), (90, 28)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_seeing_model(tmp_path_factory.mktemp("model") / "seeing")


@pytest.fixture(scope="module")
def chat(folder):
    return Chat.load(str(folder))


@pytest.fixture(scope="module")
def refs(tmp_path_factory):
    return stored(tmp_path_factory.mktemp("images"), *SIZES)


def shown(refs, text, *, role="user", **more):
    return Message(role, text, images=tuple(refs), **more)


def placeholders_of(conversation):
    return [
        (image.image, conversation.token_ids[image.position : image.position + image.num_tokens])
        for image in conversation.images
    ]


def check_places(chat, conversation, refs):
    """Check that the images are `refs`, in order, each at a run of placeholders of its own."""
    assert [image.image for image in conversation.images] == list(refs)
    for image in conversation.images:
        ids = conversation.token_ids
        assert set(ids[image.position : image.position + image.num_tokens]) == {chat.images.placeholder}
        assert (image.rows, image.columns) == chat.images.layout.grid(image.image.width, image.image.height)
        assert chat.decode([ids[image.position - 1]]) == "<|vision_start|>"
        assert chat.decode([ids[image.position + image.num_tokens]]) == "<|vision_end|>"


TEXTS = st.text(st.characters(codec="utf-8"), max_size=6) | st.sampled_from(
    ["<|image_pad|>", "<|im_end|>", "<|vision_start|><|image_pad|><|vision_end|>", "<ima", "ge>"]
)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=3), TEXTS), min_size=1, max_size=4),
    st.data(),
)
def test_tokens_only_grow_and_images_are_where_the_messages_show_them(chat, refs, turns, data):
    placeholder = chat.images.placeholder
    sampled = st.lists(st.integers(0, 250) | st.just(placeholder), min_size=1, max_size=5)
    conversation, seen = None, []
    for images, text in turns:
        text = text.replace("<image>", "")
        message = shown([refs[i] for i in images], "<image>".join([text] * (len(images) + 1)))
        if conversation is None:
            conversation = chat.open([message], [])
        else:
            conversation.add_messages([message])
        before, placed = list(conversation.token_ids), list(conversation.images)
        num_next = conversation.num_next_tokens()
        conversation.next_prompt()
        seen += message.images
        assert conversation.num_forks == 0
        assert conversation.token_ids[: len(before)] == before
        assert conversation.images[: len(placed)] == placed
        assert len(conversation.token_ids) == num_next
        check_places(chat, conversation, seen)
        own = sum(image.num_tokens for image in conversation.images)
        assert conversation.token_ids.count(placeholder) == own + before_sampled(conversation, placeholder)
        turn = [*data.draw(sampled), chat.eos_token_ids[0]]
        conversation.add_generation(turn, is_truncated=False)
        assert conversation.token_ids[-len(turn) :] == turn


def before_sampled(conversation, placeholder):
    """Return how many placeholders the model sampled."""
    at_images = {
        position
        for image in conversation.images
        for position in range(image.position, image.position + image.num_tokens)
    }
    return sum(
        token == placeholder and position not in at_images
        for position, token in enumerate(conversation.token_ids)
    )


def test_the_text_of_a_placeholder_is_no_image(chat, refs):
    texts = ["<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>"]
    history = [
        Message("user", texts[0]),
        Message("assistant", texts[1]),
        shown(refs[:1], f"{texts[1]}<image>{texts[0]}"),
    ]
    conversation = chat.open(history, [])
    conversation.next_prompt()
    assert len(conversation.images) == 1
    assert before_sampled(conversation, chat.images.placeholder) == 0


def test_an_answer_of_a_tool_shows_an_image(chat, refs):
    schema = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}}}
    conversation = chat.open([Message("user", "?")], [schema])
    conversation.next_prompt()
    text = '<tool_call>{"name": "look", "arguments": {}}</tool_call><|im_end|>'
    message = conversation.add_generation(chat.encode(text), is_truncated=False)
    call = message.tool_calls[0]
    conversation.add_messages(
        [shown(refs[1:], "<image><image>two", role="tool", tool_call_id=call.id, name="look")]
    )
    conversation.next_prompt()
    check_places(chat, conversation, refs[1:])


def test_conversations_to_imitate_have_the_same_tokens_and_images(chat, refs):
    messages = [
        shown(refs[:2], "<image>a<image>"),
        Message("assistant", "first"),
        shown(refs[2:], "b<image>"),
        Message("assistant", "second"),
    ]
    replay = chat.render_training(messages, [])
    conversation = chat.open(messages[:1], [])
    conversation.next_prompt()
    conversation.add_generation(chat.encode("first<|im_end|>"), is_truncated=False)
    conversation.add_messages(messages[2:3])
    conversation.next_prompt()
    conversation.add_generation(chat.encode("second<|im_end|>"), is_truncated=False)
    assert replay.token_ids.tolist() == conversation.token_ids
    assert replay.images == tuple(conversation.images)
    assert not replay.mask[[image.position for image in replay.images]].any()


def test_messages_with_images_are_not_shortened(chat, refs):
    conversation = chat.open([shown(refs[:1], "<image>" + "long " * 20), Message("user", "x " * 40)], [])
    whole = conversation.num_pending_tokens()
    assert conversation.truncate_prompt(whole - 20, "left")
    assert conversation.messages[0].content == "<image>" + "long " * 20
    with pytest.raises(DataError, match="even without its user messages"):
        chat.open([shown(refs[:1], "<image>long")], []).truncate_prompt(3, "left")


def test_a_model_that_does_not_see_refuses_images(refs):
    conversation = tiny_chat().open([shown(refs[:1], "<image>")], [])
    with pytest.raises(DataError, match=r"has no preprocessor_config.json: it does not see"):
        conversation.next_prompt()


def test_marks_and_images_must_be_as_many(chat, refs):
    with pytest.raises(DataError, match="has 1 images, but <image> 2 times"):
        chat.open([shown(refs[:1], "<image><image>")], []).next_prompt()


def test_a_template_that_shows_no_images_is_named(folder, refs, tmp_path):
    template = tmp_path / "text.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    )
    chat = Chat.load(str(folder), template_file=str(template))
    with pytest.raises(ConfigError, match=r"shows 0 of 1 images; set model\.chat_template"):
        chat.open([shown(refs[:1], "<image>")], []).next_prompt()


def test_the_same_text_with_another_image_is_another_message(chat, refs):
    first, second = (shown([ref], "<image>") for ref in refs[:2])
    conversation = chat.open([first], [])
    assert conversation.extends([dataclasses.replace(first)]) == []
    assert conversation.extends([second]) is None
