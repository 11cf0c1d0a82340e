"""Findings: the results of translating one or several keys of verl."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from agentrl.extras.verl.importing.source import WrittenConfig


@dataclass(frozen=True, slots=True)
class Setting:
    """A value for one of our keys.

    Attributes:
        old: the keys of verl that it comes from, including those with verl's default.
        note: the difference in meaning; may be empty.
    """

    key: str
    value: Any
    old: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A key of verl that has a full or partial counterpart, but whose value is not translated.

    `is_decisive`: without this key, the run would train something other than requested.
    """

    old: str
    reason: str
    is_decisive: bool = False


Finding = Setting | Dropped
Rule = Callable[[WrittenConfig], Iterator[Finding]]
"""Translates keys that belong together."""


class NotTaken(Exception):
    """Raised while translating a value that has no translation; the text is the reason.

    `is_decisive`: as of Dropped.
    """

    def __init__(self, reason: str, *, is_decisive: bool = False) -> None:
        super().__init__(reason)
        self.is_decisive = is_decisive
