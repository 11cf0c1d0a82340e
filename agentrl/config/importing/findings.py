"""What becomes of one or several keys of verl."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from agentrl.config.importing.source import WrittenConfig


@dataclass(frozen=True, slots=True)
class Setting:
    """Our key and its value; `old` are verl's keys that say so, those included that have verl's default; `note`: what differs."""

    key: str
    value: Any
    old: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A key of verl that has a counterpart, or a part in one, and whose value is not taken over.

    is_decisive: without it something else would be trained than was asked for.
    """

    old: str
    reason: str
    is_decisive: bool = False


Finding = Setting | Dropped
Rule = Callable[[WrittenConfig], Iterator[Finding]]
"""Reads keys that belong together."""


class NotTaken(Exception):
    """Raised while a value is translated: why it cannot be."""
