"""OpenAI's responses: parses and checks requests. `responses_writer.py` writes the answers.

An assistant's turn is several items in this dialect: its thoughts, a message, its calls. They become one
message again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pydantic

from agentrl.extras.gateway.bodies import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    Object,
    Strict,
    function_schema,
    named_results,
    read_arguments,
    read_json,
    set_fields,
    validated,
)
from agentrl.extras.gateway.responses_writer import ResponseFacts, ResponseWriter, StoredResponses
from agentrl.extras.gateway.turns import TEXT_ARGUMENT, Asked, RequestError, TurnRequest
from agentrl.types import JsonObject, Message, ToolCall

SAMPLING_FIELDS = ("temperature", "top_p")
OWN_TYPES = ("function", "custom")
"""Types of tools that the program runs; OpenAI's servers run all others."""


class _Text(Strict):
    type: Literal["input_text", "output_text", "text"]
    text: str


class _Refusal(Strict):
    type: Literal["refusal"]
    refusal: str


class _Thought(Strict):
    type: Literal["reasoning_text"]
    text: str


_Part = Annotated[_Text | _Refusal, pydantic.Field(discriminator="type")]
_Texts = str | Annotated[list[_Part], pydantic.Field(max_length=MAX_PARTS)]


class _Message(Strict):
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: _Texts


class _Call(Strict):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class _TextCall(Strict):
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str


class _Result(Strict):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: _Texts


class _Reasoning(Strict):
    type: Literal["reasoning"]
    content: Annotated[list[_Thought], pydantic.Field(max_length=MAX_PARTS)] | None = None


_Item = Annotated[_Message | _Call | _TextCall | _Result | _Reasoning, pydantic.Field(discriminator="type")]


def _typed(value: Any) -> Any:
    """Give items without a type theirs: messages may leave it out."""
    if not isinstance(value, list):
        return value
    if len(value) > MAX_MESSAGES:  # here, because items are parsed before they are counted
        raise ValueError(f"it has {len(value)} items; send at most {MAX_MESSAGES} items")
    return [
        {"type": "message", **item} if isinstance(item, dict) and "role" in item else item for item in value
    ]


class _Tool(Strict):
    type: str
    name: str = ""
    description: str | None = None
    parameters: Object | None = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _read_type_alone(cls, tool: Any) -> Any:
        """Leave out the fields of tools that are left out: they may have any."""
        is_left_out = isinstance(tool, dict) and tool.get("type") not in OWN_TYPES
        return {"type": tool.get("type")} if is_left_out else tool


class _Format(Strict):
    type: Literal["text"]


class _TextOptions(Strict):
    format: _Format | None = None


class _Body(Strict):
    input: str | Annotated[list[_Item], pydantic.BeforeValidator(_typed)] = ""
    instructions: str | None = None
    tools: list[_Tool] | None = pydantic.Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["auto", "none", "required"] | Object | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = pydantic.Field(None, ge=1)
    stream: bool | None = None
    store: bool | None = None
    text: _TextOptions | None = None
    background: Literal[False] | None = None
    conversation: None = None
    prompt: None = None


def ask(body: bytes, *, model: str, stored: StoredResponses) -> Asked:
    """Read the body of POST /v1/responses.

    `model`: the name to answer under. `stored`: the answers that `previous_response_id` may name.

    Raises:
        RequestError: the body is malformed, or asks for something unsupported: images and files, results of
            server tools, a format of the answer, conversations, prompts and answers in the background.
    """
    raw = read_json(body)
    parsed = validated(_Body, raw)
    text_tools = frozenset(tool.name for tool in parsed.tools or () if tool.type == "custom")
    tools = tuple(schema for tool in parsed.tools or () if (schema := _schema(tool)) is not None)
    said = _said(parsed.input)
    if parsed.previous_response_id is not None:
        said = [*stored.messages(parsed.previous_response_id), *said]
    if not said:
        raise RequestError("input: it is empty; send a text or at least one item")
    request = TurnRequest(
        messages=named_results(_with_instructions(parsed.instructions, said)),
        tools=tools,
        calls_tools=bool(tools) and parsed.tool_choice != "none",
        max_tokens=parsed.max_output_tokens,
        is_stream=bool(parsed.stream),
        sampling=set_fields(raw, SAMPLING_FIELDS),
        is_tool_choice_forced=parsed.tool_choice not in (None, "auto", "none"),
        num_tools_left_out=len(parsed.tools or ()) - len(tools),
        text_tools=text_tools,
    )
    facts = ResponseFacts(
        model=model,
        instructions=parsed.instructions,
        tools=tuple(raw.get("tools") or ()),
        previous_response_id=parsed.previous_response_id,
        max_output_tokens=parsed.max_output_tokens,
        is_stored=parsed.store is not False,
    )
    return Asked(request, ResponseWriter(facts, text_tools, stored, said))


