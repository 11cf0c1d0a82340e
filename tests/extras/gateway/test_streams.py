"""Turns that are told while they are sampled: what was told is what is recorded, whatever fails."""

from __future__ import annotations

import asyncio
import threading

import anthropic
import numpy as np
import openai
import orjson
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from agentrl.chat.parsing import CallDelta, ReasoningDelta, TextDelta
from agentrl.errors import RequestRefused, ServerError
from agentrl.extras.gateway import stream as gateway_stream
from agentrl.servers.protocol import Pulse, ServerLoad
from agentrl.servers.router import Router
from agentrl.servers.streamed import EventReader, StreamedTokens, cut_off, is_finished, known_ids
from agentrl.testing import tiny_chat
from agentrl.types import Generation, Message, Outcome, SamplingParams
from parts.guests import ByChat, ByMessages, ByResponses, guest

EOS = 9
LENGTH = 40


class Breaking:
    """A server that samples 1..LENGTH, tells each token, and fails or is left after so many."""

    def __init__(self, breaks: list[tuple[int, str]]) -> None:
        self.breaks, self.router, self.num_samples = list(breaks), None, 0

    async def stream(self, input_ids, params, *, rid, into: StreamedTokens) -> Generation:
        # Each request samples other tokens, so that tokens which were told and lost would be noticed.
        self.num_samples += 1
        ids = np.arange(len(input_ids), LENGTH, dtype=np.int32) % 7 + 10 * self.num_samples
        end, how = self.breaks.pop(0) if self.breaks else (len(ids), "ends")
        for size in range(1, min(end, len(ids)) + 1):
            into.arrived(ids[:size].tolist(), lambda size=size: generation(ids[:size], "abort"))
            await trio.lowlevel.checkpoint()
        if how == "fails":
            raise ServerError("connection reset")
        if how == "is left":
            self.router.set_servers(["http://a"], version=0)
            await trio.sleep_forever()
        return generation(ids, "stop")

    async def generate(self, input_ids, params, *, rid):
        raise AssertionError("it streams")

    async def abort(self, rid):
        return

    async def settle_aborts(self):
        return

    async def serves(self, version):
        return True

    async def pulse(self):
        return Pulse(is_paused=False, load=ServerLoad(1, 0, self.num_samples, 100))

    async def aclose(self):
        return


def generation(ids, reason) -> Generation:
    return Generation(ids, -ids / np.float32(100), np.zeros(len(ids), np.int32), reason)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.just("fails")), max_size=5))
def test_what_was_told_is_what_is_recorded_whatever_fails(breaks):
    told: list[int] = []
    server = Breaking(breaks)

    async def main():
        router = server.router = Router(lambda url: server)
        router.set_servers(["http://a"], version=0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(router.watch)
            with trio.fail_after(300):
                try:
                    return await router.generate(
                        [0], SamplingParams(LENGTH), trajectory_key="t", hear=told.extend
                    )
                except ServerError:
                    return None  # three failures in a row before any token
                finally:
                    nursery.cancel_scope.cancel()

    whole = trio.run(main, clock=MockClock(autojump_threshold=0))
    if whole is None:
        assert [size for size, _ in breaks].count(0) >= 3
        return
    assert told == whole.token_ids.tolist()
    assert len(told) == LENGTH - 1
    np.testing.assert_array_equal(whole.logprobs, -whole.token_ids / np.float32(100))


def test_what_a_server_told_is_kept_when_it_is_left():
    told: list[int] = []
    servers = {"http://a": Breaking([]), "http://b": Breaking([(5, "is left")])}

    async def main():
        router = Router(lambda url: servers[url])
        servers["http://b"].router = router
        router.set_servers(["http://b"], version=0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(router.watch)
            with trio.fail_after(300):
                whole = await router.generate(
                    [0], SamplingParams(LENGTH), trajectory_key="t", hear=told.extend
                )
            nursery.cancel_scope.cancel()
            return whole

    whole = trio.run(main, clock=MockClock(autojump_threshold=0))
    assert told == whole.token_ids.tolist()
    assert whole.num_interruptions == 1


# ------------------------------------------------------------------------------------------- SGLang's events


def event(num_ids: int, num_facts: int, finish=None) -> dict:
    """An event of SGLang: it may already have tokens whose facts come with the next one."""
    facts = {"output_token_logprobs": [[-0.5, i, None] for i in range(num_facts)]}
    spans = [{"version": "0", "start": 0, "end": 3}, {"version": "1", "start": 3, "end": max(3, num_facts)}]
    meta = {**facts, "completion_tokens": num_facts, "weight_versions": spans, "finish_reason": finish}
    return {"text": None, "output_ids": list(range(num_ids)), "meta_info": meta}


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 200), max_size=12))
def test_events_are_read_however_they_are_cut(cuts):
    events = [event(2, 2), event(7, 5), event(8, 8, {"type": "length"})]
    data = b"".join(b"data: " + orjson.dumps(each) + b"\n\n" for each in events) + b"data: [DONE]\n\n"
    reader, read = EventReader("http://a"), []
    for end in [*sorted(cuts), len(data)]:
        read += reader.feed(data[:end])
        data = data[end:]
    read += reader.feed(data)
    assert read == events
    assert [is_finished(each) for each in read] == [False, False, True]
    assert [len(known_ids(each)) for each in read] == [2, 5, 8]


