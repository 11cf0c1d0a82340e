"""Tool-call formats: what models really write, what they should not, and the laws that hold for any text."""

import dataclasses
import json
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.chat.chat import Chat
from agentrl.chat.formats import detect_format, get_format
from agentrl.chat.parsing import CallDelta, ParsedTurn, ReasoningDelta, TextDelta, TurnParser
from agentrl.chat.template import ChatTemplate
from agentrl.chat.tiny import build_tiny_tokenizer
from agentrl.errors import PluginError
from agentrl.types import Message, ToolCall
from parts.built_in import TOOL_FORMATS
from parts.chats import json_values
from parts.cpu_time import cpu_s

CUT = "the call was cut at the token limit"
Read = tuple[str, object, str | None]


def schema(**properties: object) -> dict[str, object]:
    return {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": properties}},
    }


TYPED = [
    schema(
        text={"type": "string"},
        count={"type": "integer"},
        share={"type": "number"},
        flag={"type": "boolean"},
        items={"type": "array"},
        point={"$ref": "#/$defs/Point"},
        maybe={"anyOf": [{"type": "string"}, {"type": "null"}]},
        either={"type": ["integer", "string"]},
        unit={"enum": ["m", "km"]},
        free={},
    )
]
TYPED[0]["function"]["parameters"]["$defs"] = {"Point": {"type": "object"}}  # type: ignore[index]


def read(
    name: str, text: str, *, is_truncated: bool = False, tools: Sequence[dict[str, object]] = ()
) -> tuple[str, list[Read], str]:
    parsed = get_format(name).parse(text, turn=0, is_truncated=is_truncated, tools=tools)
    return (
        parsed.text.strip(),
        [(call.name, call.arguments, call.error) for call in parsed.tool_calls],
        parsed.reasoning.strip(),
    )


# ----------------------------------------------------------------------------------- what models really write

WEATHER = ("get_weather", {"city": "Zürich"}, None)
TIME = ("get_time", {"zone": {"name": "CET"}}, None)

