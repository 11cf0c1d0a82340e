"""Arrays stay aligned however an attempt goes, and a reward finds an action token wherever the trajectory
ends.
"""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentrl.rollout.recorder import Attempt, TrajectoryRecorder, reward_event
from agentrl.types import NO_VERSION, Generation, Message, Outcome, Task

TASK = Task("t:0", "s", (Message("user", "q"),), "a")

pieces = st.lists(st.tuples(st.booleans(), st.integers(1, 5), st.integers(0, 9)), max_size=8)


def record(drawn) -> TrajectoryRecorder:
    """One segment: a token of prompt, then what was drawn; ids count the tokens."""
    recorder = TrajectoryRecorder()
    segment = recorder.begin_segment()
    segment.append_context([0])
    for is_generation, size, version in drawn:
        extend(segment, is_generation, np.arange(size, dtype=np.int32) + recorder.num_tokens, version)
    return recorder


def extend(segment, is_generation, ids, version=0) -> None:
    if is_generation:
        segment.append_generation(
            Generation(ids, -ids.astype(np.float32) - 1, np.full(len(ids), version, np.int32), "stop"),
            anchor=7,
        )
    else:
        segment.append_context(ids.tolist())


def finish(recorder: TrajectoryRecorder):
    return recorder.trajectory(
        Attempt(3, 1, TASK), messages=TASK.messages, outcome=Outcome.COMPLETED, failure=None, metrics={}
    )


@given(pieces)
def test_every_token_has_its_facts(drawn):
    recorder = record(drawn)
    trajectory = finish(recorder)
    kinds = [(False, NO_VERSION)] + [
        (is_generation, version) for is_generation, size, version in drawn for _ in range(size)
    ]
    assert trajectory.token_ids.tolist() == list(range(len(kinds)))
    assert trajectory.action_mask.tolist() == [is_generation for is_generation, _ in kinds]
    assert trajectory.versions.tolist() == [
        version if is_generation else NO_VERSION for is_generation, version in kinds
    ]
    expected = [-float(i) - 1 if is_generation else 0.0 for i, (is_generation, _) in enumerate(kinds)]
    assert trajectory.behavior_logprobs.tolist() == expected
    assert (recorder.num_tokens, recorder.num_action_tokens) == (
        trajectory.num_tokens,
        trajectory.num_action_tokens,
    )
    assert [array.dtype for array in (trajectory.token_ids, trajectory.turn_ids, trajectory.action_mask)] == [
        np.int32,
        np.int16,
        np.bool_,
    ]


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


SIZES = st.integers(1, 30)


@given(first=st.tuples(SIZES, SIZES, SIZES), second=st.tuples(SIZES, SIZES, SIZES))
@example(first=(5, 0, 10), second=(500, 0, 20))
@example(first=(500, 0, 10), second=(20, 0, 100))
def test_the_response_is_what_is_behind_the_shorter_prompt(first, second):
    """Two segments: prompt, context behind it, and a turn."""
    recorder = TrajectoryRecorder()
    lengths = []
    for prompt, context, turn in (first, second):
        segment = recorder.begin_segment()
        segment.append_context(list(range(prompt)))
        extend(segment, True, np.arange(1, dtype=np.int32))
        segment.append_context(list(range(context)))
        extend(segment, True, np.arange(turn, dtype=np.int32))
        lengths.append(1 + context + turn)
    found = finish(recorder).num_response_tokens
    repeated = max(0, second[0] - first[0])
    assert found == max(lengths[0], lengths[1] + repeated)
    assert found >= max(lengths)


def test_without_a_turn_there_is_no_response():
    assert finish(record([(False, 3, 0)])).num_response_tokens == 0


plans = st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(1, 4)), max_size=12)


@given(plans)
def test_rows_that_grow_in_turn_are_joined_in_the_order_of_their_start(plan):
    recorder, segments, expected, owners = TrajectoryRecorder(), {}, {}, []
    for key, is_generation, size in plan:
        if key not in segments:
            segments[key], expected[key] = recorder.begin_segment(), []
            is_generation = False  # a segment begins with context
        ids = np.arange(size, dtype=np.int32) + recorder.num_tokens
        extend(segments[key], is_generation, ids)
        expected[key] += [(int(id), len(owners) if is_generation else -1) for id in ids]
        owners += [key] if is_generation else []
    trajectory = finish(recorder)
    whole = [fact for key in expected for fact in expected[key]]
    assert list(zip(trajectory.token_ids.tolist(), trajectory.turn_ids.tolist(), strict=True)) == whole
    starts = np.cumsum([0, *(len(facts) for facts in expected.values())])[:-1] if expected else [0]
    assert trajectory.segment_starts == tuple(starts)
    assert (recorder.num_segments, recorder.num_turns) == (len(expected), len(owners))
    if owners:  # a reward without a turn is one for what was sampled last, in whichever segment that is
        position = reward_event(trajectory, "r", 1.0).position
        assert trajectory.turn_ids[position] == len(owners) - 1
        assert len(owners) - 1 not in trajectory.turn_ids[position + 1 :]


def test_a_row_that_was_opened_and_not_used_is_not_there():
    recorder = TrajectoryRecorder()
    recorder.begin_segment()
    assert finish(recorder).segment_starts == (0,)
    recorder.begin_segment().append_context([1, 2])
    assert (finish(recorder).segment_starts, recorder.num_segments) == ((0,), 1)
    recorder.begin_segment().append_context([3])
    assert finish(recorder).segment_starts == (0, 2)


def test_a_row_begins_with_context():
    with pytest.raises(AssertionError, match="nothing predicts its first token"):
        extend(TrajectoryRecorder().begin_segment(), True, np.array([1], np.int32))


def test_a_generation_of_another_dtype_is_refused_not_rounded():
    recorder = TrajectoryRecorder()
    segment = recorder.begin_segment()
    segment.append_context([0])
    segment.append_generation(
        Generation(np.array([1], np.int64), np.zeros(1, np.float32), np.zeros(1, np.int32), "stop"), anchor=7
    )
    with pytest.raises(TypeError):
        finish(recorder)


def test_what_was_recorded_is_gone_with_its_recorder():
    """No circle holds the arrays until garbage is collected: a process with 1,000 attempts in flight grew by
    4 KiB for each.
    """
    gc.disable()
    try:
        recorder = record([(True, 3, 0), (False, 2, 0)])
        gone = weakref.ref(recorder)
        finish(recorder)
        del recorder
        assert gone() is None
    finally:
        gc.enable()
