"""The formats in which models write tool calls: name -> parser."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.chat import hermes
from agentrl.chat.parsing import ParsedTurn, Parser
from agentrl.errors import ConfigError

NO_FORMAT = "none"
"""Format of a template that shows no tool calls: everything sampled is text."""


def _parse_nothing(text: str, *, turn: int, is_truncated: bool) -> ParsedTurn:
    return ParsedTurn(text, ())


FORMATS: Mapping[str, Parser] = {"hermes": hermes.parse, NO_FORMAT: _parse_nothing}


def get_parser(name: str) -> Parser:
    """Return the parser registered as `name`; raise ConfigError with the list when unknown."""
    if name not in FORMATS:
        raise ConfigError(f"unknown tool format {name!r}; known: auto, {', '.join(sorted(FORMATS))}")
    return FORMATS[name]


def detect_format(template: str) -> str:
    """Return the format that a chat template's text shows to the model, NO_FORMAT if it is none of ours.

    `<function=` inside of `<tool_call>` is another dialect with the same tags (XML arguments instead of JSON).
    """
    return "hermes" if hermes.OPEN in template and "<function=" not in template else NO_FORMAT
