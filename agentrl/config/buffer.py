"""Config of the replay buffer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

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
    sampler: Literal["fifo", "in_order", "freshest", "windowed"] = Field(
        "fifo",
        description="Which ready groups make a batch. fifo: oldest lease first; in_order: as they were drawn, so that batch k is made of "
        "the same tasks in every run, and nothing is taken past a group that is still played; freshest: smallest lag first; windowed: "
        "first finished first, with `oversample` times as many in flight, and what is left over is dropped for its age.",
    )
    oversample: float = Field(1.0, ge=1, description="With windowed: times as many groups are in flight as the bound on staleness admits.")
    lease_timeout_s: float = Field(
        7200.0,
        gt=0,
        description="A group that a rollout actor has had for so long is given to another, and its attempts end; longer than any may take.",
    )
    duplicate_after_s: float | None = Field(
        None,
        gt=0,
        description="A group that one rollout actor has played for so long goes to another, too, which would have nothing to do; the first "
        "to finish counts, and the other ends its own. None: never.",
    )
    journal_sync: Literal["process", "machine"] = Field(
        "process",
        description="What the journal survives at every moment. process: the death of any process (a power loss takes what was not yet "
        "written, back to the last checkpoint at most); machine: a power loss, too, at the price of a wait for the disk per change.",
    )
    disk_patience_s: float = Field(
        600.0,
        ge=0,
        description="So long a run waits when the journal, or weights published by disk, cannot be written (a full disk), before it ends; "
        "it is said at once.",
    )
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

    @model_validator(mode="after")
    def _check(self) -> BufferConfig:
        if self.oversample > 1 and self.sampler != "windowed":
            raise ValueError(f"oversample={self.oversample:g} belongs to sampler=windowed, and sampler is {self.sampler}")
        if self.sampler == "windowed" and self.stragglers == "wait":
            raise ValueError("sampler=windowed drops what is too old; it needs stragglers=drop")
        if self.sampler == "in_order" and (self.stragglers == "drop" or self.drop_constant_groups):
            what = "stragglers=drop" if self.stragglers == "drop" else "drop_constant_groups=true"
            raise ValueError(f"sampler=in_order makes batch k of the same tasks in every run, and {what} drops some of them")
        return self
