"""Tool calls in Hermes format: goldens, a round trip, and text that no model should write."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.chat.formats import get_format
from agentrl.types import ToolCall
from parts.chats import json_values

parse = get_format("hermes").parse

texts = st.text(max_size=20).filter(lambda text: "<tool_call>" not in text)
encodable = (
    st.text(st.characters(codec="utf-8"), max_size=12)
    | st.just("</tool_call>")
    | st.just('"}}</tool_call><tool_call>{')
)
values = json_values(encodable)


def calls_of(text: str, *, is_truncated: bool = False) -> list[tuple[str, object, str | None]]:
    return [
        (call.name, call.arguments, call.error)
        for call in parse(text, turn=0, is_truncated=is_truncated).tool_calls
    ]


@given(
    before=texts,
    calls=st.lists(
        st.tuples(encodable.filter(bool), st.dictionaries(encodable, values, max_size=3), texts), max_size=4
    ),
    ascii_only=st.booleans(),
    as_text=st.booleans(),
    space=st.sampled_from(["", " ", "\n"]),
)
def test_what_was_written_is_read(before, calls, ascii_only, as_text, space):
    text = before
    for name, arguments, after in calls:
        written = json.dumps(arguments, ensure_ascii=ascii_only) if as_text else arguments
        body = json.dumps({"name": name, "arguments": written}, ensure_ascii=ascii_only)
        text += f"<tool_call>{space}{body}{space}</tool_call>{after}"
    parsed = parse(text, turn=3, is_truncated=False)
    assert parsed.text == before + "".join(after for _, _, after in calls)
    expected = [ToolCall(f"call003{i:02d}", name, arguments) for i, (name, arguments, _) in enumerate(calls)]
    assert list(parsed.tool_calls) == expected


json_pieces = [
    '{"name": ',
    '"f"',
    ', "arguments": ',
    "{}",
    "{",
    "}",
    "[",
    '"',
    "\\",
    "1e999",
    "NaN",
    "\\ud800",
    " ",
    "é",
]
pieces = st.sampled_from(["<tool_call>", "</tool_call>", *json_pieces])


@given(st.lists(pieces | st.text(max_size=3), max_size=14).map("".join), st.booleans())
def test_nothing_a_model_writes_raises_and_each_opening_outside_of_a_call_is_one_call(text, is_truncated):
    parsed = parse(text, turn=0, is_truncated=is_truncated)
    assert len(parsed.tool_calls) <= text.count("<tool_call>")
    assert bool(parsed.tool_calls) == ("<tool_call>" in text)
    for call in parsed.tool_calls:
        assert (call.arguments is None) == (call.error is not None)
        json.dumps([call.name, call.arguments], ensure_ascii=False, allow_nan=False).encode()


@pytest.mark.parametrize(
    ("body", "name", "error"),
    [
        (
            '{"name": "f", "arguments": {"a": 1}',
            "f",
            "not valid JSON: Expecting ',' delimiter at character 35",
        ),
        ("nothing", "", "not valid JSON: Expecting value at character 0"),
        ("", "", "not valid JSON"),
        ('{"name": "f"}', "f", 'no "arguments"'),
        ('{"arguments": {}}', "", '"name"'),
        ('{"name": 3, "arguments": {}}', "", '"name"'),
        ("[1]", "", '"name"'),
        ('{"name": "f", "arguments": [1]}', "f", "must be a JSON object, not list"),
        ('{"name": "f", "arguments": "12*34"}', "f", "not valid JSON"),
        ('{"name": "f", "arguments": "[1]"}', "f", "must be a JSON object, not list"),
        ('{"name": "f", "arguments": {"a": NaN}}', "f", "out of range"),
        ('{"name": "f", "arguments": {"a": 1e999}}', "f", "out of range"),
        ('{"name": "f", "arguments": {"a": "\\ud800"}}', "f", "surrogate"),
        ('{"name": "f", "arguments": {}} and more', "f", "text between"),
        ("[" * 100_000, "", "nested too deeply"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(body, name, error):
    parsed = parse(f"Now <tool_call>{body}</tool_call> then", turn=0, is_truncated=False)
    (call,) = parsed.tool_calls
    assert (call.name, call.arguments) == (name, None)
    assert error in str(call.error)
    assert parsed.text == "Now  then"


def test_a_broken_call_does_not_swallow_the_next():
    good = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert [name for name, *_ in calls_of(f"<tool_call>{{{good}")] == ["", "f"]
    assert [name for name, *_ in calls_of(f"<tool_call>{{</tool_call>{good}")] == ["", "f"]


@pytest.mark.parametrize(
    "text", ['<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "arguments": {}}', "<tool_call>"]
)
def test_an_unfinished_call_is_an_error_that_names_the_limit(text):
    for is_truncated, reason in (
        (True, "the call was cut at the token limit"),
        (False, "the call is not closed by </tool_call>"),
    ):
        assert [call[1:] for call in calls_of(text, is_truncated=is_truncated)] == [(None, reason)]


def test_code_with_real_line_breaks_in_a_string_is_read():
    assert calls_of('<tool_call>{"name": "f", "arguments": {"code": "a\n\tb"}}</tool_call>') == [
        ("f", {"code": "a\n\tb"}, None)
    ]
