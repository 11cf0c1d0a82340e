"""The faults of a hunted schedule: what fails, and when."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal[
    "actor dies",
    "buffer dies",
    "buffer dies before it answers",
    "disk is full",
    "server dies",
    "server hangs",
    "publish fails",
    "rank is lost",
    "batch is rejected",
    "driver dies",
    "run continues elsewhere",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
AT_A_CALL: dict[Kind, str] = {
    "publish fails": "publish",
    "rank is lost": "rank",
    "batch is rejected": "reject",
}
"""Faults that wait for the next occasion in the loop, with the loop's name of them."""


@dataclass(frozen=True, slots=True)
class Fault:
    """At `at_s`, `kind` happens to the process `index`, modulo their number, for `for_s` seconds."""

    number: int
    at_s: float
    kind: Kind
    index: int
    for_s: float

    def __str__(self) -> str:
        return f"{self.number}: {self.kind} at {self.at_s:.1f} s"


def draw_faults(rng: random.Random, *, most: int, until_s: float) -> list[Fault]:
    """Return up to `most` faults before `until_s`, in order of time."""
    drawn = sorted(
        (rng.uniform(0.0, until_s), rng.choice(KINDS), rng.randrange(64), rng.uniform(0.5, 20.0))
        for _ in range(rng.randint(0, most))
    )
    return [
        Fault(number, at_s, kind, index, for_s) for number, (at_s, kind, index, for_s) in enumerate(drawn)
    ]


class Occasions:
    """Faults that happen at the next occasion."""

    def __init__(self) -> None:
        self._waiting: Counter[str] = Counter()

    def add(self, name: str) -> None:
        self._waiting[name] += 1

    def happens(self, name: str) -> bool:
        """Return whether a fault of this name happens now."""
        if not self._waiting[name]:
            return False
        self._waiting[name] -= 1
        return True


def without(faults: Sequence[Fault], kept: Sequence[int] | None) -> list[Fault]:
    """Return the faults with these numbers; None: all."""
    return [fault for fault in faults if kept is None or fault.number in kept]
