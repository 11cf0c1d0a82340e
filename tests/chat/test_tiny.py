"""The quickstart's tokenizer: any text round-trips, `transformers` reads it alike, and prompts are short."""

import json
import unicodedata

import pytest
from agentrl.tools.calculator import Calculator
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from agentrl.chat.chat import Chat
from agentrl.chat.tiny import JOINED, SPECIAL_TOKENS, WORDS, build_tiny_tokenizer, write_tiny_tokenizer
from agentrl.types import Message

TOKENIZER = build_tiny_tokenizer()


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


TEXTS = st.text(st.characters(codec="utf-8"), max_size=40) | st.lists(
    st.sampled_from(("'", "I'll", "é", *WORDS)), max_size=6
).map(" ".join)


@given(TEXTS)
def test_any_text_round_trips_in_its_normal_form(text):
    assert TOKENIZER.decode(encode(text), skip_special_tokens=False) == unicodedata.normalize("NFC", text)


@pytest.fixture(scope="module")
def of_transformers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_tiny_tokenizer(folder)
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]})
    )
    return AutoTokenizer.from_pretrained(folder)


@given(TEXTS)
@example("don't say 'To, cafe\u0301")
def test_transformers_makes_the_same_tokens_of_any_text(of_transformers, text):
    """AutoTokenizer goes by the model's type, and takes of tokenizer.json vocabulary and merges alone."""
    assert of_transformers.encode(text, add_special_tokens=False) == encode(text)


@given(st.integers(0, 10**9))
def test_every_digit_is_a_token(number):
    assert [TOKENIZER.decode([id]) for id in encode(f"{number}*{number}")] == [
        *str(number),
        "*",
        *str(number),
    ]


@pytest.mark.parametrize("text", [*WORDS, *map("".join, JOINED), *SPECIAL_TOKENS])
def test_each_listed_fragment_is_one_token(text):
    assert len(encode(text)) == 1


def test_the_vocabulary_is_small():
    assert TOKENIZER.get_vocab_size() <= 400


def test_the_files_are_the_same_every_time(tmp_path):
    for name in ("a", "b"):
        write_tiny_tokenizer(tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == [
        "chat_template.jinja",
        "generation_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in files)


@pytest.mark.parametrize("is_model_folder", [False, True])
def test_transformers_reads_the_same_tokenizer(tmp_path, is_model_folder):
    write_tiny_tokenizer(tmp_path)
    if is_model_folder:
        (tmp_path / "config.json").write_text(
            json.dumps({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]})
        )
    reference, chat = AutoTokenizer.from_pretrained(tmp_path), Chat.load(str(tmp_path))
    text = (
        'é 漢 👍🏽 <|im_start|>user\n12*34=?<|im_end|><tool_call>{"name": "calculator"}</tool_call>   '
        "a\r\n\x00"
    )
    assert reference.encode(text, add_special_tokens=False) == chat.encode(text)
    assert reference.decode(chat.encode(text)) == chat.decode(chat.encode(text)) == text
    assert chat.decode(chat.encode(text), skip_special=True) == reference.decode(
        chat.encode(text), skip_special_tokens=True
    )
    assert reference.convert_tokens_to_ids(reference.eos_token) == chat.eos_token_ids[0]
    assert len(reference) == chat.vocab_size
    messages = [{"role": "user", "content": "12*34=?"}]
    tools = [Calculator().schema()]
    prompt = chat.open([Message("user", "12*34=?")], tools).next_prompt()
    assert (
        reference.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
        == prompt
    )


def test_a_prompt_with_a_tool_is_short_and_the_template_passes_its_check(tmp_path):
    write_tiny_tokenizer(tmp_path)
    chat, tools = Chat.load(str(tmp_path)), [Calculator().schema()]
    assert chat.tool_format == "hermes"
    chat.check_template(tools)
    chat.check_template([])
    assert len(chat.open([Message("user", "What is 12*34?")], tools).next_prompt()) <= 70
