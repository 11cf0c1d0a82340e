"""The replay buffer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentrl.config.section import Section


class BufferConfig(Section):
    """The replay buffer: how much, how old, in which order."""

    groups_per_step: int = Field(16, ge=1, description="Groups (tasks) in one batch.")
    max_staleness: int = Field(1, ge=0, description="No token older than this many versions is trained on; 0: strictly on-policy.")
    stragglers: Literal["wait", "drop"] = Field(
        "wait",
        description="A group in flight that the next publish would make too old. wait: the learner waits for it, and none is dropped as "
        "stale; drop: it is dropped once complete, and learning goes on, with fewer long attempts than were sampled.",
    )
    sampler: Literal["fifo"] = Field("fifo", description="Order in which ready groups are taken; fifo: oldest lease first.")
    stall_timeout_s: float = Field(600.0, gt=0, description="No finished trajectory for so long ends the run with a report.")
    drop_constant_groups: bool = Field(
        False,
        description="Drop a complete group whose attempts all earned the same, a greedy one included, and lease another in its place "
        "(dynamic sampling).",
    )
    max_constant_batches: int = Field(
        10,
        ge=1,
        description="With drop_constant_groups: so many batches' worth of them dropped while one batch is waited for ends the run.",
    )
