"""The critic of one rank, without Ray: a model with a scalar head that estimates the future reward.

The value before an action token is read at the position that predicts it: the model has seen everything
before the token there, but not the token. All ranks call the same methods in the same order, each with its
own microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from agentrl.algorithms.aggregation import Aggregation, UpdateCounts, token_scales
from agentrl.algorithms.values import explained_variance, value_loss, value_moments
from agentrl.config.learner import LearnerConfig
from agentrl.config.model import ModelConfig, ModelFromScratchConfig
from agentrl.data.checkpoint_files import StoredFile
from agentrl.learner import weights
from agentrl.learner.architecture import find_own_head
from agentrl.learner.attention import attention_parity
from agentrl.learner.batch import Microbatch, count_tokens
from agentrl.learner.device_peaks import peak_of
from agentrl.learner.dispatch import dispatch
from agentrl.learner.loss_part import LossPart, LossTokens
from agentrl.learner.meter import Meter
from agentrl.learner.model import Policy, build_policy
from agentrl.learner.ranks import SAVING, Device, RankPlace, give_back_memory, join_ranks
from agentrl.learner.reward_model import scores_at
from agentrl.learner.sample_refs import Assessed, Packed, assessments, loaded
from agentrl.learner.score_head import SCORE_HEAD, ScoreHead
from agentrl.learner.split_sequences import whole_loss_ids
from agentrl.learner.step import Stepper, count_update
from agentrl.learner.work import WorkCounter

PREFIX = "critic/"
"""Prefix of the critic's metrics, which are reported together with the policy's."""


@dataclass(frozen=True, slots=True)
class CriticSpec:
    """Settings that are the same on every rank.

    learner: sharding and stepping of the critic, with the critic's own optimizer.
    aggregation: that of the policy loss.
    cliprange: see `value_loss`.
    total_updates: length of the learning rate schedule, in updates.
    dump_folder: where to write a batch with a non-finite loss; None: not written.
    from_scratch: sizes of a new model that replaces model.path; None: load model.path.
    master_dtype: float64 is for numerical comparisons.
    device: where the ranks compute; auto: a GPU if there is one.
    """

    model: ModelConfig
    learner: LearnerConfig
    aggregation: Aggregation
    cliprange: float | None
    seed: int
    total_updates: int
    dump_folder: str | None = None
    from_scratch: ModelFromScratchConfig | None = None
    master_dtype: torch.dtype = torch.float32
    device: Device = "auto"


class ValueObjective:
    """The value loss of the loss tokens, with the aggregation of the policy loss."""

    def __init__(self, aggregation: Aggregation, *, cliprange: float | None) -> None:
        self._aggregation = aggregation
        self._cliprange = cliprange

    def part(self, critic: Policy, microbatch: Microbatch, counts: UpdateCounts) -> LossPart:
        """Run the forward and return the microbatch's part of the loss of the update that `counts`
        describes.
        """
        assert microbatch.values is not None, "the samples were credited without values"
        assert microbatch.returns is not None, "the samples were credited without returns"
        tokens = LossTokens.of(microbatch, critic.device)
        values = scores_at(critic, microbatch, microbatch.predictor_positions[microbatch.loss_mask])
        returns = tokens.select(microbatch.returns, values)
        found = value_loss(
            values, tokens.select(microbatch.values, values), returns, cliprange=self._cliprange
        )
        scales = token_scales(
            self._aggregation, whole_loss_ids(microbatch).to(values.device), counts, dtype=values.dtype
        )[: len(values)]
        loss = (scales * found.losses_A).sum()
        sums = {
            "loss": loss,
            "clip": found.is_clipped_A.sum(),
            "value_mean": values.sum(),
            **value_moments(values, returns),
        }
        return LossPart(loss, sums, {})


class Critic:
    """One FSDP rank of the critic and its optimizer.

    Raises:
        ConfigError: the model, its head or the attention is not available.
    """

    def __init__(self, spec: CriticSpec, place: RankPlace) -> None:
        # Takes a second to load; the controller needs only the names of this module.
        from agentrl.learner.checkpoint import Saver

        self._place = place
        self._num_replicas = spec.learner.num_replicas
        # Leaves the random state of the policy's dropout in the same process unchanged.
        with torch.random.fork_rng():
            torch.manual_seed(spec.seed)  # a new head must be equal on all ranks
            self._model = _build(spec, place)
        self._saver = Saver(spec.model, timeout_s=spec.learner.save_timeout_s)
        self._stepper = Stepper(
            self._model,
            place,
            spec.learner.optimizer,
            total_updates=spec.total_updates,
            dump_folder=spec.dump_folder,
            before_change=self._saver.wait,
            is_offloaded=spec.learner.offload == "optimizer",
        )
        self._objective = ValueObjective(spec.aggregation, cliprange=spec.cliprange)
        peak = peak_of(place.device, self._model.published_dtype)
        self._meter = Meter(place, peak_flops_per_s=peak)
        self._work = WorkCounter.of(self._model.module, spec.model, head_width=1)

    @dispatch("dp", join="concat")
    def values(self, planned: Sequence[Packed], folder: str | None) -> Sequence[Assessed]:
        """Keep the value before each action token of the microbatches, f32[A], in `folder`. A collective.

        folder: None: in memory.
        """
        microbatches = loaded(planned)
        self._model.module.eval()
        num_flops = self._work.forward(microbatches)
        phase = self._meter.phase("values", num_tokens=count_tokens(microbatches), num_flops=num_flops)
        with phase, torch.no_grad():
            found = [scores_at(self._model, m, m.predictor_positions).cpu().numpy() for m in microbatches]
            self._model.reshard()
        # Of ranks with the same microbatches, only the first one's answer is read.
        is_read = self._place.rank % self._num_replicas == 0
        return assessments(found, folder) if is_read else []

    @dispatch("dp")
    def update(self, planned: Sequence[Packed]) -> dict[str, float]:
        """Make one optimizer update over all microbatches of all ranks; return metrics, equal on every rank.

        All names begin with `critic/`. Over the loss tokens of the whole update: `loss`, `clip` (share of
        tokens whose loss is clipped), `value_mean`, `return_mean`, and `explained_variance` of the returns by
        the values before the update. `lr`, `grad_norm`, `is_skipped` and `non_finite_updates` are as for the
        policy.
        """
        microbatches = loaded(planned)
        self._model.module.train()
        counts = count_update(microbatches)
        num_flops = self._work.update(microbatches)
        with self._meter.phase("update", num_tokens=count_tokens(microbatches), num_flops=num_flops):
            metrics = self._stepper.run(
                microbatches, lambda i: self._objective.part(self._model, microbatches[i], counts), counts
            )
        return {PREFIX + name: value for name, value in _with_explained_variance(metrics).items()}

    @dispatch("rank0")
    def parity_tokens(self) -> float:
        """Return the `parity_tokens` of `pack` for the critic's sizes (see `attention_parity`)."""
        return attention_parity(self._model.module)

    @dispatch("all")
    def usage(self) -> dict[str, float]:
        """Return time, tokens and memory by phase since the last call (see `Meter.finish`). A collective.

        All names begin with `critic/`.
        """
        return {PREFIX + name: value for name, value in self._meter.finish().items()}

    @dispatch("all")
    def give_back_memory(self) -> None:
        """Free memory of the GPU that nothing uses, for servers on the same GPU."""
        give_back_memory(self._place)

    @dispatch("all")
    def checksums(self) -> dict[str, str]:
        """Return {name: sha256 of the bytes} of the weights."""
        return weights.checksums(self._model)

    # -------------------------------------------------------------------------------------------- checkpoints

    @dispatch("all")
    def start_save(self, folder: str) -> None:
        """Start writing model, optimizer, schedule and random state, as they are now, into `folder`.

        Only one save may run at a time.
        """
        self._saver.start(self._model, self._stepper, self._place, Path(folder))

    @dispatch("all", join="concat", thread=SAVING)
    def finish_save(self) -> Sequence[StoredFile]:
        """Wait until the save begun by `start_save` is written; return the files that the ranks wrote.

        May run in a thread of its own.
        """
        return self._saver.finish()

    @dispatch("all")
    def load(self, folder: str) -> None:
        """Read what was saved; the world size may differ."""
        from agentrl.learner import checkpoint

        checkpoint.load(self._model, self._stepper, self._place, Path(folder))


