"""The learner of one rank, without Ray.

All ranks call the same methods in the same order, each with its own microbatches.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.distributed import ProcessGroup

from agentrl.algorithms.advantages.reinforce import Moments
from agentrl.algorithms.kl import KLEstimator, k1
from agentrl.algorithms.reward_kl import REWARD_KL_ESTIMATORS
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.learner import LearnerConfig, SharedPrefix
from agentrl.config.model import ModelConfig, ModelFromScratchConfig
from agentrl.config.trainer import Verify
from agentrl.data.checkpoint_files import StoredFile, Verification, read_manifest
from agentrl.data.proximal_files import write_proximal
from agentrl.learner import weights
from agentrl.learner.attention import attention_parity
from agentrl.learner.batch import Floats, Microbatch, Mode, ScoredMicrobatch, count_tokens
from agentrl.learner.buckets import BucketGatherer, BucketSender, choose_sources, plan_buckets
from agentrl.learner.changes import WrittenWeights
from agentrl.learner.correction import Corrector
from agentrl.learner.counterfactual import Counterfactual, compare
from agentrl.learner.device_peaks import peak_of
from agentrl.learner.dispatch import dispatch
from agentrl.learner.loss import PolicyObjective
from agentrl.learner.memory_forecast import MemoryForecast, size_of
from agentrl.learner.meter import Meter
from agentrl.learner.model import Policy, build_policy, can_share_prefixes, has_dropout
from agentrl.learner.ranks import SAVING, Device, give_back_memory, join_ranks, leave_ranks
from agentrl.learner.sample_refs import (
    Assessed,
    Packed,
    PlannedMicrobatch,
    SampleRef,
    assessments,
    loaded,
    runs_of,
    stored_teacher_logprobs,
)
from agentrl.learner.score_head import ScoreHead
from agentrl.learner.split_sequences import SplitSequences
from agentrl.learner.step import Stepper, count_update
from agentrl.learner.supervised_loss import Objective, PreferenceObjective, SupervisedObjective, measure
from agentrl.learner.work import WorkCounter
from agentrl.servers.process_group import join_weights_group, leave_weights_group
from agentrl.servers.protocol import POLICY_ADAPTER
from agentrl.types import SendTimes, TensorSpec


@dataclass(frozen=True, slots=True)
class LearnerSpec:
    """Settings that are the same on every rank.

    mode: resolved, never `auto`.
    temperature: of the rollout.
    total_updates: length of the learning rate schedule, in updates.
    dump_folder: where to write a batch with a non-finite loss; None: not written.
    from_scratch: sizes of a new model that replaces model.path; None: load model.path.
    master_dtype: of weights, gradients and optimizer state; float64 is for numerical comparisons.
    score_head: of a reward model, which learns only from pairs; None: a policy.
    device: of the rank's pool; auto: a GPU if torch sees one.
    scores_ahead: False: each scored batch gets exactly one update, and nothing else needs its proximal
        log-probabilities before (see `agentrl.config.proximal`). In mode decoupled, the update's own forward
        then gives them.
    teacher: the model of `teacher_logprobs`; None without distillation.
    """

    model: ModelConfig
    learner: LearnerConfig
    algorithm: AlgorithmConfig
    mode: Mode
    seed: int
    temperature: float
    total_updates: int
    dump_folder: str | None = None
    from_scratch: ModelFromScratchConfig | None = None
    master_dtype: torch.dtype = torch.float32
    score_head: ScoreHead | None = None
    device: Device = "auto"
    scores_ahead: bool = True
    teacher: ModelConfig | None = None


class Learner:
    """One FSDP rank: the policy, its optimizer, and if needed frozen models: the reference and a teacher.

    A `WorkerGroup` runs the methods marked with `@dispatch`.

    Raises:
        ConfigError: the model, the device or the attention is not available.
        LearnerError: the other ranks did not join in time.
    """

    def __init__(self, spec: LearnerSpec, *, rank: int, address: str, port: int) -> None:
        # Takes a second to load; the controller needs only the names of this module.
        from agentrl.learner.checkpoint import Saver

        self._spec = spec
        self.place = join_ranks(spec.learner, rank=rank, address=address, port=port, on=spec.device)
        self._policy = self._build(spec.model, has_backward=True)
        self._reference = self._build_reference() if spec.algorithm.kl.coefficient > 0 else None
        self._teacher = None if spec.teacher is None else self._build_frozen(spec.teacher)
        self._saver = Saver(spec.model, timeout_s=spec.learner.save_timeout_s)
        self._stepper = Stepper(
            self._policy,
            self.place,
            spec.learner.optimizer,
            total_updates=spec.total_updates,
            dump_folder=spec.dump_folder,
            before_change=self._saver.wait,
            is_offloaded=spec.learner.offload == "optimizer",
        )
        peak = peak_of(self.place.device, self._policy.published_dtype)
        self._meter = Meter(self.place, peak_flops_per_s=peak)
        is_policy = spec.score_head is None
        self._work = WorkCounter.of(self._policy.module, spec.model, head_width=None if is_policy else 1)
        teacher = None if self._teacher is None else self._teacher.module
        self._teacher_work = None if teacher is None else WorkCounter.of(teacher, ModelConfig())
        self._forecast = MemoryForecast(
            size_of(self._policy.module),
            spec.model,
            spec.learner,
            is_gpu=self.place.device.type == "cuda",
            has_reference=self._reference is not None,
            has_logits=is_policy,
            teacher=None if teacher is None else size_of(teacher),
        )
        self._corrector = Corrector(spec.algorithm, spec.mode)
        self._objective = PolicyObjective(spec.algorithm, spec.mode, temperature=spec.temperature)
        self._scores_ahead = spec.scores_ahead or has_dropout(self._policy.module)
        self._supervised: Objective = (
            SupervisedObjective() if spec.score_head is None else PreferenceObjective()
        )
        self._weights_group: ProcessGroup | None = None
        self._sources: tuple[int, ...] = (0,)  # of published buckets
        self._written = WrittenWeights(self._policy, self.place, spec.model)
        torch.manual_seed(spec.seed + 1 + rank)  # different dropout on each rank

    # -------------------------------------------------------------------------------------------------- learn

    @dispatch("dp", join="remote")
    def score(self, planned: Sequence[Packed]) -> Sequence[ScoredMicrobatch]:
        """Load the microbatches of ONE update; add log-probabilities and corrections. A collective.

        The log-probabilities are the policy's (in mode decoupled, where they are the proximal ones, and where
        rejection needs them) and the reference's (with KL in the loss). Those of the policy are left to the
        update's own forward if the spec allows it and each sequence is in one microbatch.
        """
        microbatches = loaded(planned)
        split = SplitSequences.find(microbatches)
        # A weight of a whole sequence would need the forwards of all microbatches that have a part of it.
        needs_proximal = self._objective.needs_scores and (self._scores_ahead or not split.is_empty)
        reference = self._reference if self._spec.algorithm.kl.place == "loss" else None
        num_forwards = int(needs_proximal) + int(reference is not None)
        num_flops = needs_proximal * self._work.forward(microbatches)
        num_flops += (reference is not None) * self._work.forward(microbatches, with_adapter=False)
        with self._meter.phase(
            "score", num_tokens=num_forwards * count_tokens(microbatches), num_flops=num_flops
        ):
            proximal = [self._logprobs(self._policy, m) if needs_proximal else None for m in microbatches]
            ref = [self._logprobs(reference, m) if reference is not None else None for m in microbatches]
            corrections = self._corrector.correct(microbatches, proximal, split)
        return [
            ScoredMicrobatch(*columns)
            for columns in zip(microbatches, proximal, ref, corrections, strict=True)
        ]

    @dispatch("dp", join="sum")
    def store_proximal(
        self,
        planned: Sequence[PlannedMicrobatch],
        scored: Sequence[ScoredMicrobatch],
        folder: str,
        step: int,
        part: int,
    ) -> dict[str, float]:
        """Write the proximal log-probabilities of a minibatch into `folder`, for `agentrl view`.

        part: number of the minibatch in the step. Returns `unwritten_files`: a full disk must not end a run.
        """
        if self.place.rank % self._spec.learner.num_replicas:
            return {"unwritten_files": 0.0}  # another rank has the same
        proximal = [one.proximal_logprobs for one in scored]
        assert all(column is not None for column in proximal), "scored ahead in mode decoupled"
        runs = runs_of(planned, [column for column in proximal if column is not None])
        try:
            write_proximal(Path(folder), runs, step=step, part=part, rank=self.place.rank)
        except OSError as error:
            logging.getLogger(__name__).warning("proximal log-probabilities were not stored: %s", error)
            return {"unwritten_files": 1.0}
        return {"unwritten_files": 0.0}

    @dispatch("dp", join="concat")
    def reward_kl(self, planned: Sequence[PlannedMicrobatch], folder: str | None) -> Sequence[Assessed]:
        """Keep the estimate of KL(policy || reference) on each action token, in nats, in `folder`.

        folder: None: in memory. A collective.
        """
        estimate = REWARD_KL_ESTIMATORS[self._spec.algorithm.kl.estimator]
        return self._kl(planned, self.logprobs(planned), estimate, folder)

    @dispatch("dp", join="concat")
    def teacher_kl(self, planned: Sequence[PlannedMicrobatch], folder: str | None) -> Sequence[Assessed]:
        """Keep log policy - log teacher of each action token, in nats, in `folder` (see `reward_kl`).

        Raises:
            LearnerError: see `teacher_logprobs`.
        """
        return self._kl(planned, self.teacher_logprobs(planned), k1, folder)

    def _kl(
        self,
        planned: Sequence[PlannedMicrobatch],
        logprobs: Sequence[tuple[Floats, Floats]],
        estimate: KLEstimator,
        folder: str | None,
    ) -> list[Assessed]:
        if self.place.rank % self._spec.learner.num_replicas:
            return []  # another rank has the same
        found = [estimate(*(torch.tensor(own).double() for own in pair)).numpy() for pair in logprobs]
        return assessments(found, folder, summed_for=planned)

    @dispatch("dp", join="concat")
    def moments(self, shares: Sequence[Sequence[SampleRef]]) -> Sequence[Sequence[Moments]]:
        """Return the moments of each sample's advantages per token (see `SampleRef.moments`).

        Raises:
            DiskError: a column is missing.
        """
        return [[sample.moments() for sample in share] for share in shares]

    def logprobs(self, planned: Sequence[Packed]) -> Sequence[tuple[Floats, Floats]]:
        """Return per microbatch the log-probabilities of action tokens by policy and reference, each f[A].

        A collective.
        """
        microbatches = loaded(planned)
        assert self._reference is not None, "there is no reference without algorithm.kl.coefficient"
        num_flops = sum(self._work.forward(microbatches, with_adapter=own) for own in (True, False))
        with self._meter.phase("assess", num_tokens=2 * count_tokens(microbatches), num_flops=num_flops):
            return [
                (self._logprobs(self._policy, m), self._logprobs(self._reference, m)) for m in microbatches
            ]

    def teacher_logprobs(self, planned: Sequence[Packed]) -> Sequence[tuple[Floats, Floats]]:
        """Return per microbatch the log-probabilities of action tokens by policy and teacher, each f[A].

        Those of the policy are the proximal ones: in mode bypass the server's, which need no forward. Those
        of a teacher on servers are stored with the trajectories. A collective.

        Raises:
            LearnerError: they are not stored: an attempt was played without a teacher.
        """
        microbatches, teacher = loaded(planned), self._teacher
        is_scored, has_forward = self._spec.mode != "bypass", teacher is not None
        num_flops = is_scored * self._work.forward(microbatches)
        if self._teacher_work is not None:
            num_flops += self._teacher_work.forward(microbatches)
        num_tokens = (has_forward + is_scored) * count_tokens(microbatches)
        stored = [] if has_forward else stored_teacher_logprobs(planned)
        with self._meter.phase("assess", num_tokens=num_tokens, num_flops=num_flops):
            return [
                (
                    self._logprobs(self._policy, m) if is_scored else m.behavior_logprobs,
                    self._logprobs(teacher, m) if teacher is not None else stored[place],
                )
                for place, m in enumerate(microbatches)
            ]

    @dispatch("dp", join="concat")
    def own_logprobs(self, microbatches: Sequence[Microbatch]) -> Sequence[Floats]:
        """Return per microbatch the policy's log-probabilities of its action tokens, f[A]."""
        return [self._logprobs(self._policy, microbatch) for microbatch in microbatches]

    @dispatch("dp")
    def update(self, minibatch: Sequence[ScoredMicrobatch]) -> dict[str, float]:
        """Make one optimizer update over all microbatches of all ranks; return metrics, equal on every rank.

        Means per loss token of the whole update: `entropy`, `kl` (to the reference), `ppo_kl` (proximal -
        policy), `ratio_mean`, `clip_*` (shares), `mismatch_mean` (|policy - behavior|). `mismatch_max` and
        `ratio_max` are maxima. `correction/*`: see `correction_metrics`. `correction/rejected/*` are shares
        of all action tokens, by stage and for `all` stages together. `num_tokens` and `num_sequences` count
        what was learned from. `is_skipped` is 1 if no weight changed: there was nothing to learn, or the loss
        or gradient was not finite (counted by `non_finite_updates`). Metrics that are not finite are left
        out.
        """
        self._policy.module.train()
        counts = count_update(minibatch)
        microbatches = [scored.microbatch for scored in minibatch]
        with self._meter.phase(
            "update",
            num_tokens=count_tokens(microbatches),
            num_flops=self._work.update(minibatch),
            predicted_bytes=self._forecast.peak_bytes(microbatches),
        ):
            rest = self._objective.score_rest(self._policy, minibatch)
            return self._stepper.run(
                minibatch,
                lambda index: self._objective.part(self._policy, minibatch[index], counts, rest[index]),
                counts,
            )

    @dispatch("dp")
    def supervised_update(self, microbatches: Sequence[Microbatch]) -> dict[str, float]:
        """Make one optimizer update by cross-entropy or, with a score head, by the Bradley-Terry loss.

        With cross-entropy, `loss` and `entropy` are means over the loss tokens of the update. With
        Bradley-Terry, `loss`, `accuracy`, `margin` and the scores are means over its pairs.
        """
        self._policy.module.train()
        counts = count_update(microbatches)
        objective = self._supervised
        with self._meter.phase(
            "update",
            num_tokens=count_tokens(microbatches),
            num_flops=self._work.update(microbatches),
            predicted_bytes=self._forecast.peak_bytes(microbatches),
        ):
            return self._stepper.run(
                microbatches, lambda index: objective.part(self._policy, microbatches[index], counts), counts
            )

    @dispatch("dp")
    def measure(self, microbatches: Sequence[Microbatch]) -> dict[str, float]:
        """Return the metrics of `supervised_update` for these microbatches, without learning from them."""
        return measure(self._policy, self._supervised, microbatches)

    @dispatch("all")
    def usage(self) -> dict[str, float]:
        """Return time, tokens and memory by phase since the last call (see `Meter.finish`). A collective."""
        return self._meter.finish()

    @dispatch("all")
    def give_back_memory(self) -> None:
        """Free memory of the GPU that nothing uses, for servers on the same GPU."""
        give_back_memory(self.place)

    @dispatch("all")
    def start_trace(self) -> None:
        """Start recording this rank with torch's profiler."""
        self._meter.start_trace()

    @dispatch("all")
    def write_trace(self, folder: str) -> None:
        """Stop recording and write the trace into `folder`, one file per rank."""
        self._meter.write_trace(Path(folder))

    @dispatch("rank0")
    def parity_tokens(self) -> float:
        """Return the `parity_tokens` of `pack` for the policy's sizes (see `attention_parity`)."""
        return attention_parity(self._policy.module)

    @dispatch("rank0")
    def shared_prefix(self) -> SharedPrefix:
        """Return `learner.shared_prefix`, or False for auto if rows cannot share tokens, or if a loss would
        change: with dropout, a loss that balances experts, or pairs.
        """
        spec, models = self._spec, [self._policy, self._reference, self._teacher]
        learner = spec.learner
        if learner.shared_prefix != "auto":
            return learner.shared_prefix
        can_share = (
            all(model is None or can_share_prefixes(model) for model in models)
            and learner.balance_coefficient == 0
            and spec.score_head is None
            and not has_dropout(self._policy.module)
        )
        return "auto" if can_share else False

    @dispatch("dp")
    def compare(
        self,
        planned: Sequence[Packed],
        reference: Sequence[Packed],
        variants: Mapping[str, AlgorithmConfig],
    ) -> dict[str, Counterfactual]:
        """Return what each of `variants` would do in an update of `microbatches` (see `counterfactual`).

        No weight changes.
        """
        microbatches = loaded(planned)
        proximal = [self._logprobs(self._policy, m) for m in microbatches]
        return compare(
            self._policy,
            self.place,
            microbatches,
            proximal,
            loaded(reference),
            variants,
            temperature=self._spec.temperature,
        )

    # ------------------------------------------------------------------------------------------------ weights

    @dispatch("rank0")
    def collective_backend(self) -> str:
        """Return the backend for collectives of this rank's weights: `gloo` on a CPU, `nccl` on a GPU."""
        return "gloo" if self.place.device.type == "cpu" else "nccl"

    @dispatch("rank0")
    def tensor_specs(self) -> list[TensorSpec]:
        """Return the published weights by their Hugging Face names; tied weights appear once."""
        return weights.tensor_specs(self._policy)

    @dispatch("all")
    def checksums(self, dtype: str | None = None, is_fused: bool = False) -> dict[str, str]:
        """Return {name: sha256 of the bytes} of the published weights, cast to `dtype` if one is given.

        is_fused: hash them in SGLang's layout, with fused layers under one name.
        """
        return weights.checksums(self._policy, dtype=dtype, is_fused=is_fused)

    @dispatch("all")
    def export(self, folder: str) -> None:
        """Write the policy as a folder that transformers and SGLang load; rank 0 writes."""
        weights.export(self._policy, self.place, self._spec.model, Path(folder))

    @dispatch("all")
    def write_base(self, folder: str, is_again: bool) -> None:
        """Export the policy and keep a copy, so that `write_changes` can find what later updates change.

        is_again: write the weights of the last `write_changes` again, as a whole model.
        """
        self._written.write_whole(Path(folder), is_again=is_again)

    @dispatch("all")
    def write_changes(self, folder: str) -> int:
        """Write the elements that changed since the last weights written; return the bytes of the file."""
        return self._written.write_changes(Path(folder))

    @dispatch("rank0")
    def write_changed_tensors(self, folder: str) -> int:
        """Write the tensors whole that `write_changes` found changed; return the bytes of the file."""
        return self._written.write_changed_tensors(Path(folder))

    @dispatch("rank0")
    def adapter_specs(self) -> list[TensorSpec]:
        """Return the tensors of the LoRA adapter by their names in peft's files, and those of the adapters of
        roles; empty without an adapter.
        """
        return weights.adapter_specs(self._policy)

    @dispatch("rank0")
    def adapter_names(self) -> tuple[str, ...]:
        """Return the names of all LoRA adapters on servers: the policy's, then those of roles."""
        return (POLICY_ADAPTER, *self._policy.role_adapters)

    @dispatch("all")
    def adapter_checksums(self) -> dict[str, str]:
        """Return {name: sha256 of the bytes} of the published adapters, by the servers' names of tensors."""
        return weights.adapter_checksums(self._policy)

    @dispatch("all")
    def export_adapter(self, folder: str) -> None:
        """Write only the LoRA adapter, as a folder that peft and SGLang load, and those of roles in folders
        within; rank 0 writes.
        """
        weights.export_adapter(self._policy, self.place, self._spec.model, Path(folder))

    @dispatch("all")
    def join_weights_groups(
        self, address: str, port: int, world_size: int, names: Sequence[str], backend: str, timeout_s: float
    ) -> None:
        """Open a process group to the servers for each of `names`, with a source of buckets as its rank 0.

        Blocks until all members have joined, at most `timeout_s`. All groups meet at rank 0's address.
        """
        self.leave_weights_group()
        # A source gathers from the ranks with its own copy of the model: with HSDP, all sources have one.
        num_ranks = self._spec.learner.fsdp.shard_size or self.place.world_size
        self._sources = choose_sources(len(names), num_ranks)
        if self.place.rank in self._sources:
            self._weights_group = join_weights_group(
                address=address,
                port=port,
                rank=0,
                world_size=world_size,
                name=names[self._sources.index(self.place.rank)],
                backend=backend,
                timeout_s=timeout_s,
                is_guest=not self.place.is_first,
            )

    @dispatch("all")
    def send_buckets(self, bucket_bytes: int) -> SendTimes:
        """Send all published weights to the servers in the buckets of `plan_buckets`, one broadcast each.

        Sources take turns (see `BucketSender`). Returns how long rank 0 gathered, and waited for broadcasts.

        Raises:
            InfrastructureError: a bucket did not arrive.
        """
        assert self.place.rank not in self._sources or self._weights_group is not None, (
            "send_buckets before join_weights_groups"
        )
        # Every rank plans by itself, so the controller sends no names, however many weights there are.
        plan = plan_buckets(weights.tensor_specs(self._policy), max_bytes=bucket_bytes)
        gatherer = BucketGatherer(self._policy, rank=self.place.rank)
        sender = BucketSender(gatherer, self._weights_group, sources=self._sources)
        return sender.send([[s.name for s in bucket] for bucket in plan])

    @dispatch("all")
    def pickle_bucket(self, names: Sequence[str]) -> str:
        """Return the named weights pickled, in base64, for local servers (see `agentrl.weights.tensor`)."""
        return weights.pickle_bucket(self._policy, self.place, names)

    @dispatch("all")
    def leave_weights_group(self) -> None:
        """Close the process groups to the servers, if they are open."""
        if self._weights_group is not None:
            group, self._weights_group = self._weights_group, None
            leave_weights_group(group)

    # -------------------------------------------------------------------------------------------- checkpoints

    @dispatch("all")
    def start_save(self, folder: str) -> None:
        """Start writing model, optimizer, schedule and random state, as they are now, into `folder`.

        Only one save may run at a time.
        """
        self._saver.start(self._policy, self._stepper, self.place, Path(folder))

    @dispatch("all", join="concat", thread=SAVING)
    def finish_save(self) -> Sequence[StoredFile]:
        """Wait until the save begun by `start_save` is written; return the files that the ranks wrote.

        May run in a thread of its own.
        """
        return self._saver.finish()

    @dispatch("all", join="concat")
    def save(self, folder: str) -> Sequence[StoredFile]:
        """Write model, optimizer, schedule and random state into `folder`; return the files."""
        self.start_save(folder)
        return self.finish_save()

    @dispatch("all", join="concat")
    def find_damage(self, checkpoint: str, below: str, how: Verify, part: int, num_parts: int) -> list[str]:
        """Return a line for each damage in a part of the files of a checkpoint; the ranks share the part.

        Args:
            checkpoint: folder with the manifest.
            below: beginning of the paths of the files to read.
        """
        folder = Path(checkpoint)
        reading = Verification(folder, read_manifest(folder), how, below)
        own, world_size = part * self.place.world_size + self.place.rank, self.place.world_size
        return reading.damage(own, num_parts * world_size)

    @dispatch("all")
    def load(self, folder: str) -> None:
        """Read what `save` wrote; the world size may differ."""
        from agentrl.learner import checkpoint

        checkpoint.load(self._policy, self._stepper, self.place, Path(folder))

    def close(self) -> None:
        """Leave all process groups."""
        self.leave_weights_group()
        leave_ranks()

    # ------------------------------------------------------------------------------------------------ private

    def _build(self, model: ModelConfig, *, has_backward: bool) -> Policy:
        spec = self._spec
        # The same seed everywhere: a new model must be equal on all ranks, and equal as policy and as
        # reference.
        torch.manual_seed(spec.seed)
        return build_policy(
            model,
            spec.learner,
            self.place,
            from_scratch=None if model is spec.teacher else spec.from_scratch,
            has_backward=has_backward,
            master_dtype=spec.master_dtype,
            score_head=spec.score_head,
        )

    def _build_reference(self) -> Policy:
        if self._policy.adapters:
            # With LoRA the frozen base is the reference: no second copy of the weights.
            return self._policy.without_adapters()
        return self._build_frozen(self._spec.model)

    def _build_frozen(self, model: ModelConfig) -> Policy:
        frozen = self._build(model, has_backward=False)
        frozen.module.requires_grad_(False)
        return frozen

    @torch.no_grad()
    def _logprobs(self, policy: Policy, microbatch: Microbatch) -> Floats:
        policy.module.eval()
        logprobs = policy.score_actions(microbatch, temperature=self._spec.temperature)
        policy.reshard()
        return np.asarray(logprobs.cpu().numpy())
