"""Says which attempts fail and why: each distinct failure at once, later ones of its kind at growing intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from agentrl.tracking.attempts import Became, FailedAttempt
from agentrl.types import Outcome, PluginId

FIRST_INTERVAL = 10
GROWTH = 3
"""A kind is told of again once there are so many times more failures of it: after 1 come 10, 30, 90, ..."""
MAX_SAID = 30
"""Kinds that are told of: a plugin that fails in a hundred places must not hide the steps."""
MAX_LISTED = 5


class FailureKind(NamedTuple):
    """What makes failures distinct: not their text, which may name a row each time."""

    outcome: Outcome
    plugin: PluginId | None
    error: str
    place: str

    @classmethod
    def of(cls, failed: FailedAttempt) -> FailureKind:
        return cls(failed.outcome, failed.failure.plugin, failed.failure.error, failed.failure.place)


@dataclass
class _Count:
    """What is known of a kind. text: of its first failure. num_here: of this process; num_ended_here: of them, those that
    ended their attempt; next_at: when it is told of again."""

    text: str
    became: Counter[Became] = field(default_factory=Counter)
    num_here: int = 0
    num_ended_here: int = 0
    next_at: int = 1

    @property
    def total(self) -> int:
        return sum(self.became.values())

    def words(self) -> str:
        return ", ".join(f"{count} {became.replace('_', ' ')}" for became, count in self.became.most_common())


class FailureTally:
    """Counts failures by kind. `where`: the file that has all of them; `say` shows a text."""

    def __init__(self, say: Callable[[str], None], *, where: str, shows_tracebacks: bool = False) -> None:
        self._say = say
        self._where = where
        self._shows_tracebacks = shows_tracebacks
        self._counts: dict[FailureKind, _Count] = {}
        self._num_said = 0

    def restore(self, earlier: Iterable[FailedAttempt]) -> None:
        """Count what an earlier process of the same run saw, without telling of it."""
        for failed in earlier:
            self._count(failed)

    def add(self, attempts: Sequence[FailedAttempt]) -> None:
        """Count failures, and tell of what is new or has become much more."""
        first: dict[FailureKind, FailedAttempt] = {}
        for failed in attempts:
            first.setdefault(FailureKind.of(failed), failed)
            count = self._count(failed)
            count.num_here += 1
            count.num_ended_here += failed.became != "went_on"
        for kind, failed in first.items():
            count = self._counts[kind]
            if count.num_here < count.next_at:
                continue
            is_new = count.next_at == 1
            count.next_at = max(FIRST_INTERVAL, GROWTH * count.num_here)
            if not is_new:
                self._say(f"{count.total} failures like this by now ({count.words()}): {count.text}")
            elif self._num_said < MAX_SAID:
                self._num_said += 1
                self._say("\n".join(self._first_lines(failed, count)))
            else:
                count.next_at = 2**63
                if self._num_said == MAX_SAID:
                    self._num_said += 1
                    self._say(f"attempts fail in more than {MAX_SAID} ways; further ones are only kept: {self._where}")

    def lines(self) -> list[str]:
        """Return the kinds that failed most attempts, most first, one line each."""
        ranked = sorted(self._counts.items(), key=lambda item: -item[1].total)
        lines = [f"{count.total} x {kind.outcome.value} ({count.words()}): {count.text}" for kind, count in ranked[:MAX_LISTED]]
        others = ranked[MAX_LISTED:]
        if others:
            lines.append(f"{sum(count.total for _, count in others)} in {len(others)} other ways")
        return lines

    def most_common(self, *, ignored: frozenset[Outcome] = frozenset()) -> str:
        """Return what ended most attempts of this process; "" if nothing did."""
        counts = [count for kind, count in self._counts.items() if kind.outcome not in ignored and count.num_ended_here]
        return max(counts, key=lambda count: count.num_ended_here).text if counts else ""

    def _count(self, failed: FailedAttempt) -> _Count:
        count = self._counts.setdefault(FailureKind.of(failed), _Count(str(failed.failure)))
        count.became[failed.became] += 1
        return count

    def _first_lines(self, failed: FailedAttempt, count: _Count) -> list[str]:
        before = f"; {count.total - count.num_here} before this process" if count.total > count.num_here else ""
        place = f" at {failed.failure.place}" if failed.failure.place else ""
        what = f"attempt failed ({failed.outcome.value}, {failed.became.replace('_', ' ')})"
        if failed.became == "went_on":
            what = "a call failed, and the attempt went on"
        lines = [
            f"{what}: {failed.failure.text}{place}",
            f"  first seen in group {failed.group_id}, member {failed.member}, task {failed.task_id}{before}; all: {self._where}",
        ]
        if self._shows_tracebacks and failed.failure.traceback:
            lines += [f"  {line}" for line in failed.failure.traceback.splitlines()]
        return lines
