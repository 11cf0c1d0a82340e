"""Chat templates: the Jinja text of a tokenizer folder, rendered exactly as by `transformers`.

`transformers` itself is not imported.
"""

from __future__ import annotations

import copy
import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext

from agentrl.chat.bounded import MAX_SOURCE, BoundedEnvironment, begin_render
from agentrl.chat.codec import TURN
from agentrl.chat.packaged import PACKAGED, find_template
from agentrl.chat.recent import Recent
from agentrl.chat.template_arguments import check_names, json_copy, parse_all
from agentrl.errors import ConfigError, concerning
from agentrl.types import JsonObject

TemplateMessage = dict[str, Any]

TEMPLATE_CHOICES = f"a packaged template ({', '.join(PACKAGED)}) or a Jinja file"

_FAILURES = (
    *(jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError),
    *(RecursionError, MemoryError),
)
"""Exceptions raised by Jinja or by values used in a template."""


class TemplateRefusal(ConfigError):
    """The template refuses messages, or fails on them. `reason` is the template's own message."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason or message

    def __reduce__(
        self,
    ) -> tuple[
        object, ...
    ]:  # pickling passes only the exception's arguments, which do not include the reason
        return (TemplateRefusal, (str(self), self.reason))


class ChatTemplate:
    """A compiled chat template and the special tokens it may use (`bos_token`, `eos_token`, ...).

    A folder may have a second template named `tool_use`, which is used if there are tools. Content is passed
    as text. If the template shows no text, but only lists of parts, as the templates of vision models do,
    content is passed as one text part.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Compile `sources` (name -> Jinja text; at least `default`).

        Raises:
            ConfigError: there is no default, or the Jinja text does not compile.
        """
        if "default" not in sources:
            raise ConfigError(
                f"no default chat template; found: {', '.join(sorted(sources)) or 'none'}; set "
                f"model.chat_template to {TEMPLATE_CHOICES}"
            )
        self.sources = dict(sources)
        self.special_tokens = dict(special_tokens)
        self._compiled = _compile(sources)
        for compiled in self._compiled.values():  # each render copies them, which takes Jinja's ChainMap long
            compiled.globals = dict(compiled.globals)
        self.arguments: JsonObject = {}
        self._roles_with_parts: frozenset[str] = frozenset()
        # Most conversations of a run pass the same list of tools.
        self._shown_tools: Recent[Sequence[Mapping[str, Any]], list[_Tool]] = Recent(_shown_tools)
        self._choose_contents()

    def with_arguments(self, arguments: Mapping[str, Any]) -> ChatTemplate:
        """Return this template with `arguments` in each render, in addition to its own and before them.

        They are what `apply_chat_template` takes as further arguments, such as `enable_thinking`.

        Raises:
            ConfigError: the template reads no such variable, or a value is no JSON value.
        """
        if not arguments:
            return self
        check_names(arguments, parse_all(_environment(), self.sources.values()), self.special_tokens)
        other = copy.copy(self)
        other.arguments = {**self.arguments, **json_copy(arguments)}
        other._roles_with_parts = frozenset()
        other._choose_contents()
        return other

    @property
    def text(self) -> str:
        """All Jinja text, for finding the tokens and marks that the template writes."""
        return "\n".join(self.sources.values())

    def render(
        self,
        messages: Sequence[TemplateMessage],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool,
    ) -> str:
        """Return the text of the conversation; equals `apply_chat_template(..., tokenize=False)`.

        Raises:
            TemplateRefusal: the template refuses these messages or fails on them.
        """
        compiled = self._compiled["tool_use" if tools and "tool_use" in self._compiled else "default"]
        # None, never an empty list: templates test both `if tools` and `if tools is not none`
        shown = list(self._shown_tools.get(tools)) if tools else None
        given = (
            [self._with_parts(message) for message in messages] if self._roles_with_parts else list(messages)
        )
        names = {
            "messages": given,
            "tools": shown,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        context = compiled.new_context({**self.special_tokens, **names, **self.arguments})
        begin_render()
        try:
            return "".join(compiled.root_render_func(context))
        except _FAILURES as error:
            roles = " ".join(str(message["role"]) for message in messages)
            reason = f"{type(error).__name__}: {error}"
            failing = (
                f"fails on the roles [{roles}]"
                if messages
                else "cannot begin a conversation with the assistant; begin it with system or user"
            )
            raise TemplateRefusal(f"the chat template {failing}: {reason}", reason) from error
        finally:
            # Macros hold the context: a reference cycle would keep the messages alive until garbage
            # collection
            context.vars.clear()
            begin_render()  # forgets the sizes of what the messages contain

    def _choose_contents(self) -> None:
        for role, before, after in _CONTENT_PROBES:
            self._choose_content(role, before, after)

    def _choose_content(
        self, role: str, before: Sequence[TemplateMessage], after: Sequence[TemplateMessage]
    ) -> None:
        """Determine how to pass content of `role`: as text if possible, else as parts.

        `before` and `after` are the messages around the probe.
        """
        probe = [*before, {"role": role, "content": TURN, "tool_call_id": "call00000"}, *after]
        others = self._roles_with_parts
        if not self._shows_turn(probe):
            self._roles_with_parts = others | {role}
            if not self._shows_turn(probe):
                self._roles_with_parts = others

    def _shows_turn(self, probe: Sequence[TemplateMessage]) -> bool:
        try:
            return TURN in self.render(probe, add_generation_prompt=False)
        except TemplateRefusal:
            return False

    def _with_parts(self, message: TemplateMessage) -> TemplateMessage:
        content = message["content"]
        if message["role"] not in self._roles_with_parts or not isinstance(content, str):
            return message
        return {**message, "content": [{"type": "text", "text": content}]}


_QUESTION: TemplateMessage = {"role": "user", "content": "?"}
_ASKING: TemplateMessage = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {}}}],
}
_CONTENT_PROBES: Sequence[tuple[str, Sequence[TemplateMessage], Sequence[TemplateMessage]]] = (
    ("user", (), ()),
    ("system", (), (_QUESTION,)),
    ("assistant", (_QUESTION,), ()),
    ("tool", (_QUESTION, _ASKING), ()),
)
"""Role, messages before and messages after of each probe. The
user comes first, because the other probes contain a question.
"""


def load_template(folder: Path, *, template_file: str | None = None) -> ChatTemplate:
    """Read the template of a tokenizer folder.

    The first that exists is used: `template_file`, `chat_template.jinja`, `tokenizer_config.json`.
    `template_file` may also be the name of a packaged template.

    Raises:
        ConfigError: no file contains a template, or a file is missing or malformed.
    """
    config = read_json(folder / "tokenizer_config.json")
    special_tokens = _special_tokens({**read_json(folder / "special_tokens_map.json"), **config})
    return ChatTemplate(_sources(folder, config.get("chat_template"), template_file), special_tokens)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} if the file does not exist.

    Raises:
        ConfigError: the file is malformed.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must contain a JSON object, not {type(value).__name__}")
    return value


def _sources(folder: Path, configured: Any, template_file: str | None) -> dict[str, str]:
    if template_file is not None:
        with concerning("model.chat_template"):
            file = find_template(template_file)
        try:
            return {"default": file.read_text(encoding="utf-8")}
        except OSError as error:
            raise ConfigError(
                f"model.chat_template {template_file!r} cannot be read: {error.strerror}"
            ) from error
    own_file = folder / "chat_template.jinja"
    if own_file.is_file():
        further = {
            path.stem: path.read_text(encoding="utf-8")
            for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))
        }
        return {**further, "default": own_file.read_text(encoding="utf-8")}
    if isinstance(configured, str):
        return {"default": configured}
    if isinstance(configured, list):
        return {entry["name"]: entry["template"] for entry in configured}
    raise ConfigError(
        f"the tokenizer in {str(folder)!r} has no chat template; set model.chat_template to "
        f"{TEMPLATE_CHOICES}"
    )


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the named special tokens. Each is configured as text or as {"content": text}."""
    tokens = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token")
    }
    return {name: text for name, text in tokens.items() if isinstance(text, str)}


