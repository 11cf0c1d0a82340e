"""Trajectories in files, and the facts that stand for them: these say what the trajectory says."""

import errno
import hashlib
import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.data.attempt_facts import AttemptFacts
from agentrl.data.attempt_files import AttemptFiles, TrajectoryRef, remove_files, remove_others
from agentrl.errors import ConfigError, DiskError, JournalError
from agentrl.types import ConversationRecord, Failure, Message, Outcome, PluginId, RewardEvent, ToolCall
from parts.trajectories import ATTEMPTS, make_trajectory, stored


@st.composite
def attempts(draw):
    """Trajectories of several segments that may grow alternately, with rewards on any action token."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    turns, starts = [], []
    numbers = iter(range(99))
    for _ in range(draw(st.integers(1, 3))):
        starts.append(len(turns))
        turns += [-1] * int(rng.integers(1, 4))
        for _ in range(int(rng.integers(0, 3))):
            turns += [next(numbers)] * int(rng.integers(1, 4)) + [-1] * int(rng.integers(0, 3))
    relabel = rng.permutation(99)
    turns = [int(relabel[t]) if t >= 0 else -1 for t in turns]
    actions = [i for i, turn in enumerate(turns) if turn >= 0]
    rewards = tuple(
        RewardEvent(f"r{k}", float(rng.normal()), int(rng.choice(actions)))
        for k in range(int(rng.integers(0, 3)) if actions else 0)
    )
    return make_trajectory(
        turns,
        token_ids=rng.integers(0, 50, len(turns)),
        versions=np.where(np.array(turns) >= 0, rng.integers(0, 4, len(turns)), -1),
        behavior_logprobs=rng.normal(size=len(turns)),
        segment_starts=tuple(starts),
        rewards=rewards,
        anchors=np.arange(int(rng.integers(0, 120)), dtype=np.int64),
        metrics={"accuracy": float(rng.random())} if rng.random() < 0.5 else {},
        extra_info={"needs_tool": bool(rng.random() < 0.5)},
        messages=(Message("assistant", "x", (ToolCall("1", "f", {}), ToolCall("2", "g", None))),),
        is_greedy=bool(rng.random() < 0.2),
    )


@settings(max_examples=60)
@given(attempts())
def test_facts_say_of_a_trajectory_what_it_says_itself(trajectory):
    facts, mask = AttemptFacts.of(trajectory), trajectory.action_mask
    for name in (
        *("group_id", "member", "task_id", "data_source", "agent_name", "outcome", "failure", "rewards"),
        *("metrics", "is_greedy", "reward", "min_version", "num_tokens", "num_action_tokens"),
        "num_response_tokens",
    ):
        assert getattr(facts, name) == getattr(trajectory, name), name
    bounds = [*trajectory.segment_starts, trajectory.num_tokens]
    own = [mask[start:end] for start, end in itertools.pairwise(bounds)]
    assert facts.segments == tuple((len(part), int(part.sum())) for part in own)
    sampled = [turn for turn, length in facts.turns for _ in range(length)]
    assert sampled == trajectory.turn_ids[mask].tolist()
    assert all(first[0] != second[0] for first, second in itertools.pairwise(facts.turns))
    assert dict(facts.versions) == {
        v: int((trajectory.versions[mask] == v).sum()) for v in set(trajectory.versions[mask].tolist())
    }
    assert list(facts.versions) == sorted(facts.versions)
    places = np.flatnonzero(mask)[list(facts.reward_places)]
    assert places.tolist() == [event.position for event in trajectory.rewards]
    assert facts.num_turns == trajectory.turn_ids.max(initial=-1) + 1
    assert facts.num_tool_calls == 2
    assert facts.needs_tool == trajectory.extra_info["needs_tool"]
    numbers = sorted(set(trajectory.turn_ids[mask].tolist()))
    known = not numbers or numbers[-1] < len(trajectory.anchors)
    assert facts.anchors == (tuple(trajectory.anchors[numbers].tolist()) if known else None)
    heads = []
    for start, part, marks in zip(bounds, own, facts.marks, strict=False):
        edges = {i for i in range(1, len(part) + 1) if (i < len(part) and part[i]) != part[i - 1]}
        lengths = [length for length, _ in marks]
        assert lengths == sorted(set(lengths))
        assert edges <= set(lengths) <= set(range(1, len(part) + 1))
        heads += [(mark, trajectory.token_ids[start : start + mark[0]].tolist()) for mark in marks]
    for (one, first), (other, second) in itertools.combinations(heads, 2):
        assert (one == other) == (first == second)


def test_facts_of_an_earlier_version_have_the_mark_before_the_first_action_token():
    [facts] = stored(make_trajectory([-1, -1, 0, 0, -1, 1], token_ids=[5, 6, 7, 8, 9, 4]))
    values = json.loads(facts.to_json())
    values["prompts"] = [[2, facts.marks[0][0][1]]]
    del values["marks"]
    old = AttemptFacts.from_json(json.dumps(values).encode(), ATTEMPTS)
    assert old == facts.replace(marks=((facts.marks[0][0],),))
    assert facts.marks[0][0] == (2, hashlib.blake2b(np.array([5, 6], np.int32), digest_size=16).hexdigest())


def test_facts_have_each_opponent_once_with_all_versions_that_spoke():
    def record(name, opponent=None, *versions):
        return ConversationRecord(name, (), opponent, versions)

    spoken = (record("main"), record("a", "past", 7, 9), record("b", "frozen", 0), record("a", "past", 3))
    [facts] = stored(make_trajectory([-1, 0], conversations=spoken, segment_conversations=(0,)))
    assert facts.opponents == (("frozen", (0,)), ("past", (3, 7, 9)))
    assert AttemptFacts.from_json(facts.to_json(), ATTEMPTS) == facts
    values = json.loads(facts.to_json())
    del values["opponents"]  # journals of earlier versions lack them
    assert AttemptFacts.from_json(json.dumps(values).encode(), ATTEMPTS).opponents == ()


@settings(max_examples=30)
@given(st.lists(attempts(), min_size=1, max_size=4))
def test_what_is_stored_comes_back_whole_and_its_facts_too(trajectories):
    for trajectory, facts in zip(trajectories, stored(*trajectories), strict=True):
        again = AttemptFacts.from_json(facts.to_json(), ATTEMPTS)
        assert again == facts
        for loaded in (again.load(), facts.source.load()):
            assert loaded.messages == trajectory.messages
            assert loaded.extra_info == trajectory.extra_info
            for name in ("token_ids", "action_mask", "behavior_logprobs", "versions", "turn_ids", "anchors"):
                np.testing.assert_array_equal(getattr(loaded, name), getattr(trajectory, name))
        bare = facts.source.load(has_messages=False)
        assert (bare.messages, bare.extra_info, bare.rewards) == ((), {}, trajectory.rewards)


def test_a_failure_and_what_changed_since_are_in_the_facts():
    failure = Failure("it broke", PluginId("tool", "f"), "KeyError", "/a.py:3", "trace")
    [facts] = stored(make_trajectory([-1, 0], reward=1.0, outcome=Outcome.TOOL_ERROR, failure=failure))
    assert AttemptFacts.from_json(facts.to_json(), ATTEMPTS).failure == failure
    event = RewardEvent("late", 2.0, 1)
    scored = facts.replace(
        outcome=Outcome.COMPLETED,
        failure=None,
        rewards=(event,),
        reward_places=(0,),
        metrics={"a": 1.0},
        added_info={"why": [1]},
    )
    loaded = scored.load()
    assert (loaded.outcome, loaded.failure, loaded.rewards) == (Outcome.COMPLETED, None, (event,))
    assert (loaded.metrics, loaded.extra_info) == ({"a": 1.0}, {"why": [1]})
    assert AttemptFacts.of(make_trajectory([-1, 0])).replace(member=3).load().member == 0, "it is the stored"


@pytest.mark.parametrize(
    ("fields", "accuracy"),
    [
        ({"reward": 0.5}, 1.0),
        ({"reward": 0.0}, 0.0),
        ({"reward": -1.0}, 0.0),
        ({"reward": 0.5, "metrics": {"accuracy": 0.25}}, 0.25),
        ({"reward": 0.5, "metrics": {"accuracy": 1.5}}, None),
        ({"reward": 0.5, "is_greedy": True}, None),
        ({"reward": None, "outcome": Outcome.TIMEOUT}, None),
    ],
)
def test_the_accuracy_of_an_attempt(fields, accuracy):
    assert AttemptFacts.of(make_trajectory([-1, 0], **fields)).accuracy == accuracy


def test_a_reward_on_context_is_refused():
    with pytest.raises(AssertionError, match="'r' is placed on a context token"):
        AttemptFacts.of(make_trajectory([-1, 0], rewards=(RewardEvent("r", 1.0, 0),)))


# -------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("is_synced", [False, True])
def test_one_file_per_call_and_no_byte_of_it_may_change(tmp_path, is_synced):
    files = AttemptFiles(tmp_path / "attempts", is_synced=is_synced)
    refs = files.write([make_trajectory([-1, 0, 0]), make_trajectory([-1, 0], member=1)])
    files.write([make_trajectory([-1, 0])])
    assert len(list((tmp_path / "attempts").iterdir())) == 2
    assert len({ref.path for ref in refs}) == 1
    assert [ref.load().member for ref in refs] == [0, 1]
    size = os.path.getsize(refs[0].path)
    assert [(ref.offset, ref.num_bytes) for ref in refs] == [
        (0, refs[0].num_bytes),
        (refs[0].num_bytes, size - refs[0].num_bytes),
    ]
    path = Path(refs[0].path)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for place in rng.choice(size, 60, replace=False):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        hit, other = (refs[0], refs[1]) if place < refs[1].offset else (refs[1], refs[0])
        with pytest.raises(DiskError, match=rf"at byte {hit.offset} of .* does not match its checksum"):
            hit.load()
        other.load()


def test_what_cannot_be_read_is_told(tmp_path):
    [ref] = AttemptFiles(tmp_path, is_synced=False).write([make_trajectory([-1, 0])])
    os.truncate(ref.path, ref.num_bytes - 1)
    with pytest.raises(DiskError, match="does not match its checksum"):
        ref.load()
    os.truncate(ref.path, 0)
    with pytest.raises(DiskError, match="does not match its checksum"):
        ref.load()
    remove_files([ref.path, ref.path])
    with pytest.raises(DiskError, match=r"cannot be read: .*No such file"):
        ref.load()


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, r"the disk is full: trajectories cannot be written to .*attempts; free space there"),
        (errno.EACCES, r"trajectories cannot be written to .*attempts: Permission denied"),
    ],
)
def test_a_disk_that_refuses_leaves_nothing_behind(tmp_path, monkeypatch, number, message):
    files, write = AttemptFiles(tmp_path / "attempts", is_synced=False), os.write
    left = [100]

    def limited(descriptor, data):
        if not left[0]:
            raise OSError(number, os.strerror(number))
        taken = min(left[0], len(data))
        left[0] -= taken
        return write(descriptor, data[:taken])

    monkeypatch.setattr(os, "write", limited)
    with pytest.raises(JournalError, match=message):
        files.write([make_trajectory([-1, 0])])
    assert list((tmp_path / "attempts").iterdir()) == []
    left[0] = 1_000_000
    assert files.write([make_trajectory([-1, 0])])[0].load().member == 0


def test_a_node_that_sees_another_folder_is_told(tmp_path):
    files = AttemptFiles.create(tmp_path / "run" / "attempts", is_synced=True)
    files.check_shared()
    [ref] = files.write([make_trajectory([-1, 0])])
    assert remove_others(tmp_path / "run" / "attempts", [ref.path]) == 0
    AttemptFiles.create(tmp_path / "run" / "attempts", is_synced=True)  # a folder of the same name
    with pytest.raises(ConfigError, match=r"trainer.run_dir: this node .* does not see the run's folder"):
        files.check_shared()
    (tmp_path / "run" / "attempts" / ".mark").unlink()
    with pytest.raises(ConfigError, match="a file system that all nodes share"):
        files.check_shared()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        AttemptFiles.create(tmp_path / "file" / "attempts", is_synced=True)


def test_strays_are_removed_and_nothing_else(tmp_path):
    files = AttemptFiles(tmp_path, is_synced=False)
    kept, *others = (files.write([make_trajectory([-1, 0])])[0].path for _ in range(3))
    (tmp_path / "note.txt").write_text("mine")
    assert remove_others(tmp_path, [kept, "/elsewhere"]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([os.path.basename(kept), "note.txt"])
    assert remove_others(tmp_path / "nothing", []) == 0
    assert not any(os.path.exists(path) for path in others)


def test_a_reference_is_four_plain_values():
    assert TrajectoryRef("a", 1, 2, 3) == TrajectoryRef(path="a", offset=1, num_bytes=2, checksum=3)
