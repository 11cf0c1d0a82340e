"""Shows a played row in the terminal: transcript, tokens coloured by mask, rewards with their positions,
outcome.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from agentrl.extras.testing.one_row.play import PlayedRow
from agentrl.rollout.environment import ENVIRONMENT_FACTS
from agentrl.types import SCORED_OUTCOMES, ConversationRecord, Ending, Message, Trajectory

ROLE_STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
ACTION_STYLE, CONTEXT_STYLE, REWARD_STYLE, FORK_STYLE = (
    "bold green",
    "dim",
    "bold black on yellow",
    "bold white on red",
)


def show(played: PlayedRow, console: Console, *, shows_traceback: bool = False) -> None:
    """Print one trajectory: transcript, tokens, rewards, metrics and outcome."""
    trajectory, task = played.trajectory, played.task
    console.rule(
        f"task {escape(task.task_id)}: agent {escape(task.agent_name)}, data source "
        f"{escape(task.data_source)}"
    )
    for one in trajectory.conversations or (ConversationRecord("", trajectory.messages),):
        if one.name:
            who = "" if one.opponent is None else f", opponent {escape(one.opponent)}"
            console.rule(f"conversation {escape(one.name)}{who}")
        for message in one.messages:
            console.print(transcript_line(message))
    ending = trajectory.ending or Ending()
    for message in ending.unseen:
        console.print(transcript_line(message).append("  (the model did not see it)", style="italic dim"))
    if ending.farewell:
        console.print(Text(ending.farewell, style="cyan"))
    console.rule(
        f"{trajectory.num_tokens} tokens: [{ACTION_STYLE}]{trajectory.num_action_tokens} sampled (trained "
        f"on)[/], [{CONTEXT_STYLE}]the rest context[/]"
    )
    console.print(coloured_tokens(played))
    console.rule("rewards")
    console.print(reward_table(trajectory) if trajectory.rewards else "none")
    if task.ground_truth is not None:
        console.print(Text(f"ground truth: {task.ground_truth}"))
    console.print(
        Text(
            "metrics: "
            + ", ".join(f"{name}={value:.4g}" for name, value in sorted(trajectory.metrics.items()))
        )
    )
    if facts := trajectory.extra_info.get(ENVIRONMENT_FACTS):
        console.print(Text(f"facts of the environment: {json.dumps(facts, ensure_ascii=False)}"))
    for survived in played.survived:
        console.print(Text(f"a failure that did not end the attempt: {survived}", style="yellow"))
    reason = trajectory.failure or ending.limit
    failure = f": {reason}" if reason else ""
    reward = (
        f", reward {trajectory.reward:g}" if trajectory.outcome in SCORED_OUTCOMES else "; it has no reward"
    )
    console.print(Text(f"outcome: {trajectory.outcome.value}{failure}{reward}", style="bold"))
    if shows_traceback and trajectory.failure and trajectory.failure.traceback:
        console.print(Text(trajectory.failure.traceback))


def transcript_line(message: Message) -> Text:
    """Return one message as text: its role, reasoning, content and tool calls."""
    label = message.role if message.name is None else f"{message.role} {message.name}"
    line = Text.assemble((f"{label:>12}  ", ROLE_STYLES[message.role]))
    if message.reasoning:
        line.append(f"({message.reasoning.strip()}) ", style="italic dim")
    line.append(message.content)
    for call in message.tool_calls:
        shown = (
            json.dumps(call.arguments, ensure_ascii=False)
            if call.arguments is not None
            else f"cannot be read: {call.error}"
        )
        line.append(f"\n{'':>14}-> {call.name or '?'}({shown})", style="yellow")
    return line


def coloured_tokens(played: PlayedRow) -> Text:
    """Return the text of all tokens with different styles for action and context tokens; rewards and forks
    are inserted. An image is one mark.
    """
    trajectory, text = played.trajectory, Text()
    forks = set(trajectory.segment_starts[1:])
    images = {image.position: image for image in trajectory.images}
    for start, end in stretches(trajectory):
        if start in forks:
            text.append("[fork: a segment begins]", style=FORK_STYLE)
        style = ACTION_STYLE if trajectory.action_mask[start] else CONTEXT_STYLE
        image = images.get(start)
        shown = (
            played.chat.decode(trajectory.token_ids[start:end].tolist())
            if image is None
            else f"[image {image.columns}x{image.rows}]"
        )
        text.append(shown, style=style)
        for event in trajectory.rewards:
            if event.position == end - 1:
                text.append(f"[{event.name} {event.value:+g}]", style=REWARD_STYLE)
    return text


def stretches(trajectory: Trajectory) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of runs of action or context tokens, split after each reward, before each fork, and
    around images.

    Whole runs are decoded at once, because one character can consist of several tokens.
    """
    num, mask = trajectory.num_tokens, trajectory.action_mask
    cuts = {event.position + 1 for event in trajectory.rewards} | set(trajectory.segment_starts)
    cuts |= {place for i in trajectory.images for place in (i.position, i.position + i.num_tokens)}
    cuts |= {index for index in range(1, num) if mask[index] != mask[index - 1]}
    bounds = sorted({0, num, *cuts})
    yield from itertools.pairwise(bounds)


def reward_table(trajectory: Trajectory) -> Table:
    """Return a table of the rewards with the turn and token of each."""
    table = Table("reward", "value", "turn", "token")
    for event in trajectory.rewards:
        table.add_row(
            event.name, f"{event.value:+g}", str(trajectory.turn_ids[event.position]), str(event.position)
        )
    return table
