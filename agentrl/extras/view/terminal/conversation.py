"""An attempt as a conversation, and what else is known of it, as pieces of text."""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.extras.view.attempt import ShownAttempt, ShownMessage, ShownText
from agentrl.extras.view.terminal.lines import StyledText, harmless, one_line
from agentrl.types import Outcome

QUIET, GOOD, WARN, BAD, HEAD = "dim", "green", "yellow", "red", "bold"
ROLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
_SECONDS = (
    ("generation", "generate_s"),
    ("tools", "tool_s"),
    ("partner", "interaction_s"),
    ("reward", "reward_s"),
)


def headline(attempt: ShownAttempt) -> Iterator[StyledText]:
    """Yield which attempt it is, and how it ended."""
    yield StyledText(one_line(attempt.task), HEAD)
    yield StyledText(f"  {one_line(attempt.outcome).replace('_', ' ')}", _color(attempt))
    if attempt.reward is not None:
        yield StyledText(f"  reward {attempt.reward:.4g}", HEAD)
    where = [
        *([] if attempt.step is None else [f"step {attempt.step}"]),
        attempt.set if attempt.policy is None else f"{attempt.set} of {one_line(attempt.policy)}",
        one_line(attempt.source),
        one_line(attempt.agent),
        f"group {attempt.group}, member {attempt.member}" + (", greedy" if attempt.is_greedy else ""),
        f"{attempt.num_tokens:,} tokens, {attempt.num_sampled:,} sampled",
    ]
    yield StyledText("\n" + " · ".join(where), QUIET)


def _color(attempt: ShownAttempt) -> str:
    if attempt.outcome == Outcome.COMPLETED.value:
        return GOOD
    return WARN if attempt.is_scored else BAD


def conversation(attempt: ShownAttempt) -> Iterator[StyledText]:
    """Yield the messages with thinking, calls and rewards; first why it failed, if it did."""
    yield from _why(attempt)
    last = None
    for message in attempt.messages:
        if message.conversation is not None and message.conversation != last:
            yield StyledText(f"conversation {one_line(message.conversation)}\n\n", HEAD)
        last = message.conversation
        yield from _message(attempt, message)
    if not attempt.messages:
        yield StyledText("Its conversation was not kept, only the report of its failure.", QUIET)


def _why(attempt: ShownAttempt) -> Iterator[StyledText]:
    if attempt.failure is None:
        return
    failure = attempt.failure
    who = f" in {one_line(failure['plugin'])}" if failure["plugin"] else ""
    yield StyledText(f"failed{who}: ", f"{BAD} bold")
    yield StyledText(f"{harmless(failure['text'])}\n", BAD)
    if attempt.became:
        yield StyledText(f"it was {one_line(attempt.became).replace('_', ' ')}\n", QUIET)
    for text in (failure["place"], failure["traceback"]):
        if text:
            yield StyledText(f"{harmless(text)}\n", QUIET)
    yield StyledText("\n")


def _message(attempt: ShownAttempt, message: ShownMessage) -> Iterator[StyledText]:
    yield StyledText(one_line(message.role), f"{ROLES.get(message.role, '')} bold")
    name = f" {one_line(message.name)}" if message.name else ""
    said = "" if message.turn is None else f" turn {message.turn + 1}"
    yield StyledText(name + said, QUIET)
    for reward in attempt.rewards:
        if message.turn is not None and reward.turn == message.turn:
            color = GOOD if reward.value > 0 else BAD if reward.value < 0 else QUIET
            yield StyledText(f"  {one_line(reward.name)} {reward.value:.4g}", color)
    yield StyledText("\n")
    yield from _text(message.reasoning, "dim italic")
    yield from _text(message.content, "")
    for call in message.calls:
        yield StyledText("calls ", QUIET)
        yield StyledText(one_line(call.name or "?"), "bold")
        yield StyledText(f" — {one_line(call.error)}\n" if call.error else "\n", BAD)
        if call.arguments is not None:
            yield from _text(call.arguments, "")
    yield StyledText("\n")


def _text(text: ShownText, style: str) -> Iterator[StyledText]:
    if not text.chars:
        return
    yield StyledText(harmless(text.text), style)
    if len(text.text) < text.chars:
        yield StyledText(f" … {text.chars - len(text.text):,} more characters: the page shows them", QUIET)
    yield StyledText("\n")


def facts(attempt: ShownAttempt) -> Iterator[StyledText]:
    """Yield times, rewards, metrics and the row's extra information."""
    times = [(name, attempt.metrics[key]) for name, key in _SECONDS if attempt.metrics.get(key)]
    yield from _table("Seconds", times)
    yield from _table("Rewards", [(reward.name, reward.value) for reward in attempt.rewards])
    yield from _table("Metrics", sorted(attempt.metrics.items()))
    yield StyledText("Row and reward details\n", HEAD)
    yield StyledText(harmless(attempt.extra))
    yield StyledText(f"\n\n{one_line(attempt.key)}", QUIET)


def _table(title: str, rows: list[tuple[str, float]]) -> Iterator[StyledText]:
    if not rows:
        return
    yield StyledText(f"{title}\n", HEAD)
    for name, value in rows:
        yield StyledText(f"  {value:>12.6g}  {one_line(name)}\n")
    yield StyledText("\n")
