"""Where trajectories go, what is expected of them, and which work is done twice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.servers.affinity import (
    MAX_IMBALANCE,
    NUM_REMEMBERED_TURNS,
    Affinity,
    Prefix,
    TurnLengths,
    Work,
    uncached,
)
from agentrl.types import Generation

PROMPT = list(range(100))


class FakeServer:
    def __init__(self, outstanding_tokens: int = 0, *, is_up: bool = True) -> None:
        self.outstanding_tokens, self.is_up = outstanding_tokens, is_up


def piece(versions, reason="stop", *, cached=0, retractions=0) -> Generation:
    count = len(versions)
    ids, logprobs = np.zeros(count, np.int32), np.zeros(count, np.float32)
    return Generation(
        ids,
        logprobs,
        np.array(versions, np.int32),
        reason,
        num_cached_tokens=cached,
        num_retractions=retractions,
    )


# ---------------------------------------------------------------------------------------------------- lengths


@given(
    st.lists(st.integers(1, 50), max_size=2 * NUM_REMEMBERED_TURNS), st.integers(0, 60), st.integers(1, 40)
)
def test_the_rest_of_a_turn_is_the_mean_of_what_longer_ones_had_left(lengths, done, limit):
    turns = TurnLengths()
    for length in lengths:
        turns.add(length)
    left = [length - done for length in lengths[-NUM_REMEMBERED_TURNS:] if length > done]
    expected = limit if not left else min(limit, max(1, round(float(np.mean(left)))))
    assert abs(turns.expected_rest(done, limit=limit) - expected) <= 1  # .5 is rounded to even


# ----------------------------------------------------------------------------------------------------- places


def test_members_of_a_group_follow_the_first_until_its_server_is_clearly_busier():
    busy, idle = FakeServer(1000), FakeServer(1000)
    affinity = Affinity()
    up = [busy, idle]
    home = affinity.place("first", PROMPT, up).server
    assert home is busy
    bound = 1000 + 100 + MAX_IMBALANCE * 1000
    followed = []
    for member in range(40):
        prefix = affinity.place(f"m{member}", PROMPT, up)
        followed.append(prefix.server is home)
        assert prefix.shared_tokens == (100 if prefix.server is home else 0)
        if prefix.server is not home:
            break
        home.outstanding_tokens += 50
    # The mean grows with the load, so the bound does too.
    load = 1000 + 50 * (len(followed) - 1)
    assert followed == [True] * (len(followed) - 1) + [False]
    assert load - 1000 > MAX_IMBALANCE * (load + 1000) / 2 + 100
    assert load >= bound


def test_another_prompt_goes_where_least_is_to_do_and_turns_stay():
    busy, idle = FakeServer(10), FakeServer(0)
    affinity = Affinity()
    assert affinity.place("a", PROMPT, [busy, idle]).server is idle
    idle.outstanding_tokens = 10**6
    assert affinity.place("b", PROMPT[1:], [busy, idle]).server is busy
    assert affinity.place("a", [*PROMPT, 1, 2], [busy, idle]).server is idle


def test_a_group_whose_server_failed_moves_together():
    lost, one, other = FakeServer(), FakeServer(5), FakeServer(6)
    affinity = Affinity()
    for key in "abc":
        assert affinity.place(key, PROMPT, [lost, one, other]).server is lost
    lost.is_up = False
    prefixes = [affinity.place(key, [*PROMPT, 7], [one, other]) for key in "abc"]
    assert [prefix.server for prefix in prefixes] == [one] * 3
    assert [prefix.shared_tokens for prefix in prefixes] == [0, 100, 100]
    assert all(prefix.is_lost for prefix in prefixes)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans(), st.integers(0, 2)), max_size=60))
def test_nothing_is_kept_of_what_is_over(steps):
    affinity, servers, alive = Affinity(), [FakeServer(), FakeServer()], set()
    for key, is_over, prompt in steps:
        if is_over:
            affinity.forget(key)
            alive.discard(key)
        else:
            affinity.place(key, PROMPT[prompt:], servers)
            alive.add(key)
        assert len(affinity) == len(alive)
    for key in list(alive):
        affinity.forget(key)
    assert len(affinity) == 0
    assert not affinity._prompts


# ------------------------------------------------------------------------------------------------------- work


def test_what_a_request_costs_is_what_the_server_does_not_have():
    prefix = Prefix(0, FakeServer(), shared_tokens=100)
    assert uncached(prefix, 100, version=0) == 1  # the last token of a prompt is always computed
    assert uncached(prefix, 130, version=0) == 30
    Work().count(prefix, 130, piece([0] * 21))
    assert prefix.num_tokens == 150
    assert uncached(prefix, 170, version=0) == 20
    assert (
        uncached(prefix, 170, version=1) == 70
    )  # an update empties the cache; another member may have brought the prompt back


@pytest.mark.parametrize(
    ("second", "is_moved", "prefilled", "redone"),
    [
        (piece([0], cached=119), False, 11, 0),  # the prefix was there
        (piece([0], cached=0), False, 130, 0),  # a server without a cache: not for an interruption
        (piece([0], cached=0), True, 130, 119),  # another server: all but the new tokens
        (piece([1], cached=0), False, 130, 119),  # an update came between
        (piece([1], cached=100), False, 30, 30),
        (piece([], "abort"), True, 0, 0),  # never ran
        (
            piece([0] * 5 + [1] * 5, cached=119, retractions=1),
            False,
            11 + 135,
            135,
        ),  # 5 tokens, then all again under the next version
    ],
)
def test_work_is_redone_when_something_came_between(second, is_moved, prefilled, redone):
    prefix, work = Prefix(0, FakeServer(), shared_tokens=0), Work()
    work.count(prefix, 100, piece([0] * 20))
    assert (work.prefilled_tokens, work.redone_tokens) == (100, 0)
    prefix.is_lost = is_moved
    work.count(prefix, 130, second)
    assert (work.prefilled_tokens - 100, work.redone_tokens) == (prefilled, redone)


def test_an_interrupted_turn_computes_its_prefix_again():
    prefix, work = Prefix(0, FakeServer(), shared_tokens=0), Work()
    work.count(prefix, 100, piece([0] * 20, "abort"))
    work.count(prefix, 120, piece([0] * 5))
    assert (work.prefilled_tokens, work.redone_tokens) == (220, 119)
