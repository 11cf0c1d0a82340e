"""Folders of runs as `agentrl view` finds them, made of random attempts, and what was put into each."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from agentrl.data.failures import FailureTable
from agentrl.data.trajectories import encode, write_parquet
from agentrl.tracking.attempts import FailedAttempt
from agentrl.tracking.metrics import StepRecord
from agentrl.types import (
    SCORED_OUTCOMES,
    Failure,
    Message,
    Outcome,
    PluginId,
    RewardEvent,
    ToolCall,
    Trajectory,
)
from parts.trajectories import make_trajectory

OUTCOMES = (Outcome.COMPLETED, Outcome.TRUNCATED, Outcome.TURN_LIMIT, Outcome.REWARD_ERROR)
FLEET = {
    "time": 1.0,
    "version": 3,
    "servers": [
        {
            "name": "server_0",
            "url": "http://127.0.0.1:30000",
            "origin": "started",
            "kind": "embedded",
            "state": "ready",
            "restarts": 0,
            "message": "",
            "outstanding_tokens": 512,
        }
    ],
    "actors": [
        {"name": "rollout-0-5f3a9c1e", "state": "playing", "restarts": 1, "in_flight": 7, "finished": 30}
    ],
}
"""The file of servers and rollout actors, as a run writes it."""
WORDS = ("seven", "Needle", "İstanbul", "a\x1b[31mred", "<script>", "\u202eevil", "plain")


@dataclass(frozen=True)
class Stored:
    """An attempt of a folder: where it is, and what is in it; trajectory is None of a reported failure."""

    key: str
    set: str
    step: int
    trajectory: Trajectory | None
    failed: FailedAttempt | None = None
    learned_by: int | None = None


def random_trajectory(rng: random.Random, *, group: int, member: int, version: int) -> Trajectory:
    """Return an attempt of 1 to 3 turns with tools, rewards and tokens of random lengths."""
    num_turns = rng.randint(1, 3)
    outcome = rng.choice(OUTCOMES)
    turn_ids, messages = [-1] * rng.randint(1, 5), [Message("user", f"{rng.choice(WORDS)} of {group}?")]
    num_calls = 0
    for turn in range(num_turns):
        turn_ids += [turn] * rng.randint(1, 6) + [-1] * rng.randint(0, 2)
        calls: tuple[ToolCall, ...] = ()
        if turn < num_turns - 1 and rng.random() < 0.5:
            num_calls += 1
            calls = (ToolCall(f"call_{turn}", "calculator", {"expression": f"{group}*{turn}"}, None),)
        messages.append(Message("assistant", rng.choice(WORDS), calls))
        if calls:
            messages.append(
                Message("tool", str(group * turn), tool_call_id=f"call_{turn}", name="calculator")
            )
    while turn_ids[-1] < 0:
        turn_ids.pop()
    versions = np.where(np.asarray(turn_ids) >= 0, version - (np.asarray(turn_ids) == 0), -1)
    scored = outcome in SCORED_OUTCOMES
    reward = rng.choice((0.0, 0.25, 1.0))
    return make_trajectory(
        turn_ids,
        group_id=group,
        member=member,
        task_id=f"t:{group % 3}",
        data_source=rng.choice(("sums", "products")),
        agent_name=rng.choice(("tool_agent", "single_turn_agent")),
        token_ids=[rng.randrange(200) for _ in turn_ids],
        behavior_logprobs=[-rng.random() * 3 if turn >= 0 else 0.0 for turn in turn_ids],
        versions=np.maximum(versions, np.where(versions < 0, -1, 0)),
        outcome=outcome,
        failure=None
        if scored
        else Failure(f"{rng.choice(WORDS)} broke", PluginId("reward", "mine"), "KeyError"),
        rewards=(RewardEvent("mine", reward, len(turn_ids) - 1), RewardEvent("more", 0.5, len(turn_ids) - 1))
        if scored
        else (),
        messages=tuple(messages),
        metrics={
            "num_turns": float(num_turns),
            "num_tool_calls": float(num_calls),
            "num_tool_errors": 0.0,
            "generate_s": rng.random(),
            **({"num_calls/calculator": float(num_calls)} if num_calls else {}),
        },
        is_greedy=member == 2,
    )


def write_run(
    folder: Path, *, seed: int = 0, steps: int = 3, groups: int = 2, members: int = 3
) -> list[Stored]:
    """Write a run of some steps, with a validation and reported failures; return its attempts in order."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("trajectories", "validation"):
        (folder / name).mkdir(exist_ok=True)
    (folder / ".lock").touch()
    (folder / "config.yaml").write_text("trainer: {steps: 9}\nbuffer: {max_staleness: 2}\n")
    (folder / "control").mkdir(exist_ok=True)
    (folder / "control" / "servers.json").write_text(json.dumps(FLEET))
    stored: list[Stored] = []
    records: list[StepRecord] = []
    for step in range(steps, 0, -1):
        made = [
            random_trajectory(rng, group=10 * step + group, member=member, version=step)
            for group in range(groups)
            for member in range(members)
        ]
        name = f"trajectories/step_{step:06d}.parquet"
        write_parquet(folder / name, encode(made), step=step, learned_by=step)
        stored += [Stored(f"{name}:{i}", "training", step, t, learned_by=step) for i, t in enumerate(made)]
        if step == 2:
            played = [random_trajectory(rng, group=g, member=0, version=1) for g in range(4)]
            name = "validation/step_000002.parquet"
            write_parquet(folder / name, encode(played), step=2)
            stored += [Stored(f"{name}:{i}", "validation", 2, t) for i, t in enumerate(played)]
        values = {
            "rollout/reward_mean": 0.1 * step,
            "time/step_s": 2.0,
            "buffer/drawn": 6.0,
            "buffer/ready": 1.0,
        }
        records.append(StepRecord("train", step, step + 1, 2.0 * step, {**values, "rollout/lag/mean": 0.5}))
    (folder / "metrics.jsonl").write_bytes(b"".join(record.to_line() for record in reversed(records)))
    failed = [
        FailedAttempt(
            Failure("ran out of luck", None, "Timeout", "mine.py:3", "Traceback"),
            outcome=Outcome.TIMEOUT,
            became=became,
            time=1.7e9,
            task_id="t:9",
            data_source="sums",
            agent_name="tool_agent",
            group_id=99,
            member=index,
            version=1,
        )
        for index, became in enumerate(("retried", "masked", "dropped"))
    ]
    table = FailureTable(folder / "failures.parquet", keeps_earlier=False)
    table.add(failed, step=2)
    table.write(is_last=True)
    own = [one for one in failed if one.became != "masked"]
    stored += [Stored(f"failures.parquet:{i}", "failed", 2, None, one) for i, one in enumerate(own)]
    return stored


