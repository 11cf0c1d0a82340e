"""What happens to groups, as the ledger applies it and the journal keeps it: facts in the past tense, each with the fields it needs."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class EventKind(enum.StrEnum):
    """What happened. In brackets: the fields of `Event` that say more."""

    LEASED = "leased"  # [group_id, owner]: to play; from the queue, or drawn from the data
    ADDED = "added"  # [group_id, owner, member, versions, accuracy]: one attempt finished; the last one makes its group ready
    LEFT_OUT = "left_out"  # [group_id, owner, member, reason]: this attempt will not come, the group is complete without it
    DISCARDED = "discarded"  # [group_id, owner, member, reason]: an attempt that came too late, or twice
    QUEUED = "queued"  # [group_id, owner, reason]: what an owner had of a group is given up; when none has it, it is leased again
    DROPPED = "dropped"  # [group_id, reason]: a group ends for good, and nothing is learned from it
    CONSUMED = "consumed"  # [group_id, step]: in the batch of this step
    RETURNED = "returned"  # [group_id, step, reason]: the step is undone; the group is ready again
    REQUEUED = "requeued"  # [group_id, step, reason]: the step is undone; its tokens are too far from the policy, its task is queued
    PUBLISHED = "published"  # [version, step]: the servers serve what was learned up to this step
    ROLLED_BACK = "rolled_back"  # [step]: the weights are again those after this step; what was learned since is undone
    RELEASED = "released"  # [owner]: it is dead, and never leases again
    SETTLED = "settled"  # [step]: a checkpoint of this step is complete; nothing up to it will be undone
    IMPORTED = "imported"  # [reason: JSON]: all of it becomes what a checkpoint of another folder says


@dataclass(frozen=True, slots=True)
class Event:
    """One fact. Fields that a kind does not need keep their defaults; `versions`: of the action tokens, each once, ascending."""

    kind: EventKind
    group_id: int = -1
    owner: str = ""
    member: int = -1
    step: int = -1
    version: int = -1
    versions: tuple[int, ...] = ()
    reason: str = ""
    accuracy: float | None = None
