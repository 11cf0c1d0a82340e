"""Rewards of scope `batch` in their own process: the same results as here, the user's own line in errors, and
a process that ends is no end of the run.
"""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.cluster.actors import ActorKind
from agentrl.config.schema import Config
from agentrl.controller.batch_rewards import BatchRewards
from agentrl.controller.batch_scorer import BatchScore, RemoteBatchRewards, launch_scorer
from agentrl.data.attempt_facts import AttemptFacts
from agentrl.errors import DiskError, RewardError
from agentrl.plugins import load_plugins
from agentrl.plugins.blame import failure_of
from agentrl.types import Failure, Message, Outcome, RewardEvent, Task
from parts.local_ray import local_ray
from parts.trajectories import make_task, make_trajectory, stored

FUNCTION = """
import os
import time
from pathlib import Path


def compute_score(data_sources, solution_strs, ground_truths, extra_infos, folder):
    do = Path(folder, "do").read_text()
    if do == "raise":
        raise OSError("the grader is away")  # the line
    if do == "die":
        os._exit(3)
    if do == "hang":
        time.sleep(3600)
    return [
        {"score": len(text) + index / 8, "truth": truth, "pid": f"process {os.getpid()}"}
        for index, (text, truth) in enumerate(zip(solution_strs, ground_truths))
    ]
"""


def launch_buffer():
    """Start an actor with what the scorer asks the buffer for."""

    class Tasks:  # local, so that Ray sends its code: the actor cannot import this file
        def tasks(self, group_ids):
            questions = [(Message("user", f"question {group_id}"),) for group_id in group_ids]
            return [
                Task(f"t:{group_id}", "s", messages, "a", ground_truth=str(group_id))
                for group_id, messages in zip(group_ids, questions, strict=True)
            ]

    return ActorKind("Tasks", "the tasks", timeout_s=60.0, num_threads=2).launch({}, Tasks)


def task_of(group_id):
    return make_task(f"question {group_id}", truth=str(group_id), task_id=f"t:{group_id}")


def attempt(group, member, answer, **fields):
    messages = (Message("user", "?"), Message("assistant", answer))
    own = {"messages": messages, "rewards": (RewardEvent("step", 0.5, 2),), "metrics": {"accuracy": 0.0}}
    return make_trajectory([-1, 0, 0, -1, 1], group_id=group, member=member, **{**own, **fields})


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scorer")
    (folder / "batch.py").write_text(FUNCTION)
    return folder


@pytest.fixture(scope="module")
def config(place):
    function = {
        "path": str(place / "batch.py"),
        "scope": "batch",
        "kwargs": {"folder": str(place)},
    }
    return Config.model_validate(
        {"reward": {"custom_function": function, "timeout_s": 2.0, "solution_str": "messages"}}
    )


@pytest.fixture(scope="module")
def remote(config):
    with local_ray():
        rewards = RemoteBatchRewards(is_any=True)
        buffer = launch_buffer()  # it lives as long as this name
        rewards.connect(launch_scorer(config, buffer, None))
        yield rewards


def played(tmp_path):
    failed = {"outcome": Outcome.TIMEOUT, "failure": Failure("late"), "rewards": ()}
    trajectories = [
        attempt(4, 0, "one"),
        attempt(4, 1, "three", **failed),
        attempt(7, 0, "seven", outcome=Outcome.TRUNCATED),
    ]
    return trajectories, stored(*trajectories, folder=tmp_path / "attempts")


def without_pid(trajectory):
    details = {
        name: {key: value for key, value in own.items() if key != "pid"}
        for name, own in trajectory.extra_info.get("reward_details", {}).items()
    }
    metrics = {name: value for name, value in trajectory.metrics.items() if name != "reward_s"}
    return trajectory.outcome, trajectory.rewards, trajectory.reward, metrics, details