def test_an_event_without_an_end_is_bounded_and_the_stream_is_not():
    """However many events a stream has, the memory holds one of them."""
    data = b"data: " + orjson.dumps(event(7, 5)) + b"\n\n"
    reader = EventReader("http://a", max_event_bytes=len(data))
    for _ in range(3):
        assert len(reader.feed(data * 5)) == 5
    for _ in range(len(data)):
        assert reader.feed(b"x") == []
    with pytest.raises(ServerError, match=f"http://a streamed an event longer than {len(data)} bytes"):
        reader.feed(b"x")


def test_a_stream_that_was_cut_off_is_an_aborted_reply_of_what_is_known():
    cut = cut_off(event(7, 5), {"1"})
    assert cut["output_ids"] == [0, 1, 2, 3, 4]
    assert [(s["start"], s["end"]) for s in cut["meta_info"]["weight_versions"]] == [(0, 3), (3, 5)]
    assert cut["meta_info"]["finish_reason"] == {"type": "abort"}
    assert cut_off(event(4, 2), {"1"})["meta_info"]["weight_versions"] == [
        {"version": "0", "start": 0, "end": 2}
    ]
    unspanned = event(4, 2)
    del unspanned["meta_info"]["weight_versions"]
    known = cut_off(unspanned, {"7"})["meta_info"]["weight_versions"]
    assert known == [{"version": "7", "start": 0, "end": 2}]
    assert cut_off(unspanned, {"7", "8"})["meta_info"]["weight_versions"] == [], "nobody knows which"
    for without in ({}, {"output_ids": [1]}, {"output_ids": [1], "meta_info": {"completion_tokens": 1}}):
        with pytest.raises(ServerError, match="before its tokens had log-probabilities"):
            cut_off(without, {"1"})


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b'{"error": {"message": "too long", "code": 400}}', RequestRefused),
        (b'{"error": {"message": "it burns", "code": 500}}', ServerError),
        (b'{"output_ids": "abc"}', ServerError),
        (b"[1]", ServerError),
        (b"{oops", ServerError),
    ],
)
def test_an_event_that_is_no_generation_is_an_error(data, error):
    with pytest.raises(ServerError) as caught:
        EventReader("http://a").feed(b"data: " + data + b"\n\n")
    assert type(caught.value) is error


# --------------------------------------------------------------------------------------------------- reading