HOSTILE = [
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'><svg onload='hacked = 1'>",
    "\x1b[31mred\x1b[0m \x00\x07 \u202egnp.exe \u2066\u200b end",
    "javascript:window.hacked=1 </textarea></title><base href='http://evil.example/'>",
]


def write_hostile(folder: Path) -> Trajectory:
    """Write a run whose last step is one attempt in which every text attacks who looks at it; return it."""
    hostile = "".join(HOSTILE)
    call = ToolCall("c", hostile, {hostile: hostile}, hostile)
    made = make_trajectory(
        [-1, 0, 0],
        task_id=hostile,
        data_source=hostile,
        agent_name=hostile,
        outcome=Outcome.REWARD_ERROR,
        messages=(
            Message("user", HOSTILE[0]),
            Message("assistant", hostile, (call,), reasoning=hostile),
            Message("tool", hostile, name=hostile),
            Message(hostile, "x"),
        ),
        rewards=(RewardEvent(hostile, 1.0, 2),),
        failure=Failure(hostile, None, hostile, hostile, hostile),
        metrics={hostile: 1.0, f"num_calls/{hostile}": 1.0},
        extra_info={hostile: hostile},
    )
    write_run(folder)
    write_parquet(folder / "trajectories/step_000009.parquet", encode([made]), step=9, learned_by=9)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(
            StepRecord("train", 9, 9, 9.0, {f"rollout/accuracy/{hostile.replace('/', '')}": 0.5}).to_line()
        )
    return made
