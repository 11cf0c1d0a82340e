"""Scored attempts as readable text: conversation, ground truth and rewards."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from agentrl.rollout.scoring import DETAILS
from agentrl.types import SCORED_OUTCOMES, Message, Task, Trajectory

RULE = "-" * 80


def examined(tasks: Sequence[Task], trajectories: Sequence[Trajectory], count: int) -> Iterator[str]:
    """Yield at most `count` scored attempts as text, alternating between the data sources."""
    by_source: dict[str, list[str]] = {}
    for task, trajectory in zip(tasks, trajectories, strict=True):
        texts = by_source.setdefault(trajectory.data_source, [])
        if trajectory.outcome in SCORED_OUTCOMES and len(texts) < count:
            texts.append(describe(task, trajectory))
    in_turn = (text for texts in zip_longest(*by_source.values()) for text in texts if text is not None)
    yield from (text for text, _ in zip(in_turn, range(count), strict=False))


def describe(task: Task, trajectory: Trajectory) -> str:
    """Return an attempt in full: messages, ground truth, reward events, rewards' metrics and details."""
    lines = [RULE, f"{trajectory.task_id} ({trajectory.data_source}, {trajectory.agent_name}, {trajectory.outcome.value})"]
    lines += [part for message in trajectory.messages for part in _message(message)]
    lines.append(f"[ground truth] {task.ground_truth}")
    lines += [f"[reward] {event.name}: {event.value:g} on token {event.position}" for event in trajectory.rewards]
    lines += [f"[{name}] {value:g}" for name, value in sorted(trajectory.metrics.items()) if name.startswith("reward/")]
    for name, details in trajectory.extra_info.get(DETAILS, {}).items():
        lines += [f"[reward/{name}/{key}] {value}" for key, value in details.items()]
    return "\n".join([*lines, f"[sum] {trajectory.reward:g}", RULE])


def _message(message: Message) -> Iterator[str]:
    if message.reasoning:
        yield f"[{message.role}, thinking] {message.reasoning}"
    if message.content or not (message.reasoning or message.tool_calls):
        yield f"[{message.role}] {message.content}"
    for call in message.tool_calls:
        yield f"[call] {call.name} {json.dumps(call.arguments, ensure_ascii=False) if call.error is None else call.error}"
