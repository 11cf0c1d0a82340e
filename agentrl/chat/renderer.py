"""Everything that a conversation needs of a tokenizer's folder, in one immutable object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.chat.codec import TURN, Codec
from agentrl.chat.parsing import Parser
from agentrl.chat.template import ChatTemplate, TemplateMessage
from agentrl.errors import ConfigError
from agentrl.types import Message

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Renderer:
    """Messages -> text (template), text <-> ids (codec), sampled text -> calls (parser)."""

    template: ChatTemplate
    codec: Codec
    parse: Parser
    eos_token_ids: tuple[int, ...]

    def render(self, messages: Sequence[TemplateMessage], tools: Tools, *, add_generation_prompt: bool) -> str:
        return self.template.render(messages, tools, add_generation_prompt=add_generation_prompt)

    def shown(self, message: Message) -> TemplateMessage:
        """Return the dictionary for the template, its content protected (see `Codec`)."""
        result: TemplateMessage = {"role": message.role, "content": self.codec.protect(message.content, message.role)}
        if message.tool_calls:
            result["tool_calls"] = [self._call(call.name, call.id, self._protected(call.arguments or {})) for call in message.tool_calls]
        if message.name is not None:  # a tool message repeats the name that the model wrote
            result["name"] = self.codec.protect(message.name, message.role)
        if message.tool_call_id is not None:
            result["tool_call_id"] = message.tool_call_id
        return result

    def sampled(self, results: Sequence[Message]) -> TemplateMessage:
        """Return the dictionary that stands for a sampled turn: its text is TURN, for its tokens are never rendered.

        It makes the calls that `results`, the tool messages behind it, answer: templates check roles and repeat names and ids.
        """
        shown: TemplateMessage = {"role": "assistant", "content": TURN}
        if results:
            names = [self.codec.protect(result.name or "unknown", "assistant") for result in results]
            shown["tool_calls"] = [
                self._call(name, result.tool_call_id, {"turn": TURN}) for name, result in zip(names, results, strict=True)
            ]
        return shown

    def _protected(self, value: Any) -> Any:
        """Protect the strings inside the arguments of an assistant's call."""
        if isinstance(value, str):
            return self.codec.protect(value, "assistant")
        if isinstance(value, Mapping):
            return {key: self._protected(item) for key, item in value.items()}
        return [self._protected(item) for item in value] if isinstance(value, list | tuple) else value

    @staticmethod
    def _call(name: str, id: str | None, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {"type": "function", "id": id, "function": {"name": name, "arguments": arguments}}

    def after_turn(self, text: str) -> str:
        """Return what `text` holds behind the end of its last sampled turn (see `sampled`).

        Raises:
            ConfigError: the template leaves sampled turns out, or does not end them.
        """
        start = text.rfind(TURN)
        if start < 0:
            raise ConfigError("the chat template leaves an earlier assistant turn out; set model.chat_template to one that keeps it")
        end = self.codec.turn_end.search(text, start)
        if end is None:
            raise ConfigError(f"the chat template does not end an assistant turn with {self.codec.end_of_turn!r}")
        return text[end.end() :]
