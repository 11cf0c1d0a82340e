"""A typed function is a tool: what the model reads of it, what the function is called with, what the model
gets back.
"""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Any, Literal, Optional

import jsonschema
import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from agentrl.errors import PluginError, ToolError
from agentrl.plugins import Tool, ToolResult, WrongCall, function_tool, load_plugins, tool, tool_of
from agentrl.plugins.contained import PluginQuit


class Point(BaseModel):
    """A place."""

    x: int = Field(description="to the right")
    title: str = "home"


class Tree(BaseModel):
    value: int
    children: list[Tree] = []


def run(cls: type[Tool], **arguments: Any) -> ToolResult:
    """Call it as the rollout does: under the runtime it asks for."""
    call = functools.partial(cls().call, arguments)
    return asyncio.run(call()) if cls.runtime == "asyncio" else trio.run(call)


# ------------------------------------------------------------------------------------------------- the schema


def google(city: str, days: int = 3, unit: Literal["C", "F"] = "C", tags: Optional[list[str]] = None) -> str:  # noqa: UP045
    """Forecast the weather.

    Knows all of Europe.

    Args:
        city: Name of the city,
            in English.
        days (int): How far ahead.

    Returns:
        The forecast.
    """
    return f"{city} {days} {unit} {tags}"


def numpy_style(
    city: str, days: int = 3, unit: Literal["C", "F"] = "C", tags: list[str] | None = None
) -> str:
    """Forecast the weather.

    Knows all of Europe.

    Parameters
    ----------
    city : str
        Name of the city,
        in English.
    days : int, optional
        How far ahead.

    Returns
    -------
    str
        The forecast.
    """
    return f"{city} {days} {unit} {tags}"


def sphinx(city: str, *, days: int = 3, unit: Literal["C", "F"] = "C", tags: list[str] | None = None) -> str:
    """Forecast the weather.

    Knows all of Europe.

    :param city: Name of the city,
        in English.
    :param int days: How far ahead.
    :returns: The forecast.
    """
    return f"{city} {days} {unit} {tags}"


@pytest.mark.parametrize("function", [google, numpy_style, sphinx])
def test_every_style_of_docstring_gives_the_same_tool(function):
    cls = function_tool(function)
    assert cls().schema() == {
        "type": "function",
        "function": {
            "name": function.__name__,
            "description": "Forecast the weather.\n\nKnows all of Europe.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Name of the city, in English."},
                    "days": {"type": "integer", "default": 3, "description": "How far ahead."},
                    "unit": {"enum": ["C", "F"], "type": "string", "default": "C"},
                    "tags": {
                        "anyOf": [{"items": {"type": "string"}, "type": "array"}, {"type": "null"}],
                        "default": None,
                    },
                },
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    assert run(cls, city="Bern", tags=["a"]).text == "Bern 3 C ['a']"


def test_nested_models_stand_where_they_are_used():
    def draw(points: list[Point], origin: Point, when: date, color: Annotated[str, "a name"] = "red") -> None:
        """Draw.

        Args:
            origin: Where it begins.
            color: overruled
        """

    parameters = function_tool(draw).parameters
    point = {
        "type": "object",
        "description": "A place.",
        "properties": {
            "x": {"type": "integer", "description": "to the right"},
            "title": {"type": "string", "default": "home"},
        },
        "required": ["x"],
    }
    assert "$defs" not in parameters
    assert parameters["properties"]["points"] == {"type": "array", "items": point}
    assert parameters["properties"]["origin"] == {**point, "description": "Where it begins."}
    assert parameters["properties"]["when"] == {"type": "string", "format": "date"}
    assert parameters["properties"]["color"]["description"] == "a name"


def test_a_model_that_contains_itself_keeps_its_reference():
    def total(tree: Tree) -> int:
        """Add up."""
        return tree.value + sum(total(child) for child in tree.children)

    cls = function_tool(total)
    nested = {"value": 1, "children": [{"value": 2, "children": [{"value": 4}]}]}
    jsonschema.Draft202012Validator.check_schema(dict(cls.parameters))
    validator = jsonschema.Draft202012Validator(dict(cls.parameters))
    assert validator.is_valid({"tree": nested})
    assert not validator.is_valid(
        {"tree": {"value": 1, "children": [{"value": 2, "children": [{"value": "four"}]}]}}
    )
    assert run(cls, tree=nested).text == "7"


def test_constraints_and_descriptions_of_annotated():
    def roll(sides: Annotated[int, Field(ge=2, le=100, description="of the die")] = 6) -> int:
        """Roll a die.

        Args:
            sides: overruled
        """
        return sides

    sides = function_tool(roll).parameters["properties"]["sides"]
    assert sides == {
        "type": "integer",
        "minimum": 2,
        "maximum": 100,
        "description": "of the die",
        "default": 6,
    }


