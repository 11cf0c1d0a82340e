"""Does a chat template only append? Generated conversations, built turn by turn, against the template's render of the whole."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from agentrl.chat.differences import token_difference
from agentrl.chat.equality import is_same_json
from agentrl.chat.probes import Messages, Scope, generate
from agentrl.chat.renderer import Renderer, Tools
from agentrl.chat.replay import Step, replay_steps
from agentrl.chat.shrink import shrink
from agentrl.chat.template import TemplateRefusal
from agentrl.errors import ConfigError
from agentrl.types import Message

Kind = Literal["fork", "broken", "refused"]
Verdict = Literal["exact", "forks", "broken"]

MAX_SHOWN = 100
"""Characters of one content in a report."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What went differently than by appending. `detail`: token difference, or what was compared; may be empty."""

    kind: Kind
    where: str
    why: str
    messages: Messages
    detail: str = ""

    @property
    def sentence(self) -> str:
        return f"{self.where}: {self.why}"

    def lines(self) -> list[str]:
        return [*map(_line, self.messages), *self.detail.splitlines()]


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """Verdict over `num` conversations; of each kind of finding the smallest conversation, and how many had it."""

    num: int
    findings: tuple[tuple[Finding, int], ...]
    num_refused: int

    @property
    def verdict(self) -> Verdict:
        kinds = {finding.kind for finding, _ in self.findings}
        if "broken" in kinds or self.num_refused == self.num:
            return "broken"
        return "forks" if "fork" in kinds else "exact"

    def of_kind(self, kind: Kind) -> list[tuple[Finding, int]]:
        return [(finding, count) for finding, count in self.findings if finding.kind == kind]

    def lines(self) -> list[str]:
        """Return the report for a person."""
        names = {"fork": "forks", "broken": "broken", "refused": "refuses"}
        lines = [f"verdict: {self.verdict} ({self.num} conversations)"]
        for finding, count in self.findings:
            lines.append(f"{names[finding.kind]} {finding.sentence} ({count} of {self.num})")
            lines += [f"    {line}" for line in finding.lines()]
        return lines


def check(renderer: Renderer, scope: Scope, *, num: int, seed: int) -> TemplateReport:
    """Check `num` conversations generated from `seed`.

    Exact means, for every conversation: what is built turn by turn has the tokens of the template's render of the whole; what
    a turn wrote parses to its calls by JSON value and its text up to outer white space; the generation prompt only appends.
    """
    rng = random.Random(seed)
    first: dict[str, Finding] = {}
    counts: Counter[str] = Counter()
    num_refused = 0
    for _ in range(num):
        found = {finding.sentence: finding for finding in find(renderer, generate(rng, scope), scope.tools)}
        first = found | first
        counts.update(found.keys())
        num_refused += any(finding.kind == "refused" for finding in found.values())
    order = ("broken", "fork", "refused")
    smallest = [_smallest(renderer, finding, scope.tools) for finding in first.values()]
    ranked = sorted(smallest, key=lambda finding: (order.index(finding.kind), -counts[finding.sentence]))
    return TemplateReport(num, tuple((finding, counts[finding.sentence]) for finding in ranked), num_refused)


def find(renderer: Renderer, messages: Messages, tools: Tools) -> Iterator[Finding]:
    """Build one conversation and yield all that went differently than by appending."""
    steps = replay_steps(renderer, messages, tools)
    while True:
        try:
            step = next(steps, None)
            if step is None:
                return
            yield from _turn_findings(renderer, messages, step) if step.is_turn else _block_findings(renderer, messages, tools, step)
        except TemplateRefusal as error:
            yield Finding("refused", "roles", error.reason, messages)
            return
        except ConfigError as error:
            yield Finding("broken", "always", str(error).splitlines()[0], messages)
            return


def _block_findings(renderer: Renderer, messages: Messages, tools: Tools, step: Step) -> Iterator[Finding]:
    codec = renderer.codec
    shown = [renderer.shown(message) for message in messages[: step.shown]]
    whole = renderer.render(shown, tools, add_generation_prompt=True)
    where = _place(messages, step.shown)
    if not whole.startswith(renderer.render(shown, tools, add_generation_prompt=False)):
        yield Finding("broken", where, "the generation prompt is not appended but changes the messages", messages[: step.shown])
    built, expected = step.conversation.token_ids, codec.encode_rendered(whole)
    if step.edit is not None:
        # What the template does not even write in a last turn is a difference to what a model says, not between these tokens.
        is_lossy = tuple(expected[: len(step.replaced)]) == step.replaced
        detail = "" if is_lossy else token_difference(codec, step.replaced, expected)
        yield Finding("fork", where, step.edit, messages[: step.shown], detail)
    elif built != expected:
        yield Finding(
            "broken",
            where,
            "tokens built by turns differ from the render",
            messages[: step.shown],
            token_difference(codec, built, expected),
        )


def _place(messages: Messages, shown: int) -> str:
    last = max((i for i, message in enumerate(messages[:shown]) if message.role == "assistant"), default=None)
    if last is None:
        return "at the prompt"
    following = messages[last + 1].role if last + 1 < shown else "assistant"
    behind = {"user": "when a user speaks again", "tool": "when tools answer", "assistant": "when the assistant goes on"}
    return behind.get(following, f"when a {following} message follows")


def _turn_findings(renderer: Renderer, messages: Messages, step: Step) -> Iterator[Finding]:
    message = messages[step.shown - 1]
    view, written = renderer.view(step.ids, prompt=step.conversation.prompt_text, turn=0, is_truncated=False)
    read = [(call.name, call.arguments) for call in view.tool_calls]
    meant = [(call.name, call.arguments) for call in message.tool_calls]
    if not is_same_json(read, meant):
        yield Finding("broken", "at a turn", "its calls are not read back", messages[: step.shown], f"read {read} from\n{written!r}")
    for part, got, expected in (("text", view.content, message.content), ("thought", view.reasoning, message.reasoning)):
        # What the template leaves out of the turn is found as a fork, when the turn becomes history.
        if expected.strip() in written and got.strip() != expected.strip():
            yield Finding("broken", "at a turn", f"its {part} is not read back", messages[: step.shown], f"read {got!r} from\n{written!r}")


def _smallest(renderer: Renderer, finding: Finding, tools: Tools) -> Finding:
    best = finding

    def still_fails(messages: Messages) -> bool:
        nonlocal best
        found = next((other for other in find(renderer, messages, tools) if other.sentence == finding.sentence), None)
        best = found or best
        return found is not None

    shrink(finding.messages, still_fails)
    return best


def _line(message: Message) -> str:
    parts = [f"thinks {_short(message.reasoning)}"] if message.reasoning else []
    parts += [_short(message.content)] if message.content or not message.tool_calls else []
    parts += [f"calls {call.name}({call.arguments})" for call in message.tool_calls]
    return f"{message.role}: {', '.join(parts)}"


def _short(text: str) -> str:
    return repr(text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}...")
