"""Many rollout actors, each of which knows only its own load, spread it over all servers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.servers.affinity import Affinity
from agentrl.servers.server_order import order_for

URLS = [f"http://10.0.{node}.1:{30000 + gpu}" for node in range(32) for gpu in range(8)]


@given(st.integers(1, 40), st.integers(1, 12))
def test_an_order_has_every_server_once_and_depends_on_their_set_alone(num_servers, num_actors):
    urls = URLS[:num_servers]
    for index in range(num_actors):
        order = order_for(urls, index, num_actors)
        assert sorted(order) == sorted(urls)
        if num_actors > 1:
            assert order_for(urls[::-1], index, num_actors) == order
        else:
            assert order == urls


@settings(max_examples=40)
@given(st.integers(1, 100), st.integers(2, 100))
def test_actors_begin_at_servers_of_their_own_as_far_as_there_are_enough(num_servers, num_actors):
    urls = [f"http://s{number}" for number in range(num_servers)]
    first = Counter(order_for(urls, index, num_actors)[0] for index in range(num_actors))
    assert max(first.values()) <= -(-num_actors // num_servers)
    assert len(first) == min(num_servers, num_actors)


class FakeServer:
    """A server as one actor sees it."""

    is_up = True

    def __init__(self, url: str) -> None:
        self.url, self.outstanding_tokens = url, 0


def fill(
    order: Callable[[int], Sequence[str]], *, num_actors: int, attempts: int, group_size: int = 8
) -> Counter[str]:
    """Return the number of attempts on each server after all actors have begun theirs, and ended and replaced
    each once.
    """
    rng = random.Random(0)
    running: Counter[str] = Counter()
    actors = []
    for index in range(num_actors):
        up = [FakeServer(url) for url in order(index)]
        actors.append((Affinity(), up, []))
    for number in range(2 * attempts):
        for index, (affinity, up, mine) in enumerate(actors):
            if number >= attempts:
                key, server, tokens = mine.pop(rng.randrange(len(mine)))
                server.outstanding_tokens -= tokens
                running[server.url] -= 1
                affinity.forget(key)
            key, tokens = f"{index}-{number}", 1 + int(rng.expovariate(1 / 1000))
            server = affinity.place(key, (index, number // group_size), up).server
            server.outstanding_tokens += tokens
            running[server.url] += 1
            mine.append((key, server, tokens))
    return running


def imbalance(running: Counter[str], num_servers: int) -> tuple[float, float]:
    """Return the most of a server over the mean, and the share of idle servers."""
    mean = running.total() / num_servers
    return max(running.values()) / mean, 1 - sum(count > 0 for count in running.values()) / num_servers


def test_many_actors_balance_servers_though_each_knows_only_its_own_load():
    """A quarter of a large run: 32 actors of 64 attempts on 128 servers."""
    urls, size = URLS[:128], {"num_actors": 32, "attempts": 64}
    same = imbalance(fill(lambda index: urls, **size), len(urls))
    drawn = imbalance(fill(lambda index: random.Random(index).sample(urls, len(urls)), **size), len(urls))
    ours = imbalance(fill(lambda index: order_for(urls, index, 32), **size), len(urls))
    assert same[0] > 2
    assert same[1] > 0.4
    assert ours[1] == drawn[1] == 0
    assert ours[0] < drawn[0] < same[0]
    assert ours[0] < 1.6


@pytest.mark.parametrize("lost", [8, 32])
def test_the_load_of_lost_servers_goes_to_many(lost):
    """The servers of a node are no neighbours on the circle."""
    urls = URLS[:128]
    gone = set(urls[:lost])
    orders = [order_for(urls, index, 16) for index in range(16)]
    heirs = Counter(
        next(url for url in order[order.index(url) :] + order if url not in gone)
        for order in orders[:1]
        for url in gone
    )
    assert max(heirs.values()) <= lost / 2
