"""Templates are read from a tokenizer's folder and rendered as `transformers` does."""

import gc
import json
import pickle
import weakref

import pytest
from transformers import AutoTokenizer

from agentrl.chat.chat import Chat
from agentrl.chat.template import ChatTemplate, TemplateRefusal, load_template
from agentrl.chat.tiny import build_tiny_tokenizer, write_tiny_tokenizer
from agentrl.errors import ConfigError
from agentrl.types import Message

TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "<é>", "parameters": {"type": "object", "properties": {}}},
    }
]
CALL = {"type": "function", "id": "1", "function": {"name": "f", "arguments": {"x": [1, "ü"]}}}
MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "a < b & 'é'"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "f", "tool_call_id": "1", "content": "r"},
]

FEATURES = {
    "blocks and spaces": "{% for m in messages %}\n    {% if m.content %}\n{{ m.content }}\n    {% endif "
    "%}\n{% endfor %}\n",
    "tojson": "{{ tools | tojson }}{{ tools | tojson(indent=2) }}{{ messages | tojson(sort_keys=true, "
    "separators=(',', ':')) }}",
    "special tokens": "{{ eos_token }}|{{ pad_token }}|{{ bos_token }}",
    "loop controls": "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% elif i == 4 %}{% break %}{% "
    "endif %}{{ i }}{% endfor %}",
    "generation tag": "{% for m in messages %}{% generation %}\n{% set x = m.role %}{{ x }}\n{% "
    "endgeneration %}{{ x }}{% endfor %}",
    "no tools": "{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}",
    "date": "{{ strftime_now('%Y-%m-%d') }}",
    "namespace": "{% set n = namespace(i=0) %}{% for m in messages %}{% set n.i = n.i + 1 %}{% endfor %}{{ "
    "n.i }}{{ dict(a=1) | tojson }}",
    "methods": "{{ messages[1].content.split('b')[0].strip() }}{{ "
    "messages[2].tool_calls[0].function.arguments.items() | list }}",
}


@pytest.mark.parametrize("source", FEATURES.values(), ids=FEATURES.keys())
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_rendering_equals_transformers(tmp_path, source, tools):
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(source)
    reference = AutoTokenizer.from_pretrained(tmp_path)
    for prompted in (False, True):
        expected = reference.apply_chat_template(
            MESSAGES, tools=tools, add_generation_prompt=prompted, tokenize=False
        )
        assert (
            load_template(tmp_path).render(MESSAGES, tools or (), add_generation_prompt=prompted) == expected
        )


@pytest.mark.parametrize(
    "given", [{}, {"style": None}, {"style": ["é", {"a": 1.5}], "documents": [{"text": "x"}]}]
)
def test_rendering_with_arguments_equals_transformers(tmp_path, given):
    write_tiny_tokenizer(tmp_path)
    source = (
        "{{ style is defined }}{{ style | tojson if style is defined }}{{ documents is none }}{{ bos_token }}"
    )
    (tmp_path / "chat_template.jinja").write_text(source + "{{ documents[0].text if documents }}")
    reference = AutoTokenizer.from_pretrained(tmp_path)
    expected = reference.apply_chat_template(MESSAGES, tokenize=False, **given)
    template = load_template(tmp_path).with_arguments(given)
    assert template.render(MESSAGES, add_generation_prompt=False) == expected


def configure(folder, **changes) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_the_template_comes_from_the_users_file_then_the_folders_file_then_the_config(tmp_path):
    write_tiny_tokenizer(tmp_path)
    configure(tmp_path, chat_template="from config")
    (tmp_path / "mine.jinja").write_text("mine")
    (tmp_path / "chat_template.jinja").write_text("from file")

    def shown(**kwargs) -> str:
        return load_template(tmp_path, **kwargs).render([], add_generation_prompt=False)

    assert shown(template_file=str(tmp_path / "mine.jinja")) == "mine"
    assert shown() == "from file"
    (tmp_path / "chat_template.jinja").unlink()
    assert shown() == "from config"
    configure(tmp_path, chat_template=None)
    with pytest.raises(ConfigError, match=r"no chat template; set model\.chat_template"):
        shown()
    with pytest.raises(
        ConfigError, match=r"model.chat_template: file '.*absent.jinja' does not exist; did you"
    ):
        shown(template_file=str(tmp_path / "absent.jinja"))


