"""The order in which each rollout actor fills servers: actors that know only their own load spread it.

A router asks the server with the least load of its own, and of equals the first in its list. If all actors
had the same list, all would fill the same servers. Therefore all use one circle of servers, in the order of a
hash, and begin at equal distances on it. For 64 actors with 128 attempts each on 256 servers this balances
better than orders drawn at random, than two random choices, and than choices by shared reports of load
(tests/rollout/test_server_order.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def order_for(urls: Iterable[str], index: int, num_actors: int) -> list[str]:
    """Return the servers in the order of actor `index` of `num_actors`; one actor keeps the given order."""
    if num_actors == 1:
        return list(urls)
    # By a hash: the servers of a node are no neighbours, so if it fails, its load goes to many others.
    circle = sorted(urls, key=lambda url: hashlib.blake2b(url.encode()).digest())
    start = index * len(circle) // num_actors
    return circle[start:] + circle[:start]