TYPES = {
    int: st.integers(-(2**53), 2**53),
    str: st.text(),
    bool: st.booleans(),
    float: st.floats(allow_nan=False, allow_infinity=False),
    list[int]: st.lists(st.integers(-9, 9)),
    dict[str, bool]: st.dictionaries(st.text(), st.booleans()),
    Literal["a", "b"]: st.sampled_from(["a", "b"]),
    int | None: st.none() | st.integers(-9, 9),
}
NAMES = st.sampled_from(
    ["json", "_x", "self", "model_config", "schema", "arguments", "a", "copy", "title", "name", "runtime"]
)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_whatever_the_schema_takes_the_function_gets(data):
    """Names and types of any kind: what is valid by the schema arrives as it is, what is left out keeps the
    function's default.
    """
    types = data.draw(st.dictionaries(NAMES, st.sampled_from(list(TYPES)), max_size=5))
    values = {name: data.draw(TYPES[of], label=name) for name, of in types.items()}
    optional = data.draw(st.sets(st.sampled_from(list(types)))) if types else set()
    given_names = data.draw(st.sets(st.sampled_from(list(types)))) if types else set()
    default = values  # any object will do, if it is the same one

    scope: dict[str, Any] = {"seen": {}, "types": types, "default": default}
    declared = ", ".join(
        f"{name}: types[{name!r}]" + (f" = default[{name!r}]" if name in optional else "") for name in types
    )
    exec(f"def f(*, {declared}):\n  'Do.'\n  seen.update(locals())" if types else "def f():\n  'Do.'", scope)
    cls = function_tool(scope["f"])

    arguments = {name: value for name, value in values.items() if name in given_names}
    is_valid = jsonschema.Draft202012Validator(dict(cls.parameters)).is_valid(arguments)
    assert is_valid == (set(types) - optional <= given_names)
    result = run(cls, **json.loads(json.dumps(arguments)))
    assert result.is_error != is_valid
    if is_valid:
        assert scope["seen"] == values
        assert all(type(scope["seen"][name]) is type(values[name]) for name in values)
    assert not jsonschema.Draft202012Validator(dict(cls.parameters)).is_valid({**arguments, "unknown": 1})
    assert run(cls, **arguments, unknown=1).is_error


# --------------------------------------------------------------------------------------------------- the call


def test_arguments_arrive_as_the_types_that_were_asked_for():
    @tool
    def describe(point: Point, when: date) -> str:
        """Describe."""
        return f"{type(point).__name__} {point.x} {when.year}"

    cls = tool_of(describe)
    assert run(cls, point={"x": 3}, when="2026-05-01").text == "Point 3 2026"
    assert describe(Point(x=1), date(2020, 1, 1)) == "Point 1 2020"  # still a function
    wrong = run(cls, point={"x": "three"}, when="2026-05-01")
    assert wrong.is_error
    assert wrong.text.startswith("not run: point.x: Input should be a valid integer")
    assert '"properties":{"point":{' in wrong.text


@dataclass
class Weather:
    sunny: bool
    day: date


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is", "as it is"),
        (None, ""),
        (42, "42"),
        (True, "true"),
        ({"a": [1, 2.5, None]}, '{"a":[1,2.5,null]}'),
        ("é", "é"),
        (["é"], '["é"]'),
        (Point(x=1), '{"x":1,"title":"home"}'),
        (Weather(True, date(2026, 5, 1)), '{"sunny":true,"day":"2026-05-01"}'),
        (np.arange(3), "[0,1,2]"),
        ({"best": np.int64(3)}, '{"best":3}'),
    ],
)
def test_what_a_function_returns_is_text_or_json(value, text):
    def give():
        """Give."""
        return value

    assert run(function_tool(give)) == ToolResult(text)


def test_a_result_passes_as_it_is():
    result = ToolResult("x", reward=0.5, metrics={"m": 1.0}, is_final=True)

    async def give():
        """Give."""
        return result

    assert run(function_tool(give)) is result


def test_what_is_no_json_is_a_broken_tool():
    def give():
        """Give."""
        return object()

    with pytest.raises(
        ToolError, match="tool 'give' returned object; return a text, a ToolResult, or data with a JSON form"
    ):
        run(function_tool(give))


async def test_a_blocking_function_runs_in_a_thread_and_two_at_once():
    """Each call waits for the other: alone, or in one thread, neither would end."""
    barrier = threading.Barrier(2, timeout=20)
    threads: list[int] = []

    def meet(name: str) -> str:
        """Meet."""
        threads.append(threading.get_ident())
        barrier.wait()
        return name

    cls = function_tool(meet)
    texts: list[str] = []

    async def call(name: str) -> None:
        texts.append((await cls().call({"name": name})).text)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(call, "a")
        nursery.start_soon(call, "b")
    assert sorted(texts) == ["a", "b"]
    assert len({*threads, threading.get_ident()}) == 3