class CriticWorker(Critic):
    """A rank in its own process.

    The ranks join at address:port, in a process group separate from the policy's.
    """

    def __init__(self, spec: CriticSpec, *, rank: int, address: str, port: int) -> None:
        super().__init__(
            spec, join_ranks(spec.learner, rank=rank, address=address, port=port, on=spec.device)
        )


def _build(spec: CriticSpec, place: RankPlace) -> Policy:
    model = build_policy(
        spec.model,
        spec.learner,
        place,
        from_scratch=spec.from_scratch,
        has_backward=True,
        master_dtype=spec.master_dtype,
        score_head=ScoreHead(None),
    )
    if find_own_head(spec.model) is None:
        # Random values would add noise to every advantage until they are unlearned. 0 is the uninformed
        # estimate.
        with torch.no_grad():
            for weight in getattr(model.module, SCORE_HEAD).parameters():
                weight.zero_()
    return model


def _with_explained_variance(metrics: dict[str, float]) -> dict[str, float]:
    moments = {
        name: metrics.pop(name) for name in ("error_mean", "error_square", "return_square") if name in metrics
    }
    if len(moments) == 3 and "return_mean" in metrics:
        share = explained_variance(return_mean=metrics["return_mean"], **moments)
        metrics |= {"explained_variance": share} if share == share else {}  # NaN where all returns are equal
    return metrics
