"""Generated conversations for checking whether a chat template only appends.

They cover everything that agents, tools and interaction partners may cause.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.chat.parsing import call_id
from agentrl.chat.renderer import Tools
from agentrl.types import JsonObject, Message, ToolCall

Messages = tuple[Message, ...]

MAX_TURNS = 4
MAX_CALLS = 3

PROBE_TOOLS: Tools = (
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks something up: <words>, naïve ones too.",
            "parameters": {
                "type": "object",
                "properties": {
                    "words": {"type": "string", "description": "What to look for."},
                    "count": {"type": "integer"},
                    "options": {"type": "object", "properties": {}},
                    "places": {"type": "array", "items": {"type": "string"}},
                    "exact": {"type": "boolean"},
                },
                "required": ["words"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "now",
            "description": "The time.",
            "parameters": {"type": "object", "properties": {}},
        },
    },
)
"""Tools for a check without tools of its own."""

_SAID = (
    "Done.",
    "It is 4.",
    "Naïve 日本語 – 🙂",
    "a\nb\n\nc",
    "x = {1: '2'}",
    'He said "no".',
    "So  many   spaces",
    "été\u0301 \u200d",
)
_GIVEN = (*_SAID, "", " leading", "trailing\n\n", "\n", "{}", "null", "<b>bold</b> & more", "0", "a\tb\\n")
_THOUGHT = ("Let me see.", "Hm.\n\nFirst, 2 + 2.", "Überlegen: 思考", "{'maybe': [1]}", "wait  what?")
_WORDS = (
    "sum",
    "naïve 日本",
    'a "quoted" word',
    "line\nbreak",
    "back\\slash",
    "a } brace {",
    "<b>tag</b>",
    "it's",
)


@dataclass(frozen=True, slots=True)
class ProbeScope:
    """What the generated conversations may contain.

    Attributes:
        tools: schemas shown; without tools there are no tool messages.
        thinks: assistant turns may contain thoughts.
        has_user_turns: a user may speak again.
        has_system: a system message may come first.
        control: texts that mean something to the tokenizer or template, to be put into contents.
    """

    tools: Tools
    thinks: bool
    has_user_turns: bool
    has_system: bool
    control: tuple[str, ...]


def generate(rng: random.Random, scope: ProbeScope) -> Messages:
    """Return a random conversation: a prompt, then up to MAX_TURNS turns.

    Tool results or a user message follow every turn but the last.
    """
    messages = [Message("system", _content(rng, scope))] if scope.has_system and rng.random() < 0.5 else []
    messages.append(Message("user", _content(rng, scope)))
    num_turns = rng.randint(0, MAX_TURNS)
    for turn in range(num_turns):
        calls = _calls(rng, scope, turn)
        text = rng.choice(_SAID) if not calls or rng.random() < 0.4 else ""
        thought = rng.choice(_THOUGHT) if scope.thinks and rng.random() < 0.6 else ""
        messages.append(Message("assistant", text, calls, reasoning=thought))
        messages += [
            Message("tool", _content(rng, scope), tool_call_id=call.id, name=call.name) for call in calls
        ]
        if scope.has_user_turns and (not calls or rng.random() < 0.2) and turn + 1 < num_turns:
            messages.append(Message("user", _content(rng, scope)))
        elif not calls:
            break
    return tuple(messages)


def _content(rng: random.Random, scope: ProbeScope) -> str:
    """Return the content of a user or tool message, sometimes with a control token inside."""
    text = rng.choice(_GIVEN)
    return (
        f"{text} {rng.choice(scope.control)} {rng.choice(_GIVEN)}"
        if scope.control and rng.random() < 0.2
        else text
    )


def _calls(rng: random.Random, scope: ProbeScope, turn: int) -> tuple[ToolCall, ...]:
    if not scope.tools or rng.random() < 0.35:
        return ()
    functions = [rng.choice(scope.tools)["function"] for _ in range(rng.randint(1, MAX_CALLS))]
    return tuple(
        ToolCall(call_id(turn, i), str(function["name"]), _arguments(rng, function))
        for i, function in enumerate(functions)
    )


def _arguments(rng: random.Random, function: Mapping[str, Any]) -> JsonObject:
    properties = function.get("parameters", {}).get("properties", {})
    required = function.get("parameters", {}).get("required", ())
    return {
        name: _value(rng, schema.get("type"))
        for name, schema in properties.items()
        if name in required or rng.random() < 0.5
    }


def _value(rng: random.Random, kind: Any) -> Any:
    values: Mapping[str, Sequence[Any]] = {
        "integer": (0, 7, -12, 10**12),
        "number": (0.5, -3, 1e-9),
        "boolean": (True, False),
        "object": ({}, {"deep": {"er": [1, None, {"é": "ü"}]}}, {"a": "b"}),
        "array": ([], ["Paris", "北京"], [1, [2, [3]]]),
    }
    return rng.choice(values[kind]) if isinstance(kind, str) and kind in values else rng.choice(_WORDS)
