"""Events of groups, applied by the ledger and stored by the journal.

Each event is a fact in the past tense.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class EventKind(enum.StrEnum):
    """Kind of an event. The comments list the fields of `Event` that each kind uses in brackets."""

    LEASED = "leased"  # [group_id, owner]: leased to play, from the queue or newly drawn
    # [group_id, owner, member, versions, accuracy]: a member finished; the last one makes the group ready
    ADDED = "added"
    # [group_id, owner, member, reason]: this member will not arrive; the group completes without it
    LEFT_OUT = "left_out"
    DISCARDED = "discarded"  # [group_id, owner, member, reason]: a member arrived late or twice
    # [group_id, owner, reason]: the owner's lease ended; without another owner the group is leased again
    QUEUED = "queued"
    DROPPED = "dropped"  # [group_id, reason]: the group ends for good; nothing is learned from it
    CONSUMED = "consumed"  # [group_id, step]: the group is in the batch of this step
    RETURNED = "returned"  # [group_id, step, reason]: the step is undone; the group is ready again
    # [group_id, step, reason]: the step is undone; the group is too stale or forgotten, its task is queued
    REQUEUED = "requeued"
    PUBLISHED = "published"  # [version, step]: the servers use the weights of this step
    ROLLED_BACK = "rolled_back"  # [step]: the weights of this step are restored; later steps are undone
    RELEASED = "released"  # [owner]: the owner is dead and never leases again
    SETTLED = "settled"  # [step]: the checkpoint of this step is complete; steps up to it are final
    IMPORTED = "imported"  # [reason: JSON]: the state is replaced by a checkpoint of another folder
    # [reason: JSON]: all that the events before it led to (`snapshots`); they are deleted, so it is the first
    SNAPSHOT = "snapshot"


@dataclass(frozen=True, slots=True)
class Event:
    """One event. Fields that its kind does not use keep their defaults.

    versions: distinct versions of the member's action tokens, ascending.
    """

    kind: EventKind
    group_id: int = -1
    owner: str = ""
    member: int = -1
    step: int = -1
    version: int = -1
    versions: tuple[int, ...] = ()
    reason: str = ""
    accuracy: float | None = None