WRITTEN = {
    "hermes": (
        'First the weather.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": '
        '"Z\\u00fcrich"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_time", "arguments": "{\\"zone\\": {\\"name\\": '
        '\\"CET\\"}}"}\n</tool_call>'
    ),
    "qwen3_coder": (
        "First the weather.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n</function>\n</tool_call>\n"  # noqa: E501
        '<tool_call>\n<function=get_time>\n<parameter=zone>\n{"name": "CET"}\n</parameter>\n</function>\n</tool_call>'  # noqa: E501
    ),
    "llama3_json": (
        'First the weather.\n{"name": "get_weather", "parameters": {"city": "Zürich"}}; '
        '{"type": "function", "name": "get_time", "parameters": {"zone": {"name": "CET"}}}'
    ),
    "mistral": (
        'First the weather.[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Zürich"}, "id": '
        '"VvvODy9mT"}, {"name": "get_time", "arguments": {"zone": {"name": "CET"}}}]'
    ),
    "deepseek_v3": (
        "First the weather.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        '```json\n{"city": "Zürich"}\n```<｜tool▁call▁end｜>\n'
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n{"zone": {"name": "CET"}}\n```<｜tool▁call▁end｜>'  # noqa: E501
        "<｜tool▁calls▁end｜>"
    ),
    "gpt_oss": (
        "<|channel|>commentary<|message|>First the weather.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "  # noqa: E501
        '<|constrain|>json<|message|>{"city":"Zürich"}<|call|>'
        '<|start|>assistant to=functions.get_time<|channel|>commentary json<|message|>{"zone": {"name": "CET"}}'  # noqa: E501
    ),
    "pythonic": 'First the weather.\n[get_weather(city=\'Zürich\'), get_time(zone={"name": "CET"})]',
    "glm": (
        "\nFirst the weather.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n</tool_call>\n"  # noqa: E501
        '<tool_call>get_time<arg_key>zone</arg_key><arg_value>{"name": "CET"}</arg_value></tool_call>'
    ),
    "gemma4": (
        'First the weather.<|tool_call>call:get_weather{city:<|"|>Zürich<|"|>}<tool_call|>'
        '<|tool_call>call:get_time{zone:{name:<|"|>CET<|"|>}}<tool_call|>'
    ),
    "kimi_k2": (
        "First the weather.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"  # noqa: E501
        '{"city": "Zürich"}<|tool_call_end|><|tool_call_begin|>functions.get_time:1<|tool_call_argument_begin|>'  # noqa: E501
        '{"zone": {"name": "CET"}}<|tool_call_end|><|tool_calls_section_end|>'
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_two_calls_behind_a_text(name):
    assert read(name, WRITTEN[name]) == ("First the weather.", [WEATHER, TIME], "")


@pytest.mark.parametrize("name", [name for name in WRITTEN if name != "gpt_oss"])
def test_calls_inside_of_a_thought_are_none(name):
    text = f"<think>\nMaybe {WRITTEN[name]}?\n</think>\n\n{WRITTEN[name]}"
    assert read(name, text) == ("First the weather.", [WEATHER, TIME], f"Maybe {WRITTEN[name]}?".strip())
    assert read(name, f"<think>Maybe {WRITTEN[name]}", is_truncated=True)[:2] == ("", [])


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_turn_without_marks_is_text(name):
    text = "Two {braces}, [a](link), f(x) = [sin(x)], 3 < 4, `name` and </think> alone.\n\n[1] See below."
    assert get_format(name).parse(text, turn=0, is_truncated=False) == ParsedTurn(text, ())


FURTHER: list[tuple[str, str, list[Read], str]] = [
    # format, text, calls, text outside of them
    ("hermes", 'a<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>b', [("f",
    {"x": "</tool_call>"}, None)], "ab"),
    ("qwen3_coder", "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", [("f",
    {"a": 1}, None)], ""),
    ("qwen3_coder", "<tool_call><function=f></function></tool_call>ok", [("f", {}, None)], "ok"),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>x</function></tool_call>", [("f", {"a": "x"}, None)],
    ""),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=text>\n<parameter=a>\nx</parameter>\n\n\n</parameter>\n</function></tool_call>",
        [("f", {"text": "<parameter=a>\nx</parameter>\n\n"}, None)],
        "",
    ),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": "}"}}', [("f", {"a": "}"}, None)], ""),
    ("llama3_json", '{"name": "f", "arguments": {}}\n{"name": "g", "parameters": {}}', [("f", {}, None), ("g",
    {}, None)], ""),
    ("llama3_json", 'Use {"name": "Bob", "age": 3}; done', [], 'Use {"name": "Bob", "age": 3}; done'),
    ("llama3_json", '{"name": 3, "parameters": {}}', [], '{"name": 3, "parameters": {}}'),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', [("f", {"a": 1}, None), ("g", {}, None)],
    ""),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}', [("f", {"a": 1}, None)], ""),
    ("mistral", '[TOOL_CALLS]f{"a": 1}', [("f", {"a": 1}, None)], ""),
    ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {}}', [("f", {}, None)], ""),
    ("mistral", "[TOOL_CALLS] []", [], ""),
    (
        "deepseek_v3",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [("f", {"a": 1}, None), ("g", {}, None)],
        "",
    ),
    (
        "deepseek_v3",
        '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "```<｜tool▁call▁end｜>"}<｜tool▁call▁end｜>',
        [("f", {"a": "```<｜tool▁call▁end｜>"}, None)],
        "",
    ),
    ("gpt_oss", "<|channel|>final<|message|>Four.", [], "Four."),
    ("gpt_oss", "Four.", [], "Four."),
    ("gpt_oss", "<|channel|>analysis to=functions.f code<|message|>{}<|call|>", [("f", {}, None)], ""),
    ("gpt_oss", "<|channel|>commentary to=browser.search<|message|>{}", [("browser.search", {}, None)], ""),
    ("pythonic", '<|tool_call_start|>[f(a="x", b=[1], c=None)]<|tool_call_end|>So.', [("f", {"a": "x",
    "b": [1], "c": None}, None)], "So."),
    ("pythonic", "[f()]", [("f", {}, None)], ""),
    ("pythonic", "[f(a='it's', b=\"\", c='')]", [("f", {"a": "it's", "b": "", "c": ""}, None)], ""),
    ("pythonic", "[f(a=(1, -2), b=true, c='it\\'s' \"!\", d='''x\ny''', e=1_000, g=r'\\d')]",
     [("f", {"a": [1, -2], "b": True, "c": "it's!", "d": "x\ny", "e": 1000, "g": "\\d"}, None)], ""),
    ("pythonic", "<|python_tag|>[f(a='\\x41\\u00e9\\n')]", [("f", {"a": "Aé\n"}, None)], ""),
    ("pythonic", "See [f(a=1)] there", [], "See [f(a=1)] there"),
    ("glm", "a<tool_call>f</tool_call>b", [("f", {}, None)], "ab"),
    ("glm", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value></arg_value>\n</arg_value>\n</tool_call>",
     [("f", {"a": "</arg_value>\n"}, None)], ""),
    ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key><arg_value>x\ny</arg_value></tool_call>",  # noqa: E501
     [("f", {"a": 1, "b": "x\ny"}, None)], ""),
    ("gemma4", "<|tool_call>call:f{}<tool_call|>.", [("f", {}, None)], "."),
    ("gemma4", '<|tool_call> call:f{ a : -1.5e3 , b:[ true,null,{<|"|>c d<|"|>:<|"|>}]<|"|>}], g:[] } <tool_call|>',  # noqa: E501
     [("f", {"a": -1500.0, "b": [True, None, {"c d": "}]"}], "g": []}, None)], ""),
    ("gemma4", '<|tool_call>call:f{a:<|"|><tool_call|><|"|>}<tool_call|>', [("f", {"a": "<tool_call|>"}, None)], ""),  # noqa: E501
    ("kimi_k2", '<|tool_call_begin|>f:3<|tool_call_argument_begin|>\n{"a": "<|tool_call_end|>"}\n<|tool_call_end|>',  # noqa: E501
     [("f", {"a": "<|tool_call_end|>"}, None)], ""),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_calls_section_end|>So.", [], "So."),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "calls", "outside"), FURTHER)