def test_a_batch_is_scored_as_in_this_process_and_by_another(remote, config, place, tmp_path):
    (place / "do").write_text("score")
    trajectories, attempts = played(tmp_path)
    rewards = BatchRewards(config.reward, load_plugins(), max_response_tokens=1, model=config.model)
    expected = rewards.score([task_of(t.group_id) for t in trajectories], trajectories)
    found = remote.score(attempts)
    assert [a.source for a in found] == [a.source for a in attempts], "what is stored stays where it is"
    for one, other in zip(found, expected, strict=True):
        assert without_pid(one.load()) == without_pid(other)
        assert one.reward_places == AttemptFacts.of(other).reward_places
        assert one.reward == other.reward
    here, there = (t.extra_info["reward_details"]["custom"]["pid"] for t in (expected[0], found[0].load()))
    assert here != there
    assert [e.value for e in found[2].rewards] == [0.5, 5.125], "of what can be scored, the second"
    validated = remote.score_validation([task_of(t.group_id) for t in trajectories], trajectories)
    assert [without_pid(t) for t in validated] == [without_pid(t) for t in expected]


def test_the_users_line_is_told_and_no_attempt_is_scored(remote, place, tmp_path):
    (place / "do").write_text("raise")
    trajectories, attempts = played(tmp_path)
    with pytest.raises(RewardError, match=r"^reward 'custom' raised OSError: the grader is away") as caught:
        remote.score(attempts)
    line = 1 + FUNCTION.splitlines().index('        raise OSError("the grader is away")  # the line')
    failures = [failure_of(caught.value)]
    validated = remote.score_validation([task_of(t.group_id) for t in trajectories], trajectories)
    assert [t.outcome for t in validated] == [Outcome.REWARD_ERROR, Outcome.TIMEOUT, Outcome.REWARD_ERROR]
    assert validated[1].failure == Failure("late")
    for failure in [*failures, validated[0].failure]:
        assert failure.plugin is not None
        assert str(failure.plugin) == "reward 'custom'"
        assert failure.error == "OSError"
        assert failure.place.endswith(f"batch.py:{line}")
        assert "the line" in failure.traceback


def test_a_function_that_hangs_or_ends_the_process_loses_its_batch_only(remote, place, tmp_path):
    trajectories, attempts = played(tmp_path)
    tasks = [task_of(t.group_id) for t in trajectories]
    (place / "do").write_text("hang")
    with pytest.raises(RewardError, match=r"^reward 'custom': timed out after 2 s"):
        remote.score(attempts)
    (place / "do").write_text("die")
    with pytest.raises(RewardError, match=r"the scorer of batches died.*rewards of scope batch run in"):
        remote.score(attempts)
    (died, late, _) = remote.score_validation(tasks, trajectories)
    assert "the scorer of batches died" in str(died.failure)
    assert (died.outcome, late.outcome) == (Outcome.REWARD_ERROR, Outcome.TIMEOUT)
    (place / "do").write_text("score")
    assert remote.score(attempts)[0].reward == 3.5


def test_a_trajectory_that_is_gone_ends_the_run_and_is_no_verdict_of_a_reward(remote, place, tmp_path):
    (place / "do").write_text("score")
    _, attempts = played(tmp_path)
    gone = replace(attempts[0].source, path=str(tmp_path / "gone.arrows"))
    with pytest.raises(DiskError, match=r"cannot be read"):
        remote.score([attempts[0].replace(source=gone), *attempts[1:]])


@settings(max_examples=30)
@given(num_turns=st.integers(1, 3), length=st.integers(2, 60), value=st.floats(-2, 2), data=st.data())
def test_what_comes_back_is_all_that_scoring_changed_and_does_not_grow(num_turns, length, value, data):
    turns = np.concatenate([[-1, *[turn] * length] for turn in range(num_turns)])
    one = make_trajectory(turns, extra_info={"kept": 1}, metrics={"a": 1.0})
    position = data.draw(st.sampled_from(np.flatnonzero(turns >= 0).tolist()))
    scored = one.replace(
        rewards=(RewardEvent("r", value, position),),
        metrics={"a": 2.0, "b": value},
        extra_info={"kept": 1, "reward_details": {"r": {"x": "y"}}},
    )
    score = pickle.loads(pickle.dumps(BatchScore.of(one, scored)))
    [kept] = stored(one)
    there = score.on_facts(kept)
    assert there.load().reward == score.on_trajectory(one).reward == value
    assert there.reward_places == AttemptFacts.of(scored).reward_places
    for found in (there.load(), score.on_trajectory(one)):
        assert (found.rewards, dict(found.metrics), found.extra_info) == (
            scored.rewards,
            scored.metrics,
            scored.extra_info,
        )
    assert len(pickle.dumps(score)) < 1000
