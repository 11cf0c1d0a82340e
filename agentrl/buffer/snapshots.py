"""Snapshots: one event that replaces all events before it, so that a restart reads few at any age of a run.

A snapshot holds the ledger's state and what the audit knows, which were computed from the same events by
different code. It is only taken while both agree and the audit has no complaint: what is wrong stays in the
journal event by event.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from agentrl.buffer.audit import Audit, EndedGroup, balance_of
from agentrl.buffer.events import Event, EventKind
from agentrl.buffer.states import GroupStates


@dataclass(frozen=True, slots=True)
class Snapshot:
    """event: replaces all events so far. ended: groups that it holds only in totals; the archive keeps them.

    audit: what it knows after the snapshot.
    """

    event: Event
    ended: tuple[EndedGroup, ...]
    audit: Audit


def take_snapshot(groups: GroupStates, audit: Audit) -> Snapshot | None:
    """Return a snapshot; None if ledger and audit do not agree, or the audit has a complaint."""
    ledger = groups.snapshot()
    if not audit.is_balanced or audit.balance() != balance_of(ledger):
        return None
    ended = tuple(audit.to_archive())
    after = Audit.of_state(audit.state())
    after.archive(ended)
    state = json.dumps({"ledger": ledger, "audit": after.state()}, separators=(",", ":"))
    return Snapshot(Event(EventKind.SNAPSHOT, reason=state), ended, after)