def test_further_ways_to_write_calls(name, text, calls, outside):
    assert read(name, text) == (outside, calls, "")


def test_harmony_channels():
    text = (
        "<|channel|>analysis<|message|>Sum.<|end|><|start|>assistant<|channel|>analysis<|message|>Is "
        "4.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>So:<|end|><|start|>assistant<|channel|>final<|message|>Four.<|return|>"
    )
    assert read("gpt_oss", text) == ("So:\nFour.", [], "Sum.\nIs 4.")


def test_mistral_keeps_the_model_s_ids():
    text = (
        '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "%s"}, {"name": "f", "arguments": {}, "id": '
        '"%s"}]'
    )
    ids = [
        call.id
        for call in get_format("mistral")
        .parse(text % ("abcdefghi", "abcdefghi"), turn=2, is_truncated=False)
        .tool_calls
    ]
    assert ids == ["abcdefghi", "call00201"]


def test_kimi_keeps_the_ids_that_its_template_shows_in_place_of_names():
    text = "<|tool_call_begin|>%s<|tool_call_argument_begin|>{}<|tool_call_end|>"
    kimi = get_format("kimi_k2")
    calls = kimi.parse(text % "functions.f:7" + text % "functions.f:7", turn=2, is_truncated=False).tool_calls
    assert [call.id for call in calls] == ["functions.f:7", "call00201"]
    assert kimi.write(Message("assistant", "", calls)).count("functions.f:7") == 1
    assert "functions.f:1" in kimi.write(Message("assistant", "", calls)), "another id is written anew"


def test_gemma_s_thoughts_are_channels():
    assert read("gemma4", "<|channel>thought\nSum.\n<channel|>Four.") == ("Four.", [], "Sum.")
    assert read("gemma4", "<|channel>thoughtful<channel|>Four.") == ("Four.", [], "ful")
    assert read("gemma4", "<|channel>thought", is_truncated=True) == ("", [], "")


def test_several_thoughts_and_magistral_s_marks():
    assert read("hermes", "<think>a</think>b<think>c</think>d") == ("bd", [], "a\nc")
    assert read("mistral", "[THINK]a[/THINK]b") == ("b", [], "a")
    assert read("none", "<think>\na\n</think>\n\n<tool_call>") == ("<tool_call>", [], "a")


# --------------------------------------------------------------------------------------- broken and cut calls

BROKEN = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', "f", "not valid JSON: Expecting "
    "',' delimiter"),
    ("qwen3_coder", "<tool_call>\n<parameter=a></tool_call>", "", "must be followed by <function=name>"),
    ("qwen3_coder", "<tool_call><function=f>\n<a>1</a></function></tool_call>", "f", "expected "
    "<parameter=name> or </function>"),
    ("qwen3_coder", "<tool_call><function=\n></function></tool_call>", "", "must be followed by a name and "
    ">"),
    ("qwen3_coder", "<function=f><parameter=a>1</tool_call><tool_call><function=", "f", "'a' is not closed "
    "by </parameter>"),
    ("llama3_json", '{"name": "f", "parameters": {"a": }}', "f", "not valid JSON: Expecting value"),
    ("llama3_json", '<|python_tag|>brave.call(query="x")', "", "not valid JSON"),
    ("llama3_json", '<|python_tag|>{"name": "f"}', "f", 'no "parameters"'),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": [1]}]', "f", "must be a JSON object, not list"),
    ("mistral", "[TOOL_CALLS] get_weather please", "", "must be followed by a JSON list of calls, or by "
    "name[ARGS]{...}"),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a" 1}', "f", "not valid JSON"),
    ("deepseek_v3", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{a: 1}<｜tool▁call▁end｜>", "f", "not valid JSON"),
    ("deepseek_v3", "<｜tool▁call▁begin｜>f(1)<｜tool▁call▁end｜>", "", "must be written as "
    "name<｜tool▁sep｜>{...}"),
    ("gpt_oss", "<|channel|>commentary to=functions.f<|message|>{a: 1}<|call|>", "f", "not valid JSON"),
    ("gpt_oss", "<|channel|>commentary to=functions.f<|message|>{} then<|call|>", "f", "text between"),
    ("pythonic", "[f(a=g(1))]", "f", "'g' is not a literal"),
    ("pythonic", "[f('x')]", "f", "arguments must be written as name=value"),
    ("pythonic", "[f(a=1]", "f", "expected )"),
    ("pythonic", "<|tool_call_start|>[f(a=" + "[" * 100 + "<|tool_call_end|>", "f", "nested too deeply"),
    ("glm", "<tool_call>\n<arg_key>a</arg_key></tool_call>", "", "must be followed by the name"),
    ("glm", "<tool_call>f\n<a>1</a></tool_call>", "f", "expected <arg_key>name</arg_key>"),
    ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call><tool_call>g", "f", "'a' is not closed"),
    ("gemma4", "<|tool_call>f(1)<tool_call|>", "", "must be written as call:name{...}"),
    ("gemma4", "<|tool_call>call:f{a:word}<tool_call|>", "f", "a value must be a number, true"),
    ("gemma4", "<|tool_call>call:f{a 1}<tool_call|>", "f", "expected : behind the key 'a'"),
    ("gemma4", "<|tool_call>call:f{a:1 b:2}<tool_call|>", "f", "expected , or } behind the value of 'a'"),
    ("gemma4", "<|tool_call>call:f{a:[1 2]}<tool_call|>", "f", "expected , or ] behind an item"),
    ("gemma4", "<|tool_call>call:f{:1}<tool_call|>", "f", "expected a key or }"),
    ("gemma4", "<|tool_call>call:f{} so<tool_call|>", "f", "text between"),
    ("gemma4", "<|tool_call>call:f{a:" + "[" * 100 + "<tool_call|>", "f", "nested too deeply"),
    ("gemma4", "<|tool_call>call:f{a:1e999}<tool_call|>", "f", "a number out of range"),
    ("gemma4", "<|tool_call>call:f{a:" + "9" * 5000 + "}<tool_call|>", "f", "a number out of range"),
    ("kimi_k2", "<|tool_call_begin|>3<|tool_call_argument_begin|>{}<|tool_call_end|>", "", "functions.name:number"),  # noqa: E501
    ("kimi_k2", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{a: 1}<|tool_call_end|>", "f",
     "not valid JSON"),
    ("kimi_k2", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{} so<|tool_call_end|>", "f",
     "text between"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "called", "error"), BROKEN)
