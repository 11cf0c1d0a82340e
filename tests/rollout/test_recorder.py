"""Arrays stay aligned however an attempt goes, and a reward finds an action token wherever the trajectory ends."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.rollout.recorder import Attempt, TrajectoryRecorder, reward_event
from agentrl.types import NO_VERSION, Generation, Message, Outcome, Task

TASK = Task("t:0", "s", (Message("user", "q"),), "a")

pieces = st.lists(st.tuples(st.booleans(), st.integers(1, 5), st.integers(0, 9)), max_size=8)


def record(drawn) -> TrajectoryRecorder:
    recorder = TrajectoryRecorder()
    for is_generation, size, version in drawn:
        ids = np.arange(size, dtype=np.int32) + recorder.num_tokens
        if is_generation:
            recorder.append_generation(Generation(ids, -ids.astype(np.float32) - 1, np.full(size, version, np.int32), "stop"))
        else:
            recorder.append_context(ids.tolist())
    return recorder


def finish(recorder: TrajectoryRecorder):
    return recorder.trajectory(Attempt(3, 1, TASK), messages=TASK.messages, outcome=Outcome.COMPLETED, failure=None, metrics={})


@given(pieces)
def test_every_token_has_its_facts(drawn):
    recorder = record(drawn)
    trajectory = finish(recorder)
    kinds = [(is_generation, version) for is_generation, size, version in drawn for _ in range(size)]
    assert trajectory.token_ids.tolist() == list(range(len(kinds)))
    assert trajectory.action_mask.tolist() == [is_generation for is_generation, _ in kinds]
    assert trajectory.versions.tolist() == [version if is_generation else NO_VERSION for is_generation, version in kinds]
    expected = [-float(i) - 1 if is_generation else 0.0 for i, (is_generation, _) in enumerate(kinds)]
    assert trajectory.behavior_logprobs.tolist() == expected
    assert (recorder.num_tokens, recorder.num_action_tokens) == (trajectory.num_tokens, trajectory.num_action_tokens)
    assert [array.dtype for array in (trajectory.token_ids, trajectory.turn_ids, trajectory.action_mask)] == [np.int32, np.int16, np.bool_]


@given(pieces, st.data())
def test_a_reward_lies_on_the_last_action_token(drawn, data):
    recorder = record(drawn)
    trajectory = finish(recorder)
    if not recorder.num_turns:
        with pytest.raises(AssertionError, match="without action tokens"):
            reward_event(trajectory, "r", 1.0)
        return
    turn = data.draw(st.none() | st.integers(0, recorder.num_turns - 1))
    event = reward_event(trajectory, "r", 1.0, turn=turn)
    assert trajectory.action_mask[event.position]
    later = trajectory.turn_ids[event.position + 1 :]
    assert not (later >= 0).any() if turn is None else turn not in later


def test_a_generation_of_another_dtype_is_refused_not_rounded():
    recorder = TrajectoryRecorder()
    recorder.append_generation(Generation(np.array([1], np.int64), np.zeros(1, np.float32), np.zeros(1, np.int32), "stop"))
    with pytest.raises(TypeError):
        finish(recorder)