# -------------------------------------------------------------------------------------------- the environment


class _GenerationTag(Extension):
    """Ignores `{% generation %} ... {% endgeneration %}`, which marks assistant text for some trainers."""

    tags = {"generation"}  # noqa: RUF012  (Jinja requires a mutable class attribute)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


_OF_DICT = frozenset(dir(dict))
_OF_LOOP = frozenset(name for name in dir(LoopContext) if not name.startswith("_"))


class _Environment(BoundedEnvironment):
    """The templates' sandbox, with fast paths for their usual operations: `message.role`, `loop.first`.

    A dictionary has no attribute `role`. Jinja's own rules give the same item, but through an exception and
    two checks. The sandbox allows all public attributes of a loop, but asks for each again.
    """

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, dict) and attribute not in _OF_DICT:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if type(obj) is LoopContext and attribute in _OF_LOOP:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


def _compile(sources: Mapping[str, str]) -> dict[str, jinja2.Template]:
    """Return the compiled templates.

    Raises:
        ConfigError: one is too long or too deep, or is no Jinja.
    """
    environment = _environment()
    begin_render()
    try:
        if (length := max(map(len, sources.values()))) > MAX_SOURCE:
            raise ConfigError(f"the chat template has {length:,} characters; at most {MAX_SOURCE:,}")
        return {name: environment.from_string(source) for name, source in sources.items()}
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template does not compile: line {error.lineno}: {error.message}"
        ) from error
    except (*_FAILURES, SyntaxError) as error:
        raise ConfigError(f"the chat template does not compile: {error or type(error).__name__}") from error


def _environment() -> BoundedEnvironment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.add_filter("tojson", _tojson)
    environment.globals["raise_exception"] = _raise_exception
    # Bound at load time: a template that writes the date must not edit the history of a conversation that
    # passes midnight.
    environment.globals["strftime_now"] = datetime.datetime.now().strftime
    return environment


class _Tool(dict[str, Any]):
    """A tool's schema for templates, with its JSON cached: templates write all tools in every prompt."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        super().__init__(schema)
        self.written: dict[json.JSONEncoder, str] = {}


def _shown_tools(tools: Sequence[Mapping[str, Any]]) -> list[_Tool]:
    return [_Tool(tool) for tool in tools]


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes < > & for HTML; a model should read them unescaped.
    encoder = _encoder(ensure_ascii, indent, None if separators is None else tuple(separators), sort_keys)
    if not isinstance(value, _Tool):
        return encoder.encode(value)
    if encoder not in value.written:
        value.written[encoder] = encoder.encode(value)
    return value.written[encoder]


@functools.lru_cache
def _encoder(
    ensure_ascii: bool, indent: int | None, separators: tuple[str, str] | None, sort_keys: bool
) -> json.JSONEncoder:
    return json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