def test_a_broken_call_says_what_is_wrong(name, text, called, error):
    _, calls, _ = read(name, text)
    assert (calls[0][0], calls[0][1]) == (called, None)
    assert error in str(calls[0][2])


GOOD = {
    name: get_format(name).write(Message("assistant", "", (ToolCall("goodcall1", "g", {"a": "b"}),)))
    for name in WRITTEN
}
BEGUN = {
    "hermes": '<tool_call>{"name": "f", ',
    "qwen3_coder": "<tool_call><function=f",
    "llama3_json": '<|python_tag|>{"name": "f", "parameters"',
    "mistral": '[TOOL_CALLS] [{"name": "f", ',
    "deepseek_v3": "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{",
    "gpt_oss": "<|channel|>commentary to=functions.f<|message|>{",
    "pythonic": "<|tool_call_start|>[f(",
    "glm": "<tool_call>f\n<arg_key>a</arg_key>",
    "gemma4": "<|tool_call>call:f{a:",
    "kimi_k2": '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": ',
}


@pytest.mark.parametrize("name", BEGUN)
def test_a_broken_call_does_not_swallow_the_next(name):
    following = {"gpt_oss": "<|start|>assistant", "llama3_json": "\n", "pythonic": "<|tool_call_start|>"}.get(
        name, ""
    ) + GOOD[name]
    (first, *_), second = read(name, BEGUN[name] + following)[1]
    assert first in ("f", "")
    assert second == ("g", {"a": "b"}, None)


@pytest.mark.parametrize("name", BEGUN)
def test_a_call_that_was_cut_names_the_limit_and_those_before_it_count(name):
    before = GOOD[name] + ("<|call|><|start|>assistant" if name == "gpt_oss" else "\n")
    assert [call[1:] for call in read(name, before + BEGUN[name], is_truncated=True)[1]] == [
        ({"a": "b"}, None),
        (None, CUT),
    ]
    (_, unfinished) = read(name, before + BEGUN[name])[1]
    assert unfinished[1] is None
    assert CUT not in str(unfinished[2])


def test_a_list_that_was_cut_keeps_its_whole_calls():
    text = '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "argum'
    assert read("mistral", text, is_truncated=True)[1] == [("f", {}, None), ("g", None, CUT)]


# ------------------------------------------------------------------------------------------------------ types


