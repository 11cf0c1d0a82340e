"""Config of the replay buffer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from agentrl.config.section import Section


class BufferConfig(Section):
    """The replay buffer: how much, how old, in which order."""

    groups_per_step: int = Field(16, ge=1, description="Groups (tasks) in one batch.")
    max_staleness: int = Field(
        1, ge=0, description="Maximum age of a trained token, in versions; 0: strictly on-policy."
    )
    stragglers: Literal["wait", "drop"] = Field(
        "wait",
        description="What happens to groups in flight that coming publishes would make too old. wait: the "
        "learner waits for them, and with the sampler fifo no group is dropped as stale; drop: they are "
        "dropped when they are complete, and learning continues, but with fewer long attempts than were "
        "sampled.",
    )
    sampler: Literal["fifo", "in_order", "freshest", "windowed"] = Field(
        "fifo",
        description="Which ready groups form a batch. fifo: oldest lease first; in_order: in the order in "
        "which they were drawn, so that batch k has the same tasks in every run, and no group "
        "overtakes one that is still in flight; freshest: smallest lag first; windowed: first "
        "finished first, with `oversample` times as many groups in flight, and groups left over "
        "are dropped as stale.",
    )
    oversample: float = Field(
        1.0,
        ge=1,
        description="With windowed: factor on the number of groups in flight that the staleness bound "
        "admits.",
    )
    lease_timeout_s: float = Field(
        7200.0,
        gt=0,
        description="Seconds after which a group's lease expires: its attempts are ended and another rollout "
        "actor plays it, for up to twice as long. Choose more than any group may take.",
    )
    duplicate_after_s: float | None = Field(
        None,
        gt=0,
        description="Seconds after which a group in flight is also given to a second, idle rollout actor; "
        "the first to finish counts, and the other's attempts are ended. None: never.",
    )
    journal_sync: Literal["process", "machine"] = Field(
        "process",
        description="What the journal survives. process: the death of any process (a power loss loses what "
        "was not yet written, at most back to the last checkpoint); machine: also a power loss, "
        "at the cost of a disk sync per change.",
    )
    disk_patience_s: float = Field(
        600.0,
        ge=0,
        description="Seconds for which a run waits if the journal or the published weights cannot be written "
        "(a full disk) before it ends; the problem is reported immediately.",
    )
    stall_timeout_s: float = Field(
        600.0,
        gt=0,
        description="Seconds without a finished trajectory after which the run ends with a report.",
    )
    drop_constant_groups: bool = Field(
        False,
        description="Drop a complete group whose attempts, including a greedy one, all earned the same "
        "reward, and lease another group in its place (dynamic sampling).",
    )
    max_constant_batches: int = Field(
        10,
        ge=1,
        description="With drop_constant_groups: the run ends if this many batches' worth of groups are "
        "dropped while it waits for one batch.",
    )

    @model_validator(mode="after")
    def _check(self) -> BufferConfig:
        if self.oversample > 1 and self.sampler != "windowed":
            raise ValueError(
                f"oversample={self.oversample:g} needs sampler=windowed, but sampler={self.sampler}"
            )
        if self.sampler == "windowed" and self.stragglers == "wait":
            raise ValueError("sampler=windowed drops groups that are too old and needs stragglers=drop")
        if self.sampler == "in_order" and (self.stragglers == "drop" or self.drop_constant_groups):
            what = "stragglers=drop" if self.stragglers == "drop" else "drop_constant_groups=true"
            raise ValueError(
                f"sampler=in_order takes the same tasks for batch k in every run, but {what} drops some of "
                "them"
            )
        return self
