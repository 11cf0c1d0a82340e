"""Random numbers of a simulation: a stream of its own for each thing that is random."""

from __future__ import annotations

import random


class Draws:
    """Streams of random numbers, each a function of the seed and its name.

    A stream does not depend on how many numbers others gave. So two simulations that differ in one setting
    have the same lengths, latencies and failures, attempt by attempt.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def of(self, *name: object) -> random.Random:
        """Return the stream of this name, at its beginning."""
        return random.Random("/".join(map(str, (self._seed, *name))))