@pytest.mark.parametrize(
    ("parameter", "written", "value"),
    [
        ("text", "12", "12"), ("text", "null", "null"), ("text", "", ""), ("text", "\n\n x\n\n", "\n x\n"),
        ("count", "12", 12), ("count", " 12 ", 12), ("count", "12.5", "12.5"), ("count", "twelve", "twelve"),
        ("share", "1e-3", 0.001), ("share", "4", 4), ("flag", "True", True), ("flag", "false", False),
        ("flag", "1", "1"),
        ("items", '[1, "a"]', [1, "a"]), ("items", "[1", "[1"), ("point", '{"x": 1}', {"x": 1}), ("point",
        "[1]", "[1]"),
        ("maybe", "None", None), ("maybe", "nothing", "nothing"), ("maybe", "3", "3"), ("either", "3", 3),
        ("either", "x", "x"),
        ("unit", "km", "km"), ("free", "3", 3), ("free", '"3"', '"3"'), ("free", "x y", "x y"), ("unknown",
        "[]", []),
        ("count", "9" * 5000, "9" * 5000), ("items", "[" * 100 + "]" * 100, "[" * 100 + "]" * 100),
    ],
)  # fmt: skip
def test_bare_values_get_the_type_of_the_schema(parameter, written, value):
    text = f"<tool_call>\n<function=f>\n<parameter={parameter}>\n{written}\n</parameter>\n</function>\n</tool_call>"  # noqa: E501
    if written.startswith("\n"):  # one line break at each end belongs to the tags
        text = text.replace(f"\n{written}\n", written)
    assert read("qwen3_coder", text, tools=TYPED)[1] == [("f", {parameter: value}, None)]
    text = f"<tool_call>f\n<arg_key>{parameter}</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>"
    same = written if value == "\n x\n" else value  # here, all line breaks belong to the value
    assert read("glm", text, tools=TYPED)[1] == [("f", {parameter: same}, None)]


# ------------------------------------------------------------------------------------------------------- laws

encodable = st.text(st.characters(codec="utf-8"), max_size=12)
names = st.from_regex(r"[a-z][a-z_0-9]{0,8}", fullmatch=True)
values = json_values(encodable)
words = st.lists(
    st.sampled_from(["Let", "me", "see", "é", "{", "}", "3 < 4", "(x)", ":", '"', "\n"]), max_size=6
).map(" ".join)
messages = st.builds(
    lambda content, calls, reasoning: Message(
        "assistant",
        content,
        tuple(ToolCall(f"callabc{i:02d}", *call) for i, call in enumerate(calls)),
        reasoning=reasoning,
    ),
    words,
    st.lists(st.tuples(names, st.dictionaries(names, values, max_size=3)), max_size=3),
    words,
)


def schemas_of(message: Message) -> list[dict[str, object]]:
    """Schemas that name the type of every argument, one tool for each call's name."""
    kinds = {
        str: "string",
        bool: "boolean",
        int: "integer",
        float: "number",
        list: "array",
        dict: "object",
        type(None): "null",
    }
    return [
        {
            "function": {
                "name": call.name,
                "parameters": {
                    "properties": {k: {"type": kinds[type(v)]} for k, v in call.arguments.items()}
                },
            }
        }
        for call in message.tool_calls
        if call.arguments is not None
    ]


@given(message=messages, name=st.sampled_from(sorted(WRITTEN)))
def test_what_is_written_is_read(message, name):
    if name in ("qwen3_coder", "glm"):  # the first tool of a name decides the types
        unique = {call.name: call for call in reversed(message.tool_calls)}
        message = dataclasses.replace(message, tool_calls=tuple(unique.values()))
    written = get_format(name).write(message)
    parsed = get_format(name).parse(written, turn=0, is_truncated=False, tools=schemas_of(message))
    assert [(call.name, call.arguments, call.error) for call in parsed.tool_calls] == [
        (call.name, call.arguments, None) for call in message.tool_calls
    ]
    assert (parsed.text.strip(), parsed.reasoning.strip()) == (
        message.content.strip(),
        message.reasoning.strip(),
    )


PIECES = {
    "hermes": ["<tool_call>", "</tool_call>", "<tool_call", "call>"],
    "qwen3_coder": ["<tool_call>", "</tool_call>", "<function=f>", "<function=", "</function>",
    "<parameter=a>", "\n</parameter>\n"],
    "llama3_json": ["<|python_tag|>", ";", '{"type": "function", "name": "g", "parameters": {}}', '{"type"'],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "name", "[THINK]", "[/THINK]", '{"name": "f", '
    '"arguments": {}, "id": "abcdefghi"}'],
    "deepseek_v3": ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",  # noqa: E501
    "```json\n", "name\n"],
    "gpt_oss": ["<|start|>assistant", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>",
    " to=functions.f", "analysis"],
    "pythonic": ["<|tool_call_start|>", "<|tool_call_end|>", "\n[f(", "a=", "'''", "'x'", "r'", "1_0", ".5",
    ")]", "\n[f(a=1)]", "a   ="],
    "glm": ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<arg_key>a</arg_key>\n",  # noqa: E501
    "<tool_call>f\n"],
    "gemma4": ["<|tool_call>", "<tool_call|>", '<|"|>', "call:f{", "a:", "<|channel>thought\n", "<channel|>", "<|channel>",  # noqa: E501
    '<|tool_call>call:f{a:<|"|>x<|"|>,b:[1]}<tool_call|>', "-1.5e3"],
    "kimi_k2": ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",  # noqa: E501
    "<|tool_call_argument_begin|>", "functions.f:0", "f:12"],
    "none": [],
}  # fmt: skip
COMMON = [
    '{"name": "f"', '"name"', ', "arguments": ', ', "parameters": ', '{"a": 1}', "{}", "{", "}", "[", "]",
    "(", ")", '"', "'", "\\",
    " ", "\n", "12", "-", "1e", "tru", "True", ",", ":", "=", "é", "<", "</", "think>", "<think>", "</think>",
    "x", "NaN", "\\ud83d",
    "\\u12", " " * 20, "a" * 20, "\ud800", '{"name": "f", "arguments": {"a": [1, "x"]}}', '{"name": "f", '
    '"parameters": {}}',
]  # fmt: skip