def _schema(tool: _Tool) -> JsonObject | None:
    """Return a tool's schema; None for a tool that OpenAI's servers would run."""
    if tool.type not in OWN_TYPES:
        return None
    if not tool.name:
        raise RequestError(f"tools: a tool of type {tool.type} needs a name")
    if tool.type == "function":
        return function_schema(tool.name, tool.description, tool.parameters or {})
    text = {"type": "object", "properties": {TEXT_ARGUMENT: {"type": "string"}}, "required": [TEXT_ARGUMENT]}
    return function_schema(tool.name, tool.description, text)


def _with_instructions(instructions: str | None, said: Sequence[Message]) -> list[Message]:
    """Return one system message, made of the instructions and the system messages that begin the input, then
    the rest.

    Many templates accept a system message only as the first.
    """
    num = next((index for index, message in enumerate(said) if message.role != "system"), len(said))
    heads = [*([instructions] if instructions else []), *(message.content for message in said[:num])]
    return [*([Message("system", "\n\n".join(heads))] if heads else []), *said[num:]]


@dataclass(slots=True)
class _Turn:
    """The items of an assistant's turn, in the order in which they follow each other."""

    reasoning: str = ""
    text: str | None = None
    calls: tuple[ToolCall, ...] = ()

    def is_followed_by(self, item: Any) -> bool:
        """Return whether an item belongs to this turn, or begins the next one."""
        if isinstance(item, _Call | _TextCall):
            return True
        if isinstance(item, _Message):
            return self.text is None and not self.calls
        return self.text is None and not self.calls and not self.reasoning

    def add(self, item: Any) -> None:
        if isinstance(item, _Message):
            self.text = _joined(item.content)
        elif isinstance(item, _Reasoning):
            self.reasoning = "".join(thought.text for thought in item.content or ())
        elif isinstance(item, _TextCall):
            call = ToolCall(item.call_id, item.name, {TEXT_ARGUMENT: item.input})
            self.calls = (*self.calls, call)
        else:
            self.calls = (*self.calls, read_arguments(item.call_id, item.name, item.arguments))

    @property
    def message(self) -> Message:
        return Message("assistant", self.text or "", tool_calls=self.calls, reasoning=self.reasoning)


def _said(items: str | Sequence[Any]) -> list[Message]:
    """Return the messages of an input."""
    if isinstance(items, str):
        return [Message("user", items)] if items else []
    messages: list[Message] = []
    turn: _Turn | None = None
    for item in items:
        is_assistant = isinstance(item, _Call | _TextCall | _Reasoning) or (
            isinstance(item, _Message) and item.role == "assistant"
        )
        if turn is not None and not (is_assistant and turn.is_followed_by(item)):
            messages.append(turn.message)
            turn = None
        if is_assistant:
            turn = turn or _Turn()
            turn.add(item)
        else:
            messages.append(_other(item))
    return messages if turn is None else [*messages, turn.message]


def _other(item: Any) -> Message:
    """Return an item that the program wrote."""
    if isinstance(item, _Result):
        return Message("tool", _joined(item.output), tool_call_id=item.call_id)
    return Message("user" if item.role == "user" else "system", _joined(item.content))


def _joined(content: str | list[_Text | _Refusal]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.refusal if isinstance(part, _Refusal) else part.text for part in content)
