"""The controller's side of the learner: launch of ranks, and packing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agentrl.cluster.deadlines import CallDeadlines
from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.pools import Seat
from agentrl.cluster.workers import LocalWorker, Workers
from agentrl.config.learner import LearnerConfig
from agentrl.config.model import ModelConfig
from agentrl.learner.batch import Microbatch, Sample
from agentrl.learner.learner import Learner, LearnerSpec
from agentrl.learner.packing import MicrobatchPlan, filler, pack, plan_microbatches
from agentrl.learner.ranks import SAVING
from agentrl.learner.sample_refs import PlannedMicrobatch, SampleRef, planned
from agentrl.learner.stored_weights import reading_s


def call_deadlines(
    config: LearnerConfig,
    model: ModelConfig,
    *,
    has_reference: bool = False,
    teacher: ModelConfig | None = None,
) -> CallDeadlines:
    """Return the deadlines of calls to ranks.

    `learner.save_timeout_s` for writing a checkpoint, else `learner.collective_timeout_s`. The start has more
    time the larger the model is, because each copy of the weights (HSDP) is read once.
    """
    saving = CallDeadlines(config.save_timeout_s, "learner.save_timeout_s")
    num_copies = config.world_size // (config.fsdp.shard_size or config.world_size)
    read = [model] * (1 + has_reference) + ([] if teacher is None else [teacher])
    return CallDeadlines(
        config.collective_timeout_s,
        reading_s=num_copies * sum(reading_s(Path(each.path)) for each in read if each.path),
        of_threads={SAVING: saving},
    )


def launch_learner(spec: LearnerSpec, seats: Sequence[Seat]) -> WorkerGroup[Learner]:
    """Launch the ranks as Ray actors in their seats without waiting; see `wait_until_ready`."""
    deadlines = call_deadlines(
        spec.learner,
        spec.model,
        has_reference=spec.algorithm.kl.coefficient > 0 and not spec.model.lora.rank,
        teacher=spec.teacher,
    )
    return WorkerGroup.launch(
        Learner, spec, seats=seats, deadlines=deadlines, num_replicas=spec.learner.num_replicas
    )


def start_learner(spec: LearnerSpec, seats: Sequence[Seat]) -> WorkerGroup[Learner]:
    """Start the ranks as Ray actors in their seats and wait until all have built the model.

    Raises:
        ConfigError: the model, device or attention is not available.
        LearnerError: the ranks did not form their process group.
    """
    learner = launch_learner(spec, seats)
    learner.wait_until_ready()
    return learner


def open_local_learner(spec: LearnerSpec) -> LocalWorker[Learner]:
    """Return a learner of one rank in this process.

    Raises:
        ConfigError: the model, device or attention is not available.
    """
    return LocalWorker(Learner(spec, rank=0, address="127.0.0.1", port=0), close=Learner.close)


def pack_for(
    learner: Workers[Learner], samples: Sequence[Sample], config: LearnerConfig, *, may_split: bool = True
) -> list[Microbatch]:
    """Return the microbatches of all ranks, concatenated by rank, as the learner's methods take them.

    Without samples (all were masked) each rank gets a filler and skips the update, so that every step still
    counts the same number of updates.

    Args:
        may_split: see `pack`.
    """
    if not samples:
        return [filler() for _ in range(learner.dp_size)]
    parity_tokens = learner.run(Learner.parity_tokens)
    shards = pack(
        samples,
        max_tokens=config.microbatch_tokens,
        world_size=learner.dp_size,
        parity_tokens=parity_tokens,
        may_split=may_split,
        shared_prefix=learner.run(Learner.shared_prefix),
    )
    return [microbatch for shard in shards for microbatch in shard]


def plan_for(
    learner: Workers[Learner], samples: Sequence[SampleRef], config: LearnerConfig
) -> list[PlannedMicrobatch]:
    """Return the microbatches of all ranks by reference, concatenated by rank; fillers without samples."""
    if not samples:
        return [PlannedMicrobatch(MicrobatchPlan(), {}) for _ in range(learner.dp_size)]
    shards = plan_microbatches(
        [sample.shape for sample in samples],
        max_tokens=config.microbatch_tokens,
        world_size=learner.dp_size,
        parity_tokens=learner.run(Learner.parity_tokens),
        shared_prefix=learner.run(Learner.shared_prefix),
    )
    return planned([plan for shard in shards for plan in shard], samples)
