"""The picture of an evaluation: as many panels as there is to show, and no secret."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping

import numpy as np
import pytest

from agentrl.evaluation.contamination import find_overlap
from agentrl.evaluation.description import DataSetLine, RunDescription
from agentrl.evaluation.evidence import Evidence
from agentrl.evaluation.report import write_report
from agentrl.figures.thresholds import parse_threshold
from agentrl.types import Failure, Message, Outcome, RewardEvent, ToolCall, Trajectory
from parts.trajectories import make_trajectory

N = 8
SECRET = "sk-very-secret"


def trajectory(
    source: str, problem: int, member: int, *, chance: float, difficulty: str | None = None, **changes
) -> Trajectory:
    """Right by a fixed draw; the right answer is not always in the right form."""
    draw = np.random.default_rng([problem, member]).random()
    is_right, has_form = float(draw < chance), float(draw < 0.8)
    length = 5 + (7 * problem + 3 * member) % 40
    name = source.rpartition("/")[2]
    fields = {
        "group_id": problem,
        "member": member,
        "task_id": f"{name}:{problem}",
        "data_source": source,
        "agent_name": "tool_agent",
        "messages": (
            Message("system", "You are a tutor."),
            Message("user", f"What is {problem} + 1 | 2?"),
            Message(
                "assistant",
                "Let me see.",
                (ToolCall("1", "calculator", {"expression": "1+1"}),),
                reasoning="Easy.",
            ),
            Message("tool", "2", tool_call_id="1", name="calculator"),
            Message("assistant", "```\n#### 2\n```" + "x" * 9000 * (member == 0)),
        ),
        "rewards": (RewardEvent(name, is_right, length - 1),),
        "metrics": {
            "accuracy": is_right * has_form,
            f"reward/{name}": is_right,
            f"reward/{name}/accuracy_strict": is_right * has_form,
            f"reward/{name}/accuracy_flexible": is_right,
            f"reward/{name}/format": has_form,
        },
        "extra_info": {"reward_details": {name: {"answer": "2" if is_right else str(member)}}}
        | ({"difficulty": difficulty} if difficulty else {}),
    }
    return make_trajectory([-1] * 3 + [0] * (length - 3), **{**fields, **changes})


def evaluation(n: int = N) -> list[Trajectory]:
    found = []
    for member in range(n):
        found += [
            trajectory(
                "openai/gsm8k", p, member, chance=0.3 + 0.05 * p, difficulty="easy" if p % 2 else "hard"
            )
            for p in range(12)
        ]
        found += [trajectory("aime_2024", p, member, chance=0.1 * (p == 0)) for p in range(3)]
    failed = found[1].replace(
        outcome=Outcome.MODEL_ERROR,
        failure=Failure(f"ServerError: http://me:{SECRET}@server:1 | no answer"),
        rewards=(),
        metrics={},
    )
    cut = found[2].replace(outcome=Outcome.TRUNCATED, metrics={**found[2].metrics, "accuracy": 0.0})
    return [found[0], failed, cut, *found[3:]]


def description(**changes) -> RunDescription:
    config: Mapping = {
        "tracking": {"api_key": SECRET},
        "rollout": {"urls": [f"http://me:{SECRET}@server:1"], "api_key_env": "KEY"},
    }
    fields = {
        "model": f"https://me:{SECRET}@models.example/tiny",
        "servers": "two embedded servers",
        "data_sets": (DataSetLine("gsm8k", 12, "gsm8k@1"), DataSetLine("aime_2024", 3, "none")),
        "sampling": {"n": N, "temperature": 0.6, "stop": ["</answer>"]},
        "config": config,
        "started": "2026-03-04T05:06:07+00:00",
        "seconds": 75.0,
        "commit": "0123456789ab",
    }
    return RunDescription(**{**fields, **changes})


def gather(trajectories):
    evidence = Evidence()
    for trajectory in trajectories:
        evidence.add(trajectory)
    return evidence


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    train = folder / "train.jsonl"
    train.write_text(json.dumps({"prompt": "What is 3 + 1 | 2?"}))
    evidence = gather(evaluation())
    note = find_overlap(evidence.questions, [str(train)])
    report = write_report(
        folder / "out",
        description(),
        evidence,
        contamination=note,
        thresholds=[parse_threshold("gsm8k=0.99"), parse_threshold("all=0")],
    )
    return (
        report,
        evidence,
        json.loads((folder / "out" / "results.json").read_text()),
        (folder / "out" / "report.md").read_text(),
    )


def test_secrets_never_appear(written):
    report, _, results, text = written
    for content in (text, json.dumps(results)):
        assert SECRET not in content
        assert "***" in content
    assert results["run"]["config"]["rollout"]["api_key_env"] == "KEY"
    assert SECRET.encode() not in (report.folder / "report.png").read_bytes()


def test_the_picture_has_as_many_panels_as_there_is_to_show(written, tmp_path):
    report = written[0]
    greedy = write_report(tmp_path, description(), gather(t.replace(extra_info={}) for t in evaluation(n=1)))
    widths = [
        struct.unpack(">II", (folder / "report.png").read_bytes()[16:24])[0]
        for folder in (report.folder, greedy.folder)
    ]
    assert widths[0] == 2 * widths[1], "pass@k needs several attempts, and difficulties rows that name one"
    text = (tmp_path / "report.md").read_text()
    assert "## Several attempts" not in text
    assert "## Contamination" not in text