PIECES = [
    "Hm ",
    "é漢👍🏽",
    "\n\n",
    "<",
    "<think>a\nb</think>",
    "</think>",
    '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=6), st.integers(1, 7))
def test_a_turn_read_token_by_token_is_the_turn_read_whole(pieces, size):
    chat = tiny_chat()
    conversation = chat.open([Message("user", "?")], [])
    conversation.next_prompt()
    reader = chat.read_turn(conversation)
    ids = [*chat.encode("".join(pieces)), chat.eos_token_ids[0]]
    deltas = [delta for start in range(0, len(ids), size) for delta in reader.feed(ids[start : start + size])]
    read = "".join(d.text for d in deltas if isinstance(d, TextDelta))
    thought = "".join(d.text for d in deltas if isinstance(d, ReasoningDelta))
    whole = conversation.add_generation(ids, is_truncated=False)
    held = reader.rest(reader.num_read_chars)
    if not held.strip():
        assert read.strip() == whole.content
        assert thought == whole.reasoning
        assert [d.call for d in deltas if isinstance(d, CallDelta)] == list(whole.tool_calls)
    assert reader.rest(0) == "".join(pieces)


# ------------------------------------------------------------------------------------------------ the gateway


class Slow:
    """Holds a turn after its first tokens, until `go`."""

    def __init__(self, client) -> None:
        self.client, self.go = client, threading.Event()

    async def stream(self, input_ids, params, *, rid, into):
        whole = await self.client.generate(input_ids, params, rid=rid)
        ids = whole.token_ids.tolist()
        into.arrived(ids[:12], lambda: whole)
        while not self.go.is_set():
            await trio.sleep(0.01)
        into.arrived(ids, lambda: whole)
        return whole


@pytest.mark.parametrize("way", [ByChat, ByResponses, ByMessages])
def test_text_arrives_while_its_turn_is_still_sampled(stage, way):
    async def program(endpoint, task) -> None:
        async with way(endpoint, None, is_stream=True) as client:
            client.say("What is 6 * 7?")
            answer = asyncio.ensure_future(client.ask())
            first = await asyncio.wait_for(client.first_text, 60)
            assert "The answer is #### 42".startswith(first)
            assert not answer.done()
            slow.go.set()
            assert (await answer).text == "The answer is #### 42"

    world = stage.World(
        lambda turn, prompt: "The answer is #### 42", plugins=[guest(program)], agent={"tools": ()}
    )
    slow = Slow(world.client)
    world.client.stream = slow.stream
    [trajectory] = world.play(stage.task(agent="guest"), real_time=True)
    assert (trajectory.outcome, trajectory.failure) == (Outcome.COMPLETED, None)


@pytest.mark.parametrize("streams", [True, False])
def test_the_config_says_whether_servers_stream(stage, streams):
    asked = []

    async def program(endpoint, task) -> None:
        async with ByChat(endpoint, None, is_stream=True) as client:
            client.say("a")
            assert (await client.ask()).text == "#### 42"

    agent = {"tools": (), "gateway": {"stream_tokens": streams}}
    world = stage.World(lambda turn, prompt: "#### 42", plugins=[guest(program)], agent=agent)
    stream = world.client.stream

    async def noted(*args, **kwargs):
        asked.append(True)
        return await stream(*args, **kwargs)

    world.client.stream = noted
    [trajectory] = world.play(stage.task(agent="guest"), real_time=True)
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.failure
    assert bool(asked) == streams


@pytest.mark.parametrize("way", [ByChat, ByResponses, ByMessages])
def test_a_silent_turn_shows_signs_of_life_and_a_late_failure_is_an_event(stage, way, monkeypatch):
    """The head was sent with the first sign, so the error is told in the stream; clients raise it."""
    monkeypatch.setattr(gateway_stream, "WAITING_S", 0.01)

    async def program(endpoint, task) -> None:
        async with way(endpoint, None, is_stream=True) as client:
            client.say("a")
            with pytest.raises((openai.APIError, anthropic.APIError, RuntimeError), match="burned"):
                await client.ask()
            heard.append(way)

    async def burn(input_ids, params, *, rid, into=None):
        await trio.sleep(0.2)
        raise RequestRefused("the server burned", status=400)

    heard = []
    world = stage.World(lambda turn, prompt: "", plugins=[guest(program)], agent={"tools": ()})
    world.client.stream = burn
    [trajectory] = world.play(stage.task(agent="guest"), real_time=True)
    assert trajectory.outcome is Outcome.MODEL_ERROR
    assert "burned" in str(trajectory.failure)
    assert heard == [way]
