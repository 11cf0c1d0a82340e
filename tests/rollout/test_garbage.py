"""The oldest generation is searched when asked for and due, never in between; in a process of its own, as its
collector is everybody's.
"""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc
import weakref

from agentrl.rollout import garbage


class Cyclic:
    def __init__(self):
        self.own = self


searched = []
loaded = Cyclic()
garbage.collect_rarely()
gc.callbacks.append(lambda phase, info: searched.append(info["generation"]) if phase == "start" else None)
now, took = [0.0], [0.0]
old = garbage.OldGarbage(lambda: now[0], lambda: took[0])
gc.callbacks.append(lambda phase, info: took.__setitem__(0, took[0] + (phase == "stop" and info["generation"] == 2) * 0.5))
assert old.collect(), "nothing is known of what it takes"
assert not old.collect(), "half a second is its share of 500"
assert searched.count(2) == 1

dead = Cyclic()
gone = weakref.ref(dead)
young, middle, _ = garbage.THRESHOLDS
kept = [[] for _ in range(young * (middle + 2))]
assert 1 in searched and searched.count(2) == 1, searched
del dead
frozen = weakref.ref(loaded)
del loaded
now[0] = 499.0
assert not old.collect() and gone() is not None
now[0] = 501.0
assert old.collect() and searched[-1] == 2, searched
assert gone() is None, "a cycle survived"
assert frozen() is not None, "what was loaded is looked at"
assert not old.collect(), "it is due again at once"
"""  # noqa: E501


def test_the_oldest_generation_is_searched_only_where_asked():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