def test_async_functions_run_where_they_say():
    @tool
    async def under_asyncio() -> str:
        """Say where."""
        await asyncio.sleep(0)
        return "asyncio"

    @tool(runtime="trio", name="elsewhere", description="Say it.", is_idempotent=True)
    async def under_trio() -> str:
        await trio.sleep(0)
        return "trio"

    first, second = tool_of(under_asyncio), tool_of(under_trio)
    assert (first.runtime, first.name, first.is_idempotent) == ("asyncio", "under_asyncio", False)
    assert (second.runtime, second.name, second.is_idempotent, second.description) == (
        "trio",
        "elsewhere",
        True,
        "Say it.",
    )
    assert (run(first).text, run(second).text) == ("asyncio", "trio")


@pytest.mark.parametrize("error", [ValueError("no"), WrongCall("no"), ToolError("no")])
def test_what_a_function_raises_is_for_the_rollout_to_judge(error):
    def fail() -> str:
        """Fail."""
        raise error

    with pytest.raises(type(error), match="no"):
        run(function_tool(fail))


def test_a_function_cannot_end_the_process():
    def leave() -> str:
        """Leave."""
        raise SystemExit(3)

    with pytest.raises(PluginQuit, match=r"it called sys.exit\(3\)"):
        run(function_tool(leave))


# -------------------------------------------------------------------------------------------- what is refused


def untyped(a, b: int) -> str:
    """Do."""


def variadic(*rest: int) -> str:
    """Do."""


def keywords(**rest: int) -> str:
    """Do."""


def positional(a: int, /) -> str:
    """Do."""


def unknown_name(a: NoSuchType) -> str:  # noqa: F821
    """Do."""


def no_schema(a: threading.Lock) -> str:
    """Do."""


def callback(a: type(print)) -> str:
    """Do."""


def field_default(a: int = Field(3, ge=1)) -> str:
    """Do."""


def undocumented(a: int) -> str:
    return ""


def generator(a: int):
    """Do."""
    yield a


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (untyped, {}, "parameter 'a' has no annotation; write `a: str`"),
        (variadic, {}, r"parameter `\*rest: '?int'?` cannot be passed by name"),
        (keywords, {}, r"parameter `\*\*rest: '?int'?` cannot be passed by name"),
        (positional, {}, "parameter `a: '?int'?` cannot be passed by name"),
        (unknown_name, {}, "an annotation cannot be read: name 'NoSuchType' is not defined"),
        (no_schema, {}, "tool function 'no_schema'"),
        (callback, {}, "tool function 'callback'"),
        (field_default, {}, r"parameter 'a': write Annotated\[..., Field"),
        (undocumented, {}, "has no description"),
        (generator, {}, "is a generator"),
        (google, {"runtime": "trio"}, "a plain function runs in a thread"),
        (google, {"name": "two words"}, "1 to 64 letters"),
        (print, {}, "is not a Python function"),
        (Point, {}, "is not a Python function"),
    ],
)
def test_what_cannot_be_a_tool_is_refused_in_one_line(function, options, message):
    with pytest.raises(PluginError, match=message) as caught:
        function_tool(function, **options)
    assert "\n" not in str(caught.value)


# ----------------------------------------------------------------------------------------------- registration

FILE = '''
import functools
from agentrl.plugins import tool, WrongCall

@tool
def shout(text: str) -> str:
    """Say it loud."""
    return text.upper()

@tool(name="whisper_it")
async def whisper(text: str) -> str:
    """Say it quietly."""
    return text.lower()

def plain(text: str) -> str:
    """Say it."""
    return text
'''


def test_a_file_of_functions_is_a_file_of_tools(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    tools = load_plugins([str(tmp_path / "mine.py")]).tools
    assert {"shout", "whisper_it"} <= set(tools.names())
    assert "plain" not in tools.names()
    assert run(tools.get("shout"), text="Hey").text == "HEY"
    assert run(tools.get("whisper_it"), text="Hey").text == "hey"
    assert run(tools.get(f"{tmp_path / 'mine.py'}:plain"), text="Hey").text == "Hey"
    assert tools.get(f"{tmp_path / 'mine.py'}:whisper").name == "whisper_it"


def test_a_decorator_above_the_tool_would_be_lost(tmp_path):
    above = (
        "\ndef twice(f):\n    return functools.wraps(f)(lambda *a, **k: f(*a, **k) * 2)\n\nshout = "
        "twice(shout)\n"
    )
    (tmp_path / "above.py").write_text(FILE + above)
    with pytest.raises(PluginError, match="'shout' has a decorator above @tool"):
        load_plugins([str(tmp_path / "above.py")])


def test_a_decorator_below_the_tool_is_part_of_it():
    def twice(function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            return function(*args, **kwargs) * 2

        return call

    @tool
    @twice
    def echo(text: str) -> str:
        """Echo."""
        return text

    assert run(tool_of(echo), text="ab").text == "abab"
