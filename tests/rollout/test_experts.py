"""Which experts computed a token is recorded once for each token, whatever becomes of a turn."""

from __future__ import annotations

import base64
import dataclasses
import itertools

import numpy as np
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from agentrl.config.evaluation import EvalConfig
from agentrl.config.rollout import RolloutConfig
from agentrl.data.trajectories import decode, encode, from_ipc, to_ipc
from agentrl.errors import ServerError
from agentrl.rollout.recorder import Attempt, TrajectoryRecorder
from agentrl.rollout.sampling import GreedySampling
from agentrl.servers.protocol import generate_body, parse_generation
from agentrl.servers.router import Router
from agentrl.types import Generation, Message, Outcome, SamplingParams, Task

WIDTH = 4
SERVER = "http://server"
TASK = Task("t:0", "s", (Message("user", "q"),), "a")


def experts_of(tokens):
    """Return the experts of a sequence's tokens, i16[T, W]; they depend on all tokens up to each."""
    sums = np.cumsum(np.asarray(tokens, np.int64) + 1)
    return np.stack([(sums * (column + 3)) % 251 for column in range(WIDTH)], axis=1).astype(np.int16)


def generation(prompt, ids, start, reason="stop"):
    """Return what a server answers that was asked for the experts from token `start` on."""
    ids = np.array(ids, np.int32)
    known = None if start is None else experts_of([*prompt, *ids])[start : max(len(prompt) + len(ids) - 1, 0)]
    facts = np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32)
    return Generation(ids, *facts, reason, experts=known)


def assert_known_but_the_last(trajectory, *, num_forgotten=0):
    """Every token has its experts but the last one of each segment."""
    table = trajectory.experts_of_tokens
    bounds = [*trajectory.segment_starts, trajectory.num_tokens]
    for start, end in itertools.pairwise(bounds):
        np.testing.assert_array_equal(
            table[start : end - 1], experts_of(trajectory.token_ids[start:end])[: end - start - 1]
        )
        assert (table[end - 1] == -1).all()


# --------------------------------------------------------------------------------------------------- recorder


turns = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=5)


@given(st.lists(turns, min_size=1, max_size=3), st.booleans())
def test_the_trajectory_has_the_experts_of_each_segment(segments, alternate):
    """Per turn: tokens of context, sampled tokens, and tokens that the session cuts off behind them."""
    recorder, drawn = TrajectoryRecorder(), []
    for turns_of_segment in segments:
        drawn.append((recorder.begin_segment(), [0], list(turns_of_segment)))
    if alternate:
        order = [item for _ in range(5) for item in drawn if item[2]]
    else:
        order = [item for item in drawn for _ in range(len(item[2]))]
    for segment, tokens, left in order:
        if not left:
            continue
        num_context, num_sampled, num_cut = left.pop(0)
        context = list(range(1, num_context + 1))
        if len(tokens) == 1 and not segment.num_tokens:
            context = [0, *context]
            tokens.clear()
        tokens += context
        sampled = [7 + i for i in range(num_sampled + num_cut)]
        whole = generation(tokens, sampled, segment.num_known_experts)
        cut = {name: getattr(whole, name)[:num_sampled] for name in ("token_ids", "logprobs", "versions")}
        if context:
            segment.append_context(context)
        segment.append_generation(dataclasses.replace(whole, **cut), anchor=0)
        tokens += sampled[:num_sampled]
    trajectory = recorder.trajectory(
        Attempt(0, 0, TASK), messages=(), outcome=Outcome.COMPLETED, failure=None, metrics={}
    )
    assert_known_but_the_last(trajectory)
    [again] = decode(from_ipc(to_ipc(encode([trajectory]))))
    np.testing.assert_array_equal(again.experts, trajectory.experts)
    assert again.experts.dtype == np.int16


def test_turns_without_experts_have_minus_one():
    recorder = TrajectoryRecorder()
    segment = recorder.begin_segment()
    segment.append_context([1, 2])
    segment.append_generation(generation([1, 2], [3], 0), anchor=0)
    segment.append_generation(generation([1, 2, 3], [4, 5], None), anchor=0)
    trajectory = recorder.trajectory(
        Attempt(0, 0, TASK), messages=(), outcome=Outcome.COMPLETED, failure=None, metrics={}
    )
    np.testing.assert_array_equal(trajectory.experts_of_tokens[:2], experts_of([1, 2]))
    assert (trajectory.experts_of_tokens[2:] == -1).all()


def test_trajectories_of_former_files_have_none():
    batch = encode([TrajectoryRecorder().trajectory(
        Attempt(0, 0, TASK), messages=(), outcome=Outcome.ABORTED, failure=None, metrics={}
    )])  # fmt: skip
    metadata = {b"agentrl.trajectories": b"3"}
    former = batch.drop_columns(["experts"]).replace_schema_metadata(metadata)
    [trajectory] = decode(from_ipc(to_ipc(former)))
    assert trajectory.experts_of_tokens is None


# ----------------------------------------------------------------------------------------------------- router