@st.composite
def sampled_texts(draw: st.DrawFn) -> tuple[str, str]:
    """A format and a text in its manner: marks and JSON at random, or a written turn with random damage."""
    name = draw(st.sampled_from(TOOL_FORMATS))
    pieces = st.sampled_from(COMMON + 4 * PIECES[name])
    if draw(st.booleans()):
        return name, "".join(draw(st.lists(pieces, max_size=20)))
    text = get_format(name).write(draw(messages))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.sampled_from([0, 1, 2, 5, 30])))
        text = text[:start] + draw(pieces | st.just("")) + text[end:]
    return name, text


@given(sampled_texts(), st.booleans(), st.randoms(use_true_random=False), st.sampled_from([1, 3, 12, 60]))
def test_the_cut_into_pieces_changes_nothing_and_nothing_raises(
    sampled, is_truncated, rng: random.Random, longest
):
    name, text = sampled
    whole = get_format(name).parse(text, turn=1, is_truncated=is_truncated, tools=TYPED)
    parser, deltas, position = TurnParser(get_format(name), turn=1, tools=TYPED), [], 0
    while position < len(text):
        end = position + rng.randint(1, longest)
        deltas += parser.feed(text[position:end])
        position = end
    deltas += parser.finish(is_truncated=is_truncated)
    assert parser.parsed == whole
    assert "".join(delta.text for delta in deltas if isinstance(delta, TextDelta)) == whole.text
    assert "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta)) == whole.reasoning
    assert [delta.call for delta in deltas if isinstance(delta, CallDelta)] == list(whole.tool_calls)
    for call in whole.tool_calls:
        assert (call.arguments is None) == (call.error is not None)
        json.dumps([call.name, call.arguments], ensure_ascii=False, allow_nan=False).encode()
    assert len({call.id for call in whole.tool_calls}) == len(whole.tool_calls)


@pytest.mark.parametrize("name", WRITTEN)
def test_text_and_calls_are_reported_as_soon_as_they_are_whole(name):
    parser = TurnParser(get_format(name), turn=0)
    text = "Hello. " if name != "gpt_oss" else "<|channel|>commentary<|message|>Hello. "
    call = GOOD[name] + {"gpt_oss": "<|call|>"}.get(name, "")
    call = {"gpt_oss": "<|end|><|start|>assistant", "pythonic": "\n"}.get(name, "") + call
    assert "".join(delta.text for character in text for delta in parser.feed(character)).rstrip() == "Hello."
    assert any(isinstance(delta, CallDelta) for character in call for delta in parser.feed(character))


