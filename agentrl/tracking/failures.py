"""Reports failed attempts: each new kind of failure at once, repetitions at growing intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from agentrl.tracking.attempts import Became, FailedAttempt
from agentrl.types import Outcome, PluginId

FIRST_INTERVAL = 10
GROWTH = 3
"""A kind is reported again when its count has grown by this factor: at 1, 10, 30, 90, ..."""
MAX_SAID = 30
"""Number of kinds that are reported: a plugin that fails in a hundred places must not hide the steps."""
MAX_LISTED = 5


class FailureKind(NamedTuple):
    """The identity of a kind of failure.

    The message is no part of it, because it may name a different row each time.
    """

    outcome: Outcome
    plugin: PluginId | None
    error: str
    place: str

    @classmethod
    def of(cls, failed: FailedAttempt) -> FailureKind:
        return cls(failed.outcome, failed.failure.plugin, failed.failure.error, failed.failure.place)


@dataclass
class _Count:
    """The counts of one kind.

    text: message of its first failure. became: counts by consequence, over all processes of the run.
    num_here: failures in this process. num_ended_here: those of them that ended their attempt.
    next_at: the value of num_here at which the kind is reported again.
    """

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
    """Counts failures by kind, and reports them by `say`.

    `where`: the file with all of them, for messages.
    """

    def __init__(self, say: Callable[[str], None], *, where: str, shows_tracebacks: bool = False) -> None:
        self._say = say
        self._where = where
        self._shows_tracebacks = shows_tracebacks
        self._counts: dict[FailureKind, _Count] = {}
        self._num_said = 0

    def restore(self, earlier: Iterable[FailedAttempt]) -> None:
        """Count the failures of earlier processes of the same run, without reporting them."""
        for failed in earlier:
            self._count(failed)

    def add(self, attempts: Sequence[FailedAttempt]) -> None:
        """Count failures, and report kinds that are new or have become much more frequent."""
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
                self._say(f"{count.total} failures like this so far ({count.words()}): {count.text}")
            elif self._num_said < MAX_SAID:
                self._num_said += 1
                self._say("\n".join(self._first_lines(failed, count)))
            else:
                count.next_at = 2**63
                if self._num_said == MAX_SAID:
                    self._num_said += 1
                    self._say(
                        f"attempts fail in more than {MAX_SAID} ways; further ones are only recorded in "
                        f"{self._where}"
                    )

    def lines(self) -> list[str]:
        """Return the most common kinds, most frequent first, one line each."""
        ranked = sorted(self._counts.items(), key=lambda item: -item[1].total)
        lines = [
            f"{count.total} x {kind.outcome.value} ({count.words()}): {count.text}"
            for kind, count in ranked[:MAX_LISTED]
        ]
        others = ranked[MAX_LISTED:]
        if others:
            lines.append(f"{sum(count.total for _, count in others)} in {len(others)} other ways")
        return lines

    def most_common(self, *, ignored: frozenset[Outcome] = frozenset()) -> str:
        """Return the message of the kind that ended most attempts of this process; "" if there is none."""
        counts = [
            count
            for kind, count in self._counts.items()
            if kind.outcome not in ignored and count.num_ended_here
        ]
        return max(counts, key=lambda count: count.num_ended_here).text if counts else ""

    def first(self, plugin: PluginId) -> str:
        """Return the message of a plugin's first failure that ended an attempt of this process, or ""."""
        found = (c.text for k, c in self._counts.items() if k.plugin == plugin and c.num_ended_here)
        return next(found, "")

    def _count(self, failed: FailedAttempt) -> _Count:
        count = self._counts.setdefault(FailureKind.of(failed), _Count(str(failed.failure)))
        count.became[failed.became] += 1
        return count

    def _first_lines(self, failed: FailedAttempt, count: _Count) -> list[str]:
        before = (
            f"; {count.total - count.num_here} before this process" if count.total > count.num_here else ""
        )
        place = f" at {failed.failure.place}" if failed.failure.place else ""
        what = f"attempt failed ({failed.outcome.value}, {failed.became.replace('_', ' ')})"
        if failed.became == "went_on":
            what = "a failure that ended no attempt"
        lines = [
            f"{what}: {failed.failure.text}{place}",
            f"  first seen in group {failed.group_id}, member {failed.member}, task "
            f"{failed.task_id}{before}; all: {self._where}",
        ]
        if self._shows_tracebacks and failed.failure.traceback:
            lines += [f"  {line}" for line in failed.failure.traceback.splitlines()]
        return lines
