"""The formats in which models write tool calls, and detection of the format that a chat template shows."""

from __future__ import annotations

import re
from collections.abc import Mapping

from agentrl.chat.formats.deepseek_v3 import DeepSeekV3
from agentrl.chat.formats.gemma4 import Gemma4
from agentrl.chat.formats.glm import Glm
from agentrl.chat.formats.gpt_oss import GptOss
from agentrl.chat.formats.hermes import Hermes
from agentrl.chat.formats.kimi_k2 import KimiK2
from agentrl.chat.formats.llama3_json import Llama3Json
from agentrl.chat.formats.mistral import Mistral
from agentrl.chat.formats.plain import Plain
from agentrl.chat.formats.pythonic import Pythonic
from agentrl.chat.formats.qwen3_coder import Qwen3Coder
from agentrl.chat.parsing import ToolFormat
from agentrl.errors import ConfigError

NO_FORMAT = "none"
"""Format of a template that shows no tool calls: all sampled text is text or thought."""

FORMATS: Mapping[str, ToolFormat] = {
    tool_format.name: tool_format
    for tool_format in (
        Hermes(),
        Qwen3Coder(),
        Llama3Json(),
        Mistral(),
        DeepSeekV3(),
        GptOss(),
        Pythonic(),
        Glm(),
        Gemma4(),
        KimiK2(),
        Plain(),
    )
}

# Text that only the templates of one family contain; the first match decides. Several families write
# `<tool_call>`, so it comes last.
_SIGNS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("deepseek_v3", re.compile("<｜tool▁calls▁begin｜>|<｜tool▁call▁begin｜>")),
    ("gpt_oss", re.compile(r"<\|channel\|>(?:.|\n)*<\|call\|>")),
    ("mistral", re.compile(r"\[TOOL_CALLS\]")),
    ("pythonic", re.compile(r"<\|tool_call_start\|>|<\|tool_list_start\|>|\[func_name1\(params_name1=")),
    ("llama3_json", re.compile(r"<\|start_header_id\|>(?:.|\n)*\"parameters\": |<\|python_tag\|>")),
    ("qwen3_coder", re.compile(r"<function=(?:.|\n)*<parameter=")),
    ("glm", re.compile("<arg_key>")),
    ("gemma4", re.compile(r"<\|tool_call>call:")),
    ("kimi_k2", re.compile(r"<\|tool_call_argument_begin\|>")),
    (NO_FORMAT, re.compile("<function=")),
    ("hermes", re.compile("<tool_call>")),
)


def get_format(name: str) -> ToolFormat:
    """Return the format registered as `name`.

    Raises:
        ConfigError: the name is unknown; the message lists the known names.
    """
    if name not in FORMATS:
        raise ConfigError(f"unknown tool format {name!r}; known: auto, {', '.join(sorted(FORMATS))}")
    return FORMATS[name]


def detect_format(template: str) -> str:
    """Return the name of the format that a chat template shows; NO_FORMAT if it has no parser."""
    return next((name for name, sign in _SIGNS if sign.search(template)), NO_FORMAT)