class Interrupted:
    """A server that ends each answer after the next of `chunks`, and then none."""

    def __init__(self, whole, chunks, *, loses):
        self.whole, self.chunks, self.loses = whole, list(chunks), set(loses)
        self.num_asked = 0

    async def generate(self, input_ids, params, *, rid):
        rest = self.whole[len(input_ids) :]
        size = min(len(rest), self.chunks.pop(0)) if self.chunks else len(rest)
        reason = "stop" if size == len(rest) else "abort"
        self.num_asked += 1
        piece = generation(list(input_ids), rest[:size], params.experts_from, reason)
        is_lost = reason == "abort" and self.num_asked in self.loses
        return dataclasses.replace(piece, experts=None) if is_lost else piece

    async def serves(self, version):
        return True

    async def settle_aborts(self):
        return

    async def aclose(self):
        return


@given(
    num_prompt=st.integers(1, 5),
    start=st.integers(0, 5),
    chunks=st.lists(st.integers(0, 3), max_size=4),
    loses=st.sets(st.integers(1, 4)),
)
def test_pieces_of_a_turn_are_joined_without_a_gap(num_prompt, start, chunks, loses):
    whole, start = list(range(num_prompt + 6)), min(start, num_prompt)
    server = Interrupted(whole, chunks, loses=loses)

    async def main():
        router = Router(lambda _: server)
        router.set_servers([SERVER], version=0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(router.watch)
            params = SamplingParams(100, experts_from=start)
            found = await router.generate(whole[:num_prompt], params, trajectory_key="k")
            nursery.cancel_scope.cancel()
        return found

    found = trio.run(main, clock=MockClock(autojump_threshold=0))
    np.testing.assert_array_equal(found.experts, experts_of(whole)[start:-1])


# ---------------------------------------------------------------------------------------------------- session


def test_training_records_experts_over_tool_calls_and_validation_does_not(stage):
    def say(turn, _):
        return stage.call() if turn == 0 else "The answer is 42."

    world = stage.World(say)
    kept, asked = world.client.generate, []

    async def generate(input_ids, params, *, rid):
        found = await kept(input_ids, params, rid=rid)
        asked.append(params.experts_from)
        routed = generation(list(input_ids), found.token_ids, params.experts_from)
        return dataclasses.replace(found, experts=routed.experts)

    world.client.generate = generate
    [trajectory] = world.play(stage.task(), sampling=RolloutConfig(replay_experts=True))
    assert trajectory.outcome is Outcome.COMPLETED
    assert asked[0] == 0
    assert 0 < asked[1] < trajectory.num_tokens
    assert_known_but_the_last(trajectory)
    for sampling in (RolloutConfig(), EvalConfig(), GreedySampling()):
        [other] = world.play(stage.task(), sampling=sampling)
        assert other.experts_of_tokens is None
    assert asked[2:] == [None] * 6


# --------------------------------------------------------------------------------------------------- protocol


def reply(ids, experts, reason="stop"):
    meta = {
        "finish_reason": {"type": reason},
        "output_token_logprobs": [[-1.0, token, None] for token in ids],
        "weight_versions": [{"version": "0", "start": 0, "end": len(ids)}],
    }
    if experts is not None:
        raw = experts if isinstance(experts, str) else base64.b64encode(experts.astype("<i4").tobytes())
        meta["routed_experts"] = raw if isinstance(raw, str) else raw.decode()
    return {"output_ids": ids, "meta_info": meta}


def test_the_request_names_the_first_token():
    body = generate_body([1, 2, 3], SamplingParams(4, experts_from=2), rid="r")
    assert (body["return_routed_experts"], body["routed_experts_start_len"]) == (True, 2)
    assert "return_routed_experts" not in generate_body([1], SamplingParams(4), rid="r")


@given(st.integers(0, 4), st.integers(1, 4))
def test_an_answer_is_read_as_it_was_sent(num_context, num_ids):
    table = np.arange((num_context + num_ids - 1) * WIDTH).reshape(-1, WIDTH)
    found = parse_generation(reply([5] * num_ids, table), server=SERVER, num_context=num_context)
    if len(table):
        np.testing.assert_array_equal(found.experts, table)
        assert found.experts.dtype == np.int16
    else:
        assert found.experts is None


@pytest.mark.parametrize(
    ("experts", "words"),
    [
        (None, "start SGLang with --enable-return-routed-experts"),
        (np.zeros(7), "sent 7 experts for 4 tokens"),
        (np.zeros(0), "sent 0 experts for 4 tokens"),
        (np.full(8, -1), "sent an expert outside of 0..32767"),
        (np.full(8, 2**15), "sent an expert outside of 0..32767"),
        ("no base64!", "cannot be read"),
        ("AAA=", "cannot be read"),
    ],
)
def test_wrong_experts_are_an_error_of_the_server(experts, words):
    with pytest.raises(ServerError, match=words):
        parse_generation(reply([5, 6], experts), server=SERVER, num_context=3)


@pytest.mark.parametrize("experts", [None, np.zeros(0), np.zeros(7)])
def test_an_aborted_answer_may_lack_them(experts):
    found = parse_generation(reply([5, 6], experts, "abort"), server=SERVER, num_context=3)
    assert found.experts is None
