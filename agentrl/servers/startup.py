"""The start-up of the parts of a run, as a reader sees it: how far each one is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Readiness:
    """Progress of a part's start-up: `num_ready` of `num_parts` are ready.

    may_come: some of the others may still become ready.
    waits_for: what the first of the others waits for, if it is known.
    """

    name: str
    num_ready: int
    num_parts: int
    may_come: bool = False
    waits_for: str = ""

    @property
    def is_ready(self) -> bool:
        return self.num_ready == self.num_parts
