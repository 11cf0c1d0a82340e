"""Validation of a run, without its processes: it always ends, of one version, with every attempt accounted
for.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from agentrl.cluster.user_files import user_files
from agentrl.config.evaluation import EvalConfig
from agentrl.config.schema import Config
from agentrl.config.trainer import TrainerConfig
from agentrl.controller.saving import metric_of
from agentrl.controller.validation import Validation, of_version
from agentrl.data.trajectories import decode, read_parquet
from agentrl.figures.attempts import attempt_of
from agentrl.figures.summary import summarise
from agentrl.figures.validation_metrics import figures, shown_ks
from agentrl.tracking.attempts import FailedAttempt
from agentrl.tracking.unwritten import UnwrittenFiles
from agentrl.types import Lease, Message, Outcome, RewardEvent, Task, Trajectory
from parts.trajectories import make_trajectory

SOURCES = ("gsm8k", "aime_2024")
N = 4


class Rows:
    """Six rows of two sources."""

    def __len__(self) -> int:
        return 6

    def task(self, position: int) -> Task:
        return Task(
            f"val:{position}", SOURCES[position % 2], (Message("user", "1 + 1?"),), "single_turn_agent"
        )


class Rollouts:
    """Two actors: the first plays its share, member m of an even row being right when m < 2; `fate` is what
    becomes of the second.
    """

    def __init__(self, fate: str, version: int = 7) -> None:
        self.fate, self.version = fate, version
        self.is_alive = {"first": True, "second": fate != "dies"}
        self.shares: dict[str, list[Lease]] = {}

    def start_play(self, leases: Sequence[Lease]) -> dict[str, list[Lease]]:
        self.shares = {"first": list(leases[::2]), "second": list(leases[1::2])}
        return self.shares

    def collect(self, result: str) -> list[Trajectory] | None:
        if not self.is_alive[result]:
            return None
        version = self.version if result == "first" else self.version + (self.fate == "publishes")
        return [
            attempt(lease.task, lease.group_id, member, version)
            for lease in self.shares[result]
            for member in range(N)
        ]


class Driver:
    """What validation needs of a Run."""

    def __init__(self, rollouts: Rollouts) -> None:
        self.rollouts = rollouts
        self.said: list[str] = []
        self.recorded: dict[str, float] = {}
        unwritten = UnwrittenFiles(self.said.append)
        self.observer = SimpleNamespace(
            say=self.said.append,
            validation=self._record,
            sample_attempts=self._sample,
            unwritten=unwritten,
            failures=self,
        )

    def wait(self, refs: Sequence[str], *, timeout_s: float) -> list[str]:
        assert timeout_s > 5.0, (
            "the actors end by themselves at the deadline; they are given up only after it"
        )
        return [ref for ref in refs if ref == "first" or self.rollouts.fate != "hangs"]

    def add(self, failed: Sequence[FailedAttempt], *, step: int) -> None:
        self.failed = failed

    def _sample(self, attempts: Sequence[Trajectory], *, step: int, version: int) -> None:
        self.sampled = (len(attempts), step, version)

    def _record(self, step: int, version: int, metrics: dict[str, float], *, baseline: str | None) -> None:
        self.recorded = dict(metrics)


def attempt(task: Task, group: int, member: int, version: int) -> Trajectory:
    is_right = float(member < 2)
    return make_trajectory(
        [-1, -1, 0, 0],
        group_id=group,
        member=member,
        version=version,
        task_id=task.task_id,
        data_source=task.data_source,
        agent_name=task.agent_name,
        messages=(*task.messages, Message("assistant", "2")),
        rewards=(RewardEvent("gsm8k", is_right, 3),),
        metrics={"accuracy": is_right, "reward/gsm8k": is_right},
        extra_info={"reward_details": {"gsm8k": {"answer": "2" if member < 2 else f"{member} apples"}}},
    )


def validate(fate: str, folder=None) -> tuple[Driver, dict[str, float]]:
    driver = Driver(Rollouts(fate))
    config = EvalConfig(n=N, timeout_s=5.0)
    validation = Validation(
        Rows(), config, rewards=SimpleNamespace(is_any=False), folder=folder, num_examine=0
    )
    return driver, dict(validation.run(driver, step=3, version=7))


@pytest.mark.parametrize(
    ("fate", "reason"),
    [
        ("dies", "the rollout actor that played it died"),
        ("hangs", "the rollout actor that played it had not responded at the end of eval.timeout_s=5"),
        ("publishes", "validation of version 7 contains tokens sampled by other versions: 8"),
    ],
)
def test_attempts_that_say_nothing_of_this_version_are_failures_with_a_reason(tmp_path, fate, reason):
    driver, metrics = validate(fate, tmp_path)
    kept = decode(read_parquet(tmp_path / "step_000003.parquet"))
    assert sorted((t.group_id, t.member) for t in kept) == [
        (row, member) for row in range(6) for member in range(N)
    ]
    assert {str(t.failure) for t in kept if t.outcome is Outcome.ABORTED} == {reason}
    assert {(f.failure.text, f.became, f.version) for f in driver.failed} == {(reason, "not_scored", 7)}
    assert (metrics["val/trajectories"], metrics["val/failed"]) == (6 * N, 3 * N)
    assert driver.sampled == (6 * N, 3, 7), "trackers get failed attempts too"
    assert metrics["val/accuracy"] == 0.5, "a failed attempt is no wrong answer"


def test_figures_are_those_of_an_evaluation_with_their_intervals():
    driver, metrics = validate("plays")
    assert driver.recorded == metrics
    summary = summarise(
        [attempt_of(attempt(Rows().task(row), row, member, 7)) for row in range(6) for member in range(N)]
    )
    for prefix, source in (
        ("val/", summary.overall),
        *((f"val/source/{source.name}/", source) for source in summary.sources),
    ):
        shown = [("mean@4", source.accuracy)]
        shown += [
            (f"{name}@{k}", at[k - 1].estimate)
            for name, at in (("pass", source.pass_at), ("maj", source.majority_at))
            for k in (2, 4)
        ]
        for name, estimate in shown:
            found = tuple(metrics[f"{prefix}{name}{limit}"] for limit in ("", "/low", "/high"))
            assert found == (estimate.value, estimate.low, estimate.high)
    assert metrics["val/mean@4"] == metrics["val/accuracy"] == 0.5
    assert metrics["val/pass@2"] == pytest.approx(
        1 - 1 / 6
    )  # two of four are right: both drawn are wrong in 1 of 6 ways
    assert metrics["val/maj@4"] == 1.0, "the right answer is the only one given twice"
    assert not [name for name in metrics if name.startswith("val/pass@3")]


@pytest.mark.parametrize(("n", "ks"), [(1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (32, [1, 2, 4, 8, 16, 32])])
def test_powers_of_two_and_n_are_shown(n, ks):
    assert shown_ks(n) == ks


def test_figures_without_an_interval_or_a_score_are_absent():
    one = [attempt_of(attempt(Rows().task(0), 0, 0, 7))]
    assert "val/mean@1" in figures(summarise(one), prefix="val/")
    (failed,) = [
        attempt_of(attempt(Rows().task(0), 0, 0, 7).replace(outcome=Outcome.TIMEOUT, rewards=(), metrics={}))
    ]
    assert figures(summarise([failed]), prefix="val/") == {}


def test_rewards_and_tools_of_validation_are_looked_for_like_those_of_training():
    config = Config.model_validate({"eval": {"rewards": {"x": "mine.py:Mine"}, "tools": ["other.py:Other"]}})
    assert {"mine.py", "other.py"} <= set(user_files(config))
    with pytest.raises(
        ValueError, match=r"eval.rewards.x uses the reward model, but reward_model.model.path is empty"
    ):
        Config.model_validate({"eval": {"rewards": {"x": "reward_model"}}})


def test_what_is_lost_is_said():
    driver, _ = validate("dies")
    assert driver.said == ["validation lost 12 attempts: the rollout actor that played it died"]


def test_one_version_is_left_as_it_is():
    trajectory = attempt(Rows().task(0), 0, 0, 7)
    assert of_version(trajectory, 7) is trajectory
    mixed = trajectory.replace(versions=np.array([-1, -1, 6, 7], np.int32))
    assert of_version(mixed, 7).rewards == ()
    assert of_version(trajectory.replace(action_mask=np.zeros(4, bool)), 99).outcome is Outcome.COMPLETED


def test_a_validation_without_a_score_chooses_no_checkpoint():
    trainer = TrainerConfig(keep_best=1, best_metric="val/accuracy")
    assert metric_of({"val/trajectories": 8.0, "val/failed": 8.0}, trainer) is None
    assert metric_of({"val/trajectories": 8.0, "val/failed": 7.0, "val/accuracy": 1.0}, trainer) == 1.0
