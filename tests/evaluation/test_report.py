"""results.json and report.md of an evaluation: complete, true to the attempts, and without secrets."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import agentrl
from agentrl.errors import InfrastructureError
from agentrl.evaluation.contamination import find_overlap
from agentrl.evaluation.description import DataSetLine, RunDescription, package_commit
from agentrl.evaluation.evidence import Evidence, ExampleKind
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


def test_results_json_has_every_documented_key_and_the_figures(written):
    report, evidence, results, _ = written
    assert list(results) == [
        "format",
        "run",
        "summary",
        "readings",
        "failures",
        "contamination",
        "thresholds",
    ]
    sources = {source["name"]: source for source in results["summary"]["sources"]}
    scored = [a for a in evidence.attempts if a.source == "aime_2024" and a.accuracy is not None]
    by_problem = [np.mean([a.accuracy for a in scored if a.problem == f"aime_2024:{p}"]) for p in range(3)]
    assert sources["aime_2024"]["accuracy"]["value"] == pytest.approx(np.mean(by_problem))
    assert [at["k"] for at in sources["openai/gsm8k"]["pass_at"]] == list(range(1, N + 1))
    assert results["failures"] == {"ServerError: http://***@server:1 | no answer": 1}
    assert results["contamination"]["num_rows"] == 1
    assert results["thresholds"] == list(report.failed_thresholds)
    assert len(results["thresholds"]) == 1
    assert results["run"]["agentrl"]["commit"] == "0123456789ab"


def test_strict_and_flexible_are_means_over_problems(written):
    _, _, results, text = written
    both = results["readings"]["aime_2024"]
    attempts = [t for t in evaluation() if t.data_source == "aime_2024" and t.failure is None]
    for reading in ("strict", "flexible"):
        values = [
            [t.metrics[f"reward/aime_2024/accuracy_{reading}"] for t in attempts if t.group_id == p]
            for p in range(3)
        ]
        assert both[reading]["value"] == pytest.approx(np.mean([np.mean(own) for own in values]))
    assert both["flexible"]["value"] >= both["strict"]["value"]
    assert "## Strict and flexible" in text


def test_the_report_says_all_that_a_reader_must_know(written):
    report, _, _, text = written
    gsm8k = next(source for source in report.summary.sources if source.name == "openai/gsm8k")
    figure = (
        f"{100 * gsm8k.accuracy.value:.1f} % [{100 * gsm8k.accuracy.low:.1f}, "
        f"{100 * gsm8k.accuracy.high:.1f}]"
    )
    assert f"| openai/gsm8k | 12 | {N} | {figure} |" in text
    assert re.search(r"\| openai/gsm8k \| 8 \| \d", text), "pass@8"
    assert "- **aime_2024**: " in text and "fewer than 5" in text  # noqa: PT018 - one line of the report
    for heading in (
        "Several attempts at a problem",
        "By difficulty",
        "Length and tools",
        "Failures",
        "Contamination",
        "Examples",
        "Config",
    ):
        assert f"## {heading}\n" in text
    assert "prompt template `gsm8k@1`" in text
    assert '"</answer>"' in text
    assert "ServerError: http://***@server:1 \\| no answer" in text, "a bar would end the cell"


def test_examples_show_one_attempt_of_each_kind_and_cannot_end_their_fence(written):
    _, evidence, _, text = written
    gsm8k = [example.kind for example in evidence.examples if example.attempt.source == "openai/gsm8k"]
    assert gsm8k == [ExampleKind.SOLVED, ExampleKind.WRONG, ExampleKind.TRUNCATED, ExampleKind.FAILED]
    assert text.count("<details>") == text.count("</details>") == len(evidence.examples) + 1
    first = text[text.index("<details>") :].partition("</details>")[0]
    assert first.count("````") == 2, "the text has a fence of three"
    assert "[assistant, thinking]\nEasy." in first
    assert '[call] calculator {"expression": "1+1"}' in first
    assert "[... 6014 characters ...]" in text


def test_no_text_has_a_secret(written):
    _, _, results, text = written
    for content in (text, json.dumps(results)):
        assert SECRET not in content
        assert "***" in content
    assert results["run"]["config"]["rollout"]["api_key_env"] == "KEY"


@pytest.mark.parametrize(
    "attempts",
    [
        [trajectory("s", 0, 0, chance=1.0)],
        [
            t.replace(outcome=Outcome.TIMEOUT, failure=Failure("late"), rewards=(), metrics={})
            for t in evaluation(n=2)
        ],
        [t.replace(metrics={"accuracy": 0.25}) for t in evaluation(n=3)],
        [trajectory("s", 0, 0, chance=1.0, messages=(Message("user", "half a pair: \ud83d"),))],
    ],
    ids=["one attempt", "nothing scored", "parts of 1", "no valid text"],
)
def test_a_report_is_written_of_whatever_was_measured(tmp_path, attempts):
    report = write_report(tmp_path, description(), gather(attempts))
    assert json.loads((tmp_path / "results.json").read_text())["summary"]["overall"]["num_attempts"] == len(
        attempts
    )
    assert (report.folder / "report.md").stat().st_size


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "report.md").mkdir()
    with pytest.raises(InfrastructureError, match=r"cannot write .*report.md"):
        write_report(tmp_path, description(), gather(evaluation(n=1)))


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=n@example.org"]
    return subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with one commit, from which this package seems to run."""
    module = tmp_path / "checkout" / "agentrl" / "__init__.py"
    module.parent.mkdir(parents=True)
    module.write_text("")
    (tmp_path / "checkout" / "README.md").write_text("")
    git(tmp_path / "checkout", "init", "--quiet")
    git(tmp_path / "checkout", "add", ".")
    git(tmp_path / "checkout", "commit", "--quiet", "-m", "all")
    monkeypatch.setattr(agentrl, "__file__", str(module))
    return tmp_path / "checkout"


def test_the_commit_is_that_of_a_checkout(checkout):
    commit = git(checkout, "rev-parse", "HEAD")[:12]
    assert package_commit() == commit
    (checkout / "README.md").write_text("changed")  # no code of ours
    (checkout / "agentrl" / "notes.txt").write_text("untracked")
    assert package_commit() == commit
    (checkout / "agentrl" / "__init__.py").write_text("changed = True")
    assert package_commit() == commit + "+"
    git(checkout, "commit", "--quiet", "-a", "-m", "changed")
    assert package_commit() == git(checkout, "rev-parse", "HEAD")[:12] != commit


def test_a_package_outside_of_a_checkout_has_no_commit(checkout):
    (checkout / ".git").rename(checkout.parent / ".git")  # a folder above is somebody else's repository
    assert package_commit() is None
    git(checkout, "init", "--quiet")  # no commit yet
    assert package_commit() is None
