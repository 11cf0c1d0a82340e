"""Check that a chat template only appends.

Generated conversations are built turn by turn and compared with the template's render of the whole
conversation.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from agentrl.chat.codec import THOUGHT, TURN
from agentrl.chat.differences import token_difference
from agentrl.chat.equality import is_same_json
from agentrl.chat.parsing import call_id
from agentrl.chat.probes import Messages, ProbeScope, generate
from agentrl.chat.renderer import Renderer, SampledTurn, Tools
from agentrl.chat.replay import ReplayedStep, replay_steps
from agentrl.chat.shrink import shrink
from agentrl.chat.template import TemplateMessage, TemplateRefusal
from agentrl.errors import ConfigError
from agentrl.types import Message, ToolCall

Kind = Literal["fork", "broken", "refused", "note"]
Verdict = Literal["exact", "forks", "broken"]

AT_A_TURN = "at a turn"

MOST_UNREAD = 0.25
"""If more than this share of conversations has a turn that cannot be parsed back, the tool format is
considered wrong.
"""

MAX_SHOWN = 100
"""Characters shown of one message's content in a report."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One violation of append-only rendering.

    `detail`: the token difference, or the values compared; may be empty.
    """

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
    """Verdict over `num` conversations.

    `findings`: each distinct finding with its smallest conversation, and the number of conversations with it.
    """

    num: int
    findings: tuple[tuple[Finding, int], ...]
    num_refused: int

    @property
    def summary(self) -> str | None:
        """One line about forks for the start of a run; None if the template does not fork."""
        forks = "; ".join(finding.sentence for finding, _ in self.of_kind("fork"))
        if not forks:
            return None
        return (
            f"the chat template forks {forks} (a new segment begins there: docs/templates.md; or set "
            "model.chat_template)"
        )

    @property
    def verdict(self) -> Verdict:
        kinds = {finding.kind for finding, _ in self.findings}
        if "broken" in kinds or self.num_refused == self.num:
            return "broken"
        return "forks" if "fork" in kinds else "exact"

    def stops(self) -> list[Finding]:
        """Return the findings that must prevent a run.

        A turn that is occasionally not parsed back does not prevent a run, because it is only history.
        """
        return [
            finding
            for finding, count in self.of_kind("broken")
            if finding.where != AT_A_TURN or count > MOST_UNREAD * self.num or self.num_refused == self.num
        ]

    def of_kind(self, kind: Kind) -> list[tuple[Finding, int]]:
        return [(finding, count) for finding, count in self.findings if finding.kind == kind]

    def with_note(self, where: str, why: str) -> TemplateReport:
        """Return a copy of the report with a note on all conversations."""
        return replace(self, findings=(*self.findings, (Finding("note", where, why, ()), self.num)))

    def lines(self) -> list[str]:
        """Return the report as lines for a person to read."""
        names = {"fork": "forks", "broken": "broken", "refused": "refuses", "note": "note:"}
        lines = [f"verdict: {self.verdict} ({self.num} conversations)"]
        for finding, count in self.findings:
            lines.append(f"{names[finding.kind]} {finding.sentence} ({count} of {self.num})")
            lines += [f"    {line}" for line in finding.lines()]
        return lines


def check(
    renderer: Renderer, scope: ProbeScope, *, num: int, seed: int, shrinks: bool = True
) -> TemplateReport:
    """Check `num` conversations generated from `seed`.

    `shrinks`: find the smallest conversation of each finding. The verdict is exact if for every conversation:
    - the conversation built turn by turn has the tokens of the template's render of the whole;
    - each written turn parses back to its calls (compared as JSON values) and to its text (up to outer white
      space);
    - the generation prompt only appends.
    """
    rng = random.Random(seed)
    first: dict[str, Finding] = {}
    counts: Counter[str] = Counter()
    num_refused = 0
    for omission in find_omissions(renderer, scope.tools):
        first[omission.sentence] = omission
        counts[omission.sentence] = num
    for _ in range(num):
        found = {finding.sentence: finding for finding in find(renderer, generate(rng, scope), scope.tools)}
        first = found | first
        counts.update(found.keys())
        num_refused += any(finding.kind == "refused" for finding in found.values())
    order = ("broken", "fork", "refused", "note")
    if shrinks:
        first = {sentence: _smallest(renderer, finding, scope.tools) for sentence, finding in first.items()}
    ranked = sorted(
        first.values(), key=lambda finding: (order.index(finding.kind), -counts[finding.sentence])
    )
    return TemplateReport(num, tuple((finding, counts[finding.sentence]) for finding in ranked), num_refused)


def shows_tools(renderer: Renderer, tools: Tools) -> bool:
    """Return whether a prompt shows the first of `tools`, which must not be empty.

    A template that refuses the prompt counts as one that does: the refusal itself is reported.
    """
    try:
        prompt = renderer.template.render(
            [{"role": "user", "content": TURN}], tools, add_generation_prompt=True
        )
    except TemplateRefusal:
        return True
    return str(tools[0]["function"]["name"]) in prompt


def find_omissions(renderer: Renderer, tools: Tools) -> Iterator[Finding]:
    """Yield what the template leaves out of every conversation: messages, calls, results, schemas."""
    question = Message("user", "a")
    asked: TemplateMessage = {"role": "user", "content": TURN}
    with contextlib.suppress(TemplateRefusal):
        if TURN not in renderer.template.render([asked], (), add_generation_prompt=True):
            yield Finding("broken", "at the prompt", "leaves out what a user says", (question,))
    if not tools:
        return
    name = str(tools[0]["function"]["name"])
    if not shows_tools(renderer, tools):
        yield Finding(
            "note", "at the prompt", "leaves out the tools; name them in the system message", (question,)
        )
    call = Message("assistant", "", (ToolCall(call_id(0, 0), name, {}),))
    result = Message("tool", "b", tool_call_id=call_id(0, 0), name=name)
    shown = [asked, renderer.sampled(SampledTurn(), [result]), {**renderer.shown(result), "content": TURN}]
    with contextlib.suppress(TemplateRefusal):
        if renderer.template.render(shown, tools, add_generation_prompt=True).count(TURN) < 2:
            yield Finding(
                "broken", "when tools answer", "leaves out what tools say", (question, call, result)
            )


def find(renderer: Renderer, messages: Messages, tools: Tools) -> Iterator[Finding]:
    """Build one conversation and yield every violation of append-only rendering."""
    steps = replay_steps(renderer, messages, tools)
    while True:
        try:
            step = next(steps, None)
            if step is None:
                return
            yield from (
                _turn_findings(renderer, messages, tools, step)
                if step.is_turn
                else _block_findings(renderer, messages, tools, step)
            )
        except TemplateRefusal as error:
            yield Finding("refused", "roles", error.reason, messages)
            return
        except ConfigError as error:
            yield Finding("broken", "always", str(error).splitlines()[0], messages)
            return


def _block_findings(
    renderer: Renderer, messages: Messages, tools: Tools, step: ReplayedStep
) -> Iterator[Finding]:
    codec = renderer.codec
    shown = [renderer.shown(message) for message in step.conversation.messages]
    where = _place(messages, step.shown)
    built = step.conversation.token_ids
    expected = codec.encode_rendered(renderer.template.render(shown, tools, add_generation_prompt=True))
    if step.edit is not None:
        # If `expected` still begins with the replaced tokens, the template did not even write the edited part
        # in the last turn. The difference is then between the template and what a model says, not between
        # these tokens.
        is_lossy = tuple(expected[: len(step.replaced)]) == step.replaced
        detail = "" if is_lossy else token_difference(codec, step.replaced, expected)
        yield Finding("fork", where, step.edit, messages[: step.shown], detail)
    elif not codec.is_same_text(built, expected):
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
    following = {message.role for message in messages[last + 1 : shown]}
    if "user" in following:
        return "when a user speaks again"
    return "when tools answer" if "tool" in following else "when the assistant goes on"


def _turn_findings(
    renderer: Renderer, messages: Messages, tools: Tools, step: ReplayedStep
) -> Iterator[Finding]:
    message = messages[step.shown - 1]
    written = renderer.written(step.ids, step.conversation.prompt_text)
    view = renderer.view(written, turn=0, is_truncated=False, tools=tools)
    shown = messages[: step.shown]
    read = [(call.name, call.arguments) for call in view.tool_calls]
    calls = [(call.name, call.arguments) for call in message.tool_calls][
        : _num_written_calls(renderer, shown, tools)
    ]
    if not is_same_json(read, calls):
        yield Finding(
            "broken", AT_A_TURN, "its calls are not read back", shown, f"read {read} from\n{written!r}"
        )
    got, meant = [(m.content.strip(), m.reasoning.strip()) for m in (view, message)]
    if got != meant and sorted(got) == sorted(meant):
        yield Finding("note", AT_A_TURN, "text beside calls is shown as a thought", shown)
        return
    for part, left, right in zip(("text", "thought"), got, meant, strict=True):
        # A part that the template does not write at all is reported as a fork, when the turn becomes history.
        if right and right in written and left != right:
            yield Finding(
                "broken", AT_A_TURN, f"its {part} is not read back", shown, f"read {left!r} from\n{written!r}"
            )


def _num_written_calls(renderer: Renderer, messages: Messages, tools: Tools) -> int:
    """Return how many calls of the last message the template writes.

    Some write only one, or only calls without text.
    """
    *before, last = messages
    if not last.tool_calls:
        return 0
    results = [Message("tool", "", tool_call_id=call.id, name=call.name) for call in last.tool_calls]
    marked = renderer.sampled(SampledTurn(bool(last.content), THOUGHT if last.reasoning else None), results)
    return renderer.count_calls(
        renderer.template.render([*map(renderer.shown, before), marked], tools, add_generation_prompt=False)
    )


def _smallest(renderer: Renderer, finding: Finding, tools: Tools) -> Finding:
    best = finding

    def still_fails(messages: Messages) -> bool:
        nonlocal best
        found = next(
            (other for other in find(renderer, messages, tools) if other.sentence == finding.sentence), None
        )
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