HOSTILE = [
    ("hermes", "<tool_call>{", ""), ("hermes", "é<tool_call>", ""), ("hermes", "</tool_call>",
    '<tool_call>{"name": "'),
    ("qwen3_coder", "<function=a><parameter=b>", ""), ("qwen3_coder", "<tool_call>", ""),
    ("llama3_json", '\n{"name":"é', ""), ("llama3_json", '{"name": "x", "parameters":\n', ""), ("mistral",
    "[TOOL_CALLS][", ""),
    ("deepseek_v3", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{", ""), ("gpt_oss", "to=", ""), ("gpt_oss",
    "<|start|>assistant ", ""),
    ("pythonic", '<|tool_call_start|>[f("', ""), ("pythonic", '<|tool_call_start|>[f("x', ""),
    ("pythonic", "\n[f(a=", ""), ("none", "<think></think>", ""),
    ("hermes", " ", "<tool_call>"),
    ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>", ""), ("glm", "</arg_value>", "<tool_call>f<arg_key>a</arg_key><arg_value>"),  # noqa: E501
    ("glm", "<arg_key>a</arg_key>", "<tool_call>f"), ("glm", "<tool_call>", ""), ("glm", " ", "<tool_call>f<arg_key>"),  # noqa: E501
    ("gemma4", '<|tool_call>call:f{a:<|"|>', ""), ("gemma4", "<|tool_call>call:f{a:[", ""), ("gemma4", "<|channel>", ""),  # noqa: E501
    ("gemma4", "1,", "<|tool_call>call:f{a:["), ("gemma4", "9", "<|tool_call>call:f{a:"),
    ("kimi_k2", "<|tool_call_begin|>f:0<|tool_call_argument_begin|>{", ""), ("kimi_k2", "<|tool_calls_section_begin|>", ""),  # noqa: E501
    ("kimi_k2", "a", "<|tool_call_begin|>"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "unit", "before"), HOSTILE)
def test_half_a_megabyte_of_marks_takes_linear_time(name, unit, before):
    text = before + unit * (500_000 // len(unit))

    def parse() -> None:
        parser = TurnParser(get_format(name), turn=0)
        for start in range(0, len(text), 997):
            parser.feed(text[start : start + 997])
        parser.finish(is_truncated=True)

    assert cpu_s(parse, below=10) < 10  # quadratic time would be minutes


# ------------------------------------------------------------------------------------------ in a conversation

THINKING_TEMPLATE = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n"
    "{%- if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}{{ "
    "message.content }}<|im_end|>\n"
    "{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def test_a_conversation_s_view_keeps_thoughts_apart_and_gives_arguments_their_types():
    tokenizer = build_tiny_tokenizer()
    chat = Chat(
        tokenizer,
        ChatTemplate({"default": THINKING_TEMPLATE}, {}),
        eos_token_ids=[tokenizer.token_to_id("<|im_end|>")],
        tool_format="qwen3_coder",
    )
    conversation = chat.open([Message("user", "How many?")], TYPED)
    conversation.next_prompt()
    said = (
        "Twelve, as <tool_call> "
        "counts.\n</think>\n\nSo:<tool_call><function=f><parameter=text>12</parameter></function></tool_call>"
    )
    ids = chat.encode(said + "<|im_end|>")
    message = conversation.add_generation(ids, is_truncated=False)
    assert dataclasses.replace(message, reasoning="") == Message(
        "assistant", "So:", (ToolCall("call00000", "f", {"text": "12"}),)
    )
    assert message.reasoning.strip() == "Twelve, as <tool_call> counts."
    assert conversation.token_ids[-len(ids) :] == ids


# ------------------------------------------------------------------------------------------------------- auto

SIGNS = [
    ("hermes", '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'),
    ("hermes", "{{ '<tool_call>' + call | tojson + '</tool_call>' }}"),
    ("qwen3_coder", "<tool_call>\n<function=example>\n<parameter=x>\n"),
    (
        "llama3_json",
        '<|start_header_id|>user ... {"name": function name, "parameters": dictionary of arguments}',
    ),
    ("llama3_json", "{{- '<|python_tag|>' + call }}"),
    ("mistral", "[AVAILABLE_TOOLS] ... [TOOL_CALLS] [{"),
    ("mistral", "{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}"),
    ("deepseek_v3", "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>'"),
    ("gpt_oss", "<|start|>assistant<|channel|>commentary json<|message|>{{ x }}<|call|>"),
    ("pythonic", "<|tool_call_start|>[{{ calls }}]<|tool_call_end|>"),
    (
        "pythonic",
        "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]",
    ),
    ("none", "<|start_header_id|>{{ role }}<|end_header_id|>"),
    ("glm", "<tool_call>{{ name }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>"),
    ("gemma4", "<|tool_call>call:{{ name }}{"),
    ("kimi_k2", "<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>{{ arguments }}<|tool_call_end|>"),
    ("none", "<tool_call><function={{ name }}>"),
    ("none", "<|im_start|>{{ message.role }}"),
]


@pytest.mark.parametrize(("name", "template"), SIGNS)
def test_the_template_s_marks_tell_the_format(name, template):
    assert detect_format(f"{{%- for message in messages %}}{template}{{%- endfor %}}") == name


def test_unknown_formats_are_refused():
    with pytest.raises(
        PluginError, match=r"unknown tool format 'xml'; known: deepseek_v3, gemma4, glm, .*, none, "
    ):
        get_format("xml")


# -------------------------------------------------------------------------------------------- unclosed values

REMEMBER = [
    {
        "type": "function",
        "function": {
            "name": "remember",
            "parameters": {
                "type": "object",
                "properties": {name: {"type": "string"} for name in ("alpha", "beta", "gamma")},
            },
        },
    }
]
MARKS = (
    *("<parameter=", "</parameter>", "<function=", "</function>", "<tool_call>", "</tool_call>", ">", "\n"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", '<|"|>', "<|tool_call>", "<tool_call|>"),
    *('"', "'", "{", "}", "[", "]", "(", ")", ",", ":", "=", '": "', "', ", "='"),
    *("<|message|>", "<|call|>", "[TOOL_CALLS]", "<｜tool▁sep｜>", "```", "<|tool_call_end|>"),
)


@given(
    name=st.sampled_from(sorted(WRITTEN)),
    text=st.sampled_from(["V{}", "it's V{}", "V{}\nmore", "</content> V{}"]),
    mark=st.sampled_from(MARKS),
    which=st.integers(0, 12),
    instead=st.sampled_from(["", "</content>", " "]),
    num_calls=st.integers(1, 2),
)
def test_no_value_takes_in_another_parameter_whatever_mark_is_missing(
    name, text, mark, which, instead, num_calls
):
    names = ("alpha", "beta", "gamma")
    arguments = {key: text.format(index) for index, key in enumerate(names)}
    calls = tuple(ToolCall(f"call0000{number}", "remember", arguments) for number in range(num_calls))
    written = get_format(name).write(Message("assistant", "", calls))
    pieces = written.split(mark)
    if len(pieces) > 1:
        place = which % (len(pieces) - 1)
        written = mark.join(pieces[: place + 1]) + instead + mark.join(pieces[place + 1 :])
    for _, found, error in read(name, written, tools=REMEMBER)[1]:
        if error is not None:
            continue
        assert isinstance(found, dict)
        for value in found.values():
            words = [*names, *(f"V{index}" for index in range(3)), "remember"]
            held = [word for word in words if word in str(value)]
            assert len(held) <= 1, (written, found)


UNCLOSED = [
    (
        "qwen3_coder",
        "<tool_call>\n<function=remember>\n<parameter=alpha>\n1\n<parameter=beta>\n2\n</parameter>\n"
        "</function>\n</tool_call>",
        "the value of 'alpha' is not closed by </parameter>: <parameter=beta> follows",
    ),
    (
        "qwen3_coder",
        '<tool_call>\n<function=remember>\n<parameter=alpha>\n1\n<parameter name="beta">\n2\n</parameter>\n'
        "</function>\n</tool_call>",
        "the value of 'alpha' is not closed by </parameter>: <parameter=beta> follows",
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=remember>\n<parameter=alpha>\n1\n</alpha>\n</function>\n</tool_call>",
        "the value of 'alpha' is not closed by </parameter>: </alpha> follows",
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=remember>\n<parameter=alpha>\n1\n</tool_call>\nor\n<tool_call>\n"
        "<function=now>\n</function>\n</tool_call>",
        "the value of 'alpha' is not closed by </parameter>: </tool_call> follows",
    ),
    (
        "glm",
        "<tool_call>remember\n<arg_key>alpha</arg_key>\n<arg_value>1\n<arg_key>beta</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>",
        "the value of 'alpha' is not closed by </arg_value>: <arg_key>beta</arg_key> follows",
    ),
    (
        "pythonic",
        "[remember(alpha='1, beta='2')]",
        "the calls are not a Python list of calls: expected ) at character 26",
    ),
    (
        "llama3_json",
        '{"type": "function", "function": {"name": "remember", "parameters": {"alpha": "1"}}}',
        'a call must be written as {"name": ..., "parameters": {...}}, without "function"',
    ),
    (
        "llama3_json",
        '{"function": "remember", "parameters": {"alpha": "1"}}',
        'a call must be written as {"name": ..., "parameters": {...}}, without "function"',
    ),
    (
        "pythonic",
        '{"type": "function", "name": "remember", "parameters": {"alpha": "1"}}',
        "a call must be written as [name(key=value)], not as JSON",
    ),
]


@pytest.mark.parametrize(("name", "text", "error"), UNCLOSED)
def test_the_model_is_told_which_value_it_did_not_close(name, text, error):
    ((called, arguments, told),) = read(name, text, tools=REMEMBER)[1]
    assert (called, arguments) == ("remember", None)
    assert told == error


def test_a_value_may_be_text_of_another_tool_s_call():
    inner = "<parameter=city>\nBern\n</parameter>"
    value = f"<parameter=alpha>\n{inner}\n</parameter>"
    text = f"<tool_call>\n<function=remember>\n{value}\n</function>\n</tool_call>"
    assert read("qwen3_coder", text, tools=REMEMBER)[1] == [("remember", {"alpha": inner}, None)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": ""}</tool_call>'),
        ("kimi_k2", "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|><|tool_call_end|>"),
        ("llama3_json", '{"parameters": {}, "name": "now"}'),
        ("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": null}]'),
    ],
)
def test_no_arguments_are_an_empty_object(name, text):
    assert read(name, text)[1] == [("now", {}, None)]


@pytest.mark.parametrize(
    ("written", "value"),
    [("['a', 'b']", ["a", "b"]), ("[1, None, True]", [1, None, True]), ("[a]", "[a]"), ("('a',)", ["a"])],
)
def test_lists_may_be_spelt_as_in_python(written, value):
    inner = f"<parameter=items>\n{written}\n</parameter>"
    text = f"<tool_call>\n<function=f>\n{inner}\n</function>\n</tool_call>"
    assert read("qwen3_coder", text, tools=TYPED)[1] == [("f", {"items": value}, None)]


@pytest.mark.parametrize("name", WRITTEN)
def test_without_tools_a_call_is_text_as_it_was_written(name):
    calls = (ToolCall("call00000", "f", {"a": "b"}),)
    written = get_format(name).write(Message("assistant", "so", calls, reasoning="hm"))
    parsed = get_format(name).parse(written, turn=0, is_truncated=False, reads_calls=False)
    assert parsed.tool_calls == ()
    assert parsed.reasoning.strip() == "hm"
    only = get_format(name).write(Message("assistant", "", calls))
    text = get_format(name).parse(only, turn=0, is_truncated=False, reads_calls=False).text
    assert text.strip() == only.strip()
