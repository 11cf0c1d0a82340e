"""`Chat`: template, tokenizer and tool-call format of one tokenizer folder."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from agentrl.chat.assistant_style import AssistantStyle
from agentrl.chat.check import TemplateReport, check, shows_tools
from agentrl.chat.codec import THOUGHT, TURN, Codec, added_tokens, find_image_tokens, load_tokenizer
from agentrl.chat.conversation import Conversation, Edits
from agentrl.chat.formats import NO_FORMAT, detect_format, get_format
from agentrl.chat.packaged import fitting_templates, missing_tokens
from agentrl.chat.parsing import THINK, TurnParser
from agentrl.chat.probes import PROBE_TOOLS, ProbeScope
from agentrl.chat.renderer import Renderer, Tools
from agentrl.chat.replay import Replay, replay
from agentrl.chat.template import ChatTemplate, TemplateMessage, TemplateRefusal, load_template, read_json
from agentrl.chat.template_arguments import json_copy
from agentrl.chat.turn_reader import TurnReader
from agentrl.config.model import ModelConfig
from agentrl.data.image_layout import ImageTokens
from agentrl.errors import ConfigError, DataError, concerning
from agentrl.types import JsonObject, Message

QUICK_CHECK = 40
"""Number of conversations in the template check at the start of a run."""

NUM_VARIANTS = 32
"""Kept instances with other arguments of the template. Rows usually have a few different ones."""


class Chat:
    """Opens conversations. Immutable; one instance serves all trajectories of a process."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        eos_token_ids: Sequence[int],
        tool_format: str,
        edits: Edits = "fork",
        images: ImageTokens | None = None,
    ) -> None:
        """Combine the parts; `eos_token_ids[0]` is the token with which the template ends an assistant turn.

        `edits`: what a conversation does when the template edits its history (`model.template_edits`).
        `images`: how images become tokens; None: the model does not see.
        """
        self.tool_format = detect_format(template.text) if tool_format == "auto" else tool_format
        self._is_format_forced = tool_format not in ("auto", NO_FORMAT)
        self._tokenizer = tokenizer
        self.eos_token_ids: tuple[int, ...] = tuple(eos_token_ids)
        self.images = images
        codec = Codec(tokenizer, template_text=template.text, eos_token_ids=self.eos_token_ids, images=images)
        self.vocab_size = codec.vocab_size
        self._edits: Edits = edits
        self._renderer = Renderer(template, codec, get_format(self.tool_format).parse, self.eos_token_ids)
        self._variant: Callable[[str], Chat] = functools.lru_cache(NUM_VARIANTS)(self._new_variant)

    @property
    def template_kwargs(self) -> JsonObject:
        """The template's arguments besides messages and tools (`model.chat_template_kwargs`)."""
        return self._renderer.template.arguments

    def with_template_kwargs(self, given: Mapping[str, Any]) -> Chat:
        """Return this chat with further arguments of the template, which win over its own. Results are kept.

        Raises:
            ConfigError: the template reads no such variable, or a value is no JSON value.
        """
        if not given:
            return self
        return self._variant(json.dumps(json_copy(given), sort_keys=True))

    def _new_variant(self, written: str) -> Chat:
        return Chat(
            self._tokenizer,
            self._renderer.template.with_arguments(json.loads(written)),
            eos_token_ids=self.eos_token_ids,
            tool_format=self.tool_format,
            edits=self._edits,
            images=self.images,
        )

    @property
    def thinking(self) -> str | None:
        """The message field or the tags in which the template takes thoughts; None if it supports none."""
        style = self._renderer.style
        return (style.field or f"{style.open} {style.close}") if style.knows_thoughts else None

    @property
    def shows_unread_calls(self) -> bool:
        """Return whether the template shows calls in a format for which there is no parser."""
        return self.tool_format == NO_FORMAT and self._renderer.style.knows_calls

    @functools.cached_property
    def _shows_tools(self) -> bool:
        return shows_tools(self._renderer, PROBE_TOOLS)

    @functools.cached_property
    def tools_problem(self) -> str | None:
        """Why a model cannot use tools here, and the cure; None if it can."""
        if not (self._shows_tools or self._renderer.style.knows_calls):
            vain = (
                f", so model.tool_format={self.tool_format} reads nothing" if self._is_format_forced else ""
            )
            return f"the chat template shows no tools{vain}; set {self._template_cure}, or use react_agent"
        if self.tool_format != NO_FORMAT:
            return None
        detected = detect_format(self._renderer.template.text)
        if detected != NO_FORMAT:
            return f"model.tool_format=none reads no tool calls; set model.tool_format={detected}"
        return (
            "tool calls cannot be read: the chat template uses no known format; set model.tool_format "
            f"(docs/templates.md) or {self._template_cure}, or use react_agent"
        )

    @property
    def _template_cure(self) -> str:
        names = " or ".join(fitting_templates(self._tokenizer))
        return f"model.chat_template={names}" if names else "model.chat_template to one that shows tools"

    def check_tools(self, tools: Tools, messages: Sequence[Message]) -> None:
        """Check that a prompt of `messages` shows `tools`, and that calls can be read.

        Some templates show calls, but no tools: the messages must name them.

        Raises:
            ConfigError: the model would not see a tool, or its calls would be plain text.
        """
        if not tools:
            return
        if self.tools_problem is not None:
            raise ConfigError(self.tools_problem)
        if self._shows_tools:
            return
        names = [str(tool["function"].get("name", "")) for tool in tools]
        unnamed = [name for name in names if not any(name in message.content for message in messages)]
        if unnamed:
            raise ConfigError(
                f"the chat template shows calls, but no tools: name {', '.join(unnamed)} in the system "
                f"message, or set {self._template_cure}"
            )

    @classmethod
    def load(
        cls,
        folder: str,
        *,
        template_file: str | None = None,
        tool_format: str = "auto",
        edits: Edits = "fork",
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Chat:
        """Read `tokenizer.json`, the chat template and the end-of-sequence tokens of a local folder.

        `template_file`: a packaged template or a Jinja file; None: the folder's own. `template_kwargs`: the
        template's arguments besides messages and tools.

        Raises:
            ConfigError: a file is missing or malformed, no file defines a token that ends an assistant turn,
                or the tokenizer lacks a control token of the packaged template.
        """
        if not Path(folder).is_dir():
            raise ConfigError(f"tokenizer folder {folder!r} does not exist")
        tokenizer = load_tokenizer(Path(folder))
        template = load_template(Path(folder), template_file=template_file)
        with concerning("model.chat_template_kwargs"):
            template = template.with_arguments(template_kwargs or {})
        if template_file is not None and (missing := missing_tokens(template_file, tokenizer)):
            fitting = ", ".join(fitting_templates(tokenizer)) or "none"
            raise ConfigError(
                f"model.chat_template={template_file} writes {', '.join(missing)}, which are no tokens of "
                f"the tokenizer in {folder!r}; packaged templates that fit: {fitting}"
            )
        eos_token_ids = find_turn_ends(
            tokenizer, template, _configured_eos(Path(folder), tokenizer, template)
        )
        return cls(
            tokenizer,
            template,
            eos_token_ids=eos_token_ids,
            tool_format=tool_format,
            edits=edits,
            images=find_image_tokens(Path(folder), tokenizer),
        )

    @classmethod
    def of(cls, model: ModelConfig) -> Chat:
        """Load the tokenizer and template that the `model` config names; see `load`."""
        folder = model.tokenizer_path or model.path
        return cls.load(
            folder,
            template_file=model.chat_template,
            tool_format=model.tool_format,
            edits=model.template_edits,
            template_kwargs=model.chat_template_kwargs,
        )

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`. Control tokens in it are recognised; none is added."""
        return self._renderer.codec.encode(text)

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text of `ids`."""
        return self._renderer.codec.decode(ids, skip_special=skip_special)

    def open(self, messages: Sequence[Message], tools: Tools) -> Conversation:
        """Open a conversation with its prompt; `tools` are the OpenAI schemas shown to the model."""
        return Conversation(self._renderer, messages, tools, edits=self._edits)

    def read_turn(self, conversation: Conversation) -> TurnReader | None:
        """Return a reader of the turn that is sampled next; None if the template has thought tags that only a
        whole turn can be read with.
        """
        renderer, prompt = self._renderer, conversation.prompt_text
        if renderer.style.open != THINK:
            return None
        opening = prompt[prompt.rindex(THINK) :] if renderer.opens_thought(prompt) else ""
        parser = TurnParser(
            get_format(self.tool_format),
            turn=conversation.num_turns,
            tools=conversation.tools,
            reads_calls=bool(conversation.tools),
        )
        return TurnReader(renderer.codec, parser, opening=opening, stop_ids=self.eos_token_ids)

    def render_training(self, messages: Sequence[Message], tools: Tools) -> Replay:
        """Return the tokens of a conversation to imitate, built as a `Conversation` would have built them.

        Every assistant message becomes a generation: the text that the template renders for it, with its
        end-of-turn token. Messages after the last assistant message are left out.

        Raises:
            DataError: there is no assistant message.
            ConfigError: the template cannot render the messages, or edits the history although `edits` is
                `refuse`.
        """
        turns = [index for index, message in enumerate(messages) if message.role == "assistant"]
        if not turns:
            raise DataError("the conversation has no assistant message to imitate")
        return replay(self._renderer, messages[: turns[-1] + 1], tools, edits=self._edits)

    def render_whole(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Return the tokens of a finished conversation, to be judged, as `apply_chat_template` would."""
        renderer = self._renderer
        text = renderer.template.render(
            [renderer.shown(message) for message in messages], tools, add_generation_prompt=False
        )
        return renderer.codec.encode_rendered(text)

    def check_template(
        self,
        tools: Tools,
        *,
        has_user_turns: bool = True,
        has_system: bool = True,
        num: int = QUICK_CHECK,
        seed: int = 0,
    ) -> TemplateReport:
        """Check the template at the start of a run, on `num` generated conversations (see `check`).

        `has_user_turns=False` leaves out conversations in which the user speaks again; use it for runs
        without interactions. Some templates drop the thinking of earlier turns only after a new user message.

        Raises:
            ConfigError: the template neither appends nor forks; or it forks although `edits` is `refuse`; or
                there are tools, but the model cannot use tools.
        """
        report = self.report_template(
            tools, has_user_turns=has_user_turns, has_system=has_system, num=num, seed=seed
        )
        forks = report.of_kind("fork") if self._edits == "refuse" else []
        if stops := [*report.stops(), *(finding for finding, _ in forks)]:
            lines = "\n  ".join(stops[0].lines())
            cure = "set model.chat_template to a template that only appends"
            cure += ", or model.template_edits=fork" if stops[0].kind == "fork" else ""
            raise ConfigError(
                f"the chat template does not only append: {stops[0].sentence}; {cure}\n  {lines}"
            )
        return report

    def report_template(
        self,
        tools: Tools | None = None,
        *,
        has_user_turns: bool = True,
        has_system: bool = True,
        num: int,
        seed: int = 0,
        shrinks: bool = True,
    ) -> TemplateReport:
        """Return the findings of `check`.

        `tools` None: use PROBE_TOOLS, or no tools and a note if the model cannot use tools.

        Raises:
            ConfigError: there are tools, or a format for their calls was forced, but the model cannot use
                tools.
        """
        renderer, problem = self._renderer, self.tools_problem
        if problem is not None and (tools or (tools is None and self._is_format_forced)):
            raise ConfigError(problem)
        note = problem if tools is None else None
        if tools is None:
            tools = () if problem else PROBE_TOOLS
        scope = ProbeScope(
            tools,
            thinks=renderer.style.knows_thoughts,
            has_user_turns=has_user_turns,
            has_system=has_system,
            control=renderer.codec.special_tokens,
        )
        report = check(renderer, scope, num=num, seed=seed, shrinks=shrinks)
        return report if note is None else report.with_note("with tools", note)


def find_turn_ends(
    tokenizer: Tokenizer, template: ChatTemplate, configured: Sequence[int]
) -> tuple[int, ...]:
    """Return the ids that end an assistant turn: the template's own first, then the `configured` ones.

    `configured` are end-of-sequence tokens. If the template writes no token after a last turn, the first
    tokens of the next user message and tool message end the turn. A model trained on such a template
    generates these tokens, and generation stops there.

    Raises:
        ConfigError: the template ends a turn with no special token, and none is configured.
    """
    probe: list[dict[str, Any]] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": TURN}]
    tail = template.render(probe, add_generation_prompt=False).rpartition(TURN)[2]
    written = added_tokens(tokenizer, tail)
    if not written:
        heads = find_message_heads(tokenizer, template)
        if not heads and not configured:
            raise ConfigError(
                f"the chat template ends an assistant turn with {tail!r}, which contains no "
                "special token of the tokenizer, and generation_config.json has no eos_token_id"
            )
        return tuple(dict.fromkeys([*heads, *configured]))
    # Some templates write another special token before the one that ends the turn: prefer the configured
    # token.
    end_of_turn = next((id for id in written if id in configured), written[0])
    return tuple(dict.fromkeys([end_of_turn, *configured]))


def find_message_heads(tokenizer: Tokenizer, template: ChatTemplate) -> list[int]:
    """Return the first tokens of a user and of a tool message that follow a turn.

    Tokens with which an assistant message begins as well are left out.
    """
    style = AssistantStyle.of(template)
    question: TemplateMessage = {"role": "user", "content": THOUGHT}
    result: TemplateMessage = {"role": "tool", "content": THOUGHT, "name": "f", "tool_call_id": "call00000"}
    heads = []
    for turn, message in (
        (style.message(TURN), question),
        (style.message(TURN, calls=[("f", "call00000", {"x": "y"})]), result),
    ):
        with contextlib.suppress(TemplateRefusal):
            bare = template.render([question, turn], add_generation_prompt=False)
            longer = template.render([question, turn, message], add_generation_prompt=False)
            prompt = template.render([question, turn, message], add_generation_prompt=True)
            if longer.startswith(bare) and prompt.startswith(longer):
                own = added_tokens(tokenizer, prompt[len(longer) :])
                header = longer[len(bare) :].partition(THOUGHT)[0]
                heads += [id for id in added_tokens(tokenizer, header)[:1] if id not in own]
    return heads


def _configured_eos(folder: Path, tokenizer: Tokenizer, template: ChatTemplate) -> list[int]:
    """Return the end-of-sequence tokens of the generation config, else of the tokenizer."""
    configured = read_json(folder / "generation_config.json").get("eos_token_id")
    if configured is None:
        configured = tokenizer.token_to_id(template.special_tokens.get("eos_token", ""))
    return [id for id in (configured if isinstance(configured, list) else [configured]) if id is not None]