def test_a_template_for_tools_is_used_when_there_are_tools(tmp_path):
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "with {{ tools | length }}"},
    ]
    configure(tmp_path, chat_template=named)
    template, reference = load_template(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for tools in ((), TOOLS):
        rendered = template.render(MESSAGES, tools, add_generation_prompt=False)
        assert rendered == reference.apply_chat_template(MESSAGES, tools=tools or None, tokenize=False)


def test_broken_templates_and_folders_are_named(tmp_path):
    with pytest.raises(ConfigError, match="does not compile: line 2"):
        ChatTemplate({"default": "\n{% if %}"}, {})
    with pytest.raises(ConfigError, match="no default chat template; found: tool_use"):
        ChatTemplate({"tool_use": ""}, {})
    with pytest.raises(ConfigError, match=r"fails on the roles \[user\]: .*no such thing"):
        ChatTemplate({"default": "{{ raise_exception('no such thing') }}"}, {}).render(
            [{"role": "user"}], add_generation_prompt=True
        )
    with pytest.raises(TemplateRefusal) as caught:
        ChatTemplate({"default": "{{ raise_exception('no such thing') }}"}, {}).render(
            [{"role": "user"}], add_generation_prompt=True
        )
    arrived = pickle.loads(pickle.dumps(caught.value))
    assert (str(arrived), arrived.reason) == (str(caught.value), "TemplateError: no such thing")
    assert str(type(caught.value)(f"row 3: {caught.value}")).startswith("row 3: the chat template fails")
    with pytest.raises(ConfigError, match="SecurityError"):
        ChatTemplate({"default": "{{ ''.__class__.__mro__ }}"}, {}).render([], add_generation_prompt=True)
    with pytest.raises(ConfigError, match="does not exist"):
        Chat.load(str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        Chat.load(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not a tokenizer"):
        Chat.load(str(tmp_path))


def test_the_tokens_that_end_a_turn_are_those_of_template_and_generation_config(tmp_path):
    write_tiny_tokenizer(tmp_path)
    tokenizer = build_tiny_tokenizer()
    end, text_end = (tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>"))
    assert Chat.load(str(tmp_path)).eos_token_ids == (end, text_end)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": text_end}))
    assert Chat.load(str(tmp_path)).eos_token_ids == (end, text_end)
    (tmp_path / "generation_config.json").unlink()
    assert Chat.load(str(tmp_path)).eos_token_ids == (end,)
    configure(tmp_path, eos_token={"content": "<|endoftext|>"})
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    )
    assert Chat.load(str(tmp_path)).eos_token_ids == (end, text_end)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }};{% endfor %}")
    assert Chat.load(str(tmp_path)).eos_token_ids == (text_end,)
    configure(tmp_path, eos_token=None)
    with pytest.raises(ConfigError, match="ends an assistant turn with ';', which contains no special token"):
        Chat.load(str(tmp_path))


PARTS = """{% for m in messages %}{{ m.role }}:{% if m.content[0]['type'] == 'image' %} {% endif %}{% for part in m.content %}
{%- if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %};{% endfor %}"""  # noqa: E501
PARTS_OF_USERS = """{% for m in messages %}{{ m.role }}:
{%- if m.role == 'user' %}{{ m.content[0].text }}{% else %}{{ m.content + '' }}{% endif %};{% endfor %}"""
BOTH = """{% for m in messages %}{{ m.role }}:
{%- if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }} (part){% endif %};{% endfor %}"""  # noqa: E501


@pytest.mark.parametrize(
    ("source", "part_roles"),
    [(PARTS, {"system", "user", "assistant", "tool"}), (PARTS_OF_USERS, {"user"}), (BOTH, set())],
)
def test_content_is_given_as_parts_where_text_is_not_shown(tmp_path, source, part_roles):
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(source)
    messages = [
        {"role": role, "content": f" {role}s\n text"} for role in ("system", "user", "assistant", "tool")
    ]
    given = [
        {**m, "content": [{"type": "text", "text": m["content"]}]} if m["role"] in part_roles else m
        for m in messages
    ]
    template = load_template(tmp_path)
    own = template.render(messages, add_generation_prompt=False)
    reference = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(given, tokenize=False)
    assert own == reference == "".join(f"{m['role']}:{m['content']};" for m in messages)
    assert template.render([{"role": "user", "content": ""}], add_generation_prompt=False) == "user:;"


def test_padding_and_truncation_of_the_tokenizer_file_are_ignored(tmp_path):
    write_tiny_tokenizer(tmp_path)
    tokenizer = build_tiny_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    prompt = Chat.load(str(tmp_path)).open([Message("user", "0123456789")], []).next_prompt()
    assert prompt == Chat.load(str(tmp_path)).encode(
        "<|im_start|>user\n0123456789<|im_end|>\n<|im_start|>assistant\n"
    )
    assert len(prompt) == 18


class _Told(dict):
    """A message that can be watched."""


def test_messages_are_not_kept_by_a_template_with_macros(tmp_path):
    """A macro holds its context, and the context its macros: without a hand, each prompt would stay until
    garbage is collected.
    """
    source = (
        "{% macro show(m) %}{{ m.role }}: {{ m.content }}{% endmacro %}{% for m in messages %}{{ show(m) "
        "}}{% endfor %}"
    )
    template = ChatTemplate({"default": source}, {})
    gc.disable()
    try:
        message = _Told(role="user", content="hello")
        gone = weakref.ref(message)
        assert template.render([message], add_generation_prompt=False) == "user: hello"
        del message
        assert gone() is None
    finally:
        gc.enable()
