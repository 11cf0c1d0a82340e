"""The start-up of the parts of a run, as a reader sees it: how far each one is; no Ray here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # a learner alone in its process needs no Ray
    from ray import ObjectRef


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


class Starting(Protocol):
    """A part that was launched and may not be ready yet."""

    @property
    def starting(self) -> Mapping[ObjectRef, float]:
        """References that are still waited for, and their deadlines (monotonic clock)."""

    @property
    def readiness(self) -> Readiness:
        """Progress of the start-up; does not block, callable from any thread."""

    def wait_until_ready(self) -> None:
        """Wait until the part is ready; raise the part's own error if it fails."""
