"""Opponents that follow the policy: whatever the steps, resumes and recoveries, an opponent is the policy of
the last step at which it was due.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import mean

from hypothesis import given
from hypothesis import strategies as st

from agentrl.config.opponents import OpponentConfig
from agentrl.data.attempt_facts import AttemptFacts
from agentrl.errors import DiskError
from agentrl.extras.opponents.closing import opponent_lines
from agentrl.extras.opponents.refresh import OpponentRefresh
from agentrl.figures.trajectory_metrics import summarise_attempts
from agentrl.tracking.metrics import StepRecord
from agentrl.types import ConversationRecord
from parts.trajectories import make_trajectory


class Policy:
    """A learner that exports a file; `fails`: the disk is full."""

    def __init__(self) -> None:
        self.fails = False

    def run(self, method, folder) -> None:
        assert method.__name__ == "export"
        if self.fails:
            raise DiskError("no space left")
        Path(folder).mkdir(parents=True)
        (Path(folder) / "model.safetensors").write_bytes(b"weights")


class Fleet:
    """Frozen servers that remember what they have, and can read it."""

    def __init__(self) -> None:
        self.has = {}

    def replace(self, key, snapshot, *, timeout_s, limit) -> None:
        assert snapshot is None or (Path(snapshot.folder) / "model.safetensors").is_file()
        self.has[key] = 0 if snapshot is None else snapshot.step


def opponents(intervals):
    return {name: OpponentConfig(refresh_steps=every) for name, every in intervals.items()}


@given(
    intervals=st.dictionaries(st.sampled_from(["past", "older", "oldest"]), st.integers(1, 7), min_size=1),
    save_every=st.integers(1, 5),
    ends=st.lists(st.tuples(st.integers(1, 12), st.booleans()), min_size=1, max_size=4),
)
def test_an_opponent_is_the_policy_of_the_last_step_at_which_it_was_due(intervals, save_every, ends):
    """ends: how many steps a run makes, and whether it then goes on as a new process or in the same one."""
    with tempfile.TemporaryDirectory() as folder:
        fleet, policy, said, step, version, saved = Fleet(), Policy(), [], 0, 0, [0]

        def opened():
            return OpponentRefresh(
                opponents(intervals),
                fleet,
                folder=Path(folder),
                published={},
                checkpoints=lambda: saved[-2:],
                timeout_s=1.0,
                say=said.append,
            )

        refresh = opened()
        refresh.restore(policy, step=0, version=0)
        for num_steps, is_new in ends:
            for _ in range(num_steps):
                step, version = step + 1, version + 1
                refresh.refresh(policy, step=step, version=version)
                wanted = {f"agent.opponents.{name}": step - step % every for name, every in intervals.items()}
                assert {key: fleet.has.get(key, 0) for key in wanted} == wanted
                assert refresh.metrics([]) == {
                    f"opponents/{name}/step": step - step % every for name, every in intervals.items()
                }
                if step % save_every == 0:
                    saved.append(step)
            step, version = saved[-1], version + 1  # back to the newest checkpoint
            if is_new:
                fleet.has.clear()
                refresh = opened()
            refresh.restore(policy, step=step, version=version)
            wanted = {f"agent.opponents.{name}": step - step % every for name, every in intervals.items()}
            assert {key: fleet.has.get(key, 0) for key in wanted} == wanted
        assert not any("is not in" in line for line in said), "what a resume needs was kept"
        most = sum(2 + len(saved[-2:]) for _ in intervals)
        assert len(list(Path(folder).iterdir())) <= most * len(intervals)


def test_a_full_disk_leaves_the_opponent_as_it_is_and_a_lost_snapshot_is_said(tmp_path):
    fleet, policy, said = Fleet(), Policy(), []
    refresh = OpponentRefresh(
        opponents({"past": 2}),
        fleet,
        folder=tmp_path,
        published={},
        checkpoints=list,
        timeout_s=1.0,
        say=said.append,
    )
    refresh.refresh(policy, step=2, version=2)
    policy.fails = True
    refresh.refresh(policy, step=4, version=4)
    assert fleet.has == {"agent.opponents.past": 2}
    assert said == [
        "opponent past is the policy of step 2",
        "opponents stay as they are at step 4: no space left",
    ]
    policy.fails = False
    refresh.restore(policy, step=5, version=6)
    assert fleet.has == {"agent.opponents.past": 5}
    assert "the snapshot of step 4 is not in" in said[2]


def against(name, version, *, won):
    spoken = (ConversationRecord("main", ()), ConversationRecord("other", (), name, (version,)))
    trajectory = make_trajectory([-1, 0], reward=float(won), conversations=spoken, segment_conversations=(0,))
    return AttemptFacts.of(trajectory)


@given(
    played=st.lists(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=6), min_size=1, max_size=9)
)
def test_attempts_are_counted_by_the_policy_that_their_opponent_was(played):
    """played: of each step, attempts against the opponent before so many refreshes, and whether they won."""
    with tempfile.TemporaryDirectory() as folder:
        refresh = OpponentRefresh(
            opponents({"past": 2}),
            Fleet(),
            folder=Path(folder),
            published={},
            checkpoints=list,
            timeout_s=1.0,
            say=lambda text: None,
        )
        records, expected = [], {}
        for step, attempts in enumerate(played, start=1):
            batch = []
            for back, won in attempts:
                of_step = max(0, (step - 1) // 2 * 2 - 2 * back)
                batch.append(against("past", 10 * of_step, won=won))
                expected.setdefault(of_step, []).append(won)
            refresh.refresh(Policy(), step=step, version=10 * step)
            values = {**refresh.metrics(batch), **summarise_attempts(batch, lags=None)}
            records.append(StepRecord("train", step, 10 * step, 0.0, values))
        all_won = [won for results in expected.values() for won in results]
        if not all_won:
            assert opponent_lines(records) == ["opponent past: it took part in no attempt; do rows name it?"]
            return
        by_step = "; ".join(f"{step}: {len(own)}, {mean(own):.3f}" for step, own in sorted(expected.items()))
        assert opponent_lines(records) == [
            f"opponent past: {len(all_won)} attempts trained on, accuracy {mean(all_won):.3f}; "
            f"by the step of its policy {by_step}"
        ]


def test_an_attempt_with_versions_of_other_servers_counts_for_no_policy(tmp_path):
    refresh = OpponentRefresh(
        opponents({"past": 2}),
        Fleet(),
        folder=tmp_path,
        published={5: 4},
        checkpoints=list,
        timeout_s=1.0,
        say=lambda text: None,
    )
    batch = [against("past", 77, won=True), against("past", 5, won=True), against("other", 5, won=True)]
    assert refresh.metrics(batch) == {
        "opponents/past/step": 0.0,
        "opponents/past/behind/-4/trajectories": 1.0,  # played before the run went back
        "opponents/past/behind/-4/accuracy": 1.0,
    }
