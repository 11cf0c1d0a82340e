"""The training loop of SFT and reward models, which differ only in their data and the model's head.

```
<output>_run/
  config.yaml   the resolved config      metrics.jsonl   one record per update and validation
  checkpoints/  step_000100/ ...         non_finite/     batches whose loss was not finite
```
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agentrl.chat.tiny import write_tiny_tokenizer
from agentrl.cluster.cluster import ray_session
from agentrl.cluster.seats import check_nsight, recorded, reserve_seats
from agentrl.cluster.user_files import rank_files
from agentrl.cluster.workers import Workers
from agentrl.config.compose import dump_config
from agentrl.config.model import ModelConfig
from agentrl.config.schema import Config
from agentrl.config.trainer import TrainerConfig
from agentrl.controller.checkpoint import Checkpoint, find_checkpoint, put_aside, save_checkpoint
from agentrl.controller.learner import pack_for, start_learner
from agentrl.controller.verification import verify_by_ranks
from agentrl.data.atomic_files import write_atomically
from agentrl.data.checkpoint_files import StoredFile
from agentrl.data.input_files import check_prepared
from agentrl.data.model_source import resolve_model
from agentrl.errors import ConfigError
from agentrl.extras.supervised.config import RMConfig, SFTConfig, SFTTrainerConfig
from agentrl.extras.supervised.console import JobConsole
from agentrl.extras.supervised.data import Examples
from agentrl.interrupts import interruptible
from agentrl.learner.architecture import check_dtype, check_kind
from agentrl.learner.batch import Microbatch, Sample
from agentrl.learner.layout import check_folder
from agentrl.learner.learner import Learner, LearnerSpec
from agentrl.learner.packing import budget_metrics
from agentrl.learner.score_head import ScoreHead
from agentrl.tracking.tracker import Trackers, open_trackers

AnyConfig = SFTConfig | RMConfig

SHOWN = (
    "loss",
    "perplexity",
    "accuracy",
    "margin",
    "entropy",
    "grad_norm",
    "lr",
    "chosen_score",
    "rejected_score",
    "num_tokens",
    "microbatches_over_budget",
    "microbatch_tokens_max",
    "shared_tokens",
    "non_finite_updates",
)
"""Metrics of an update, in the order in which they are recorded. A console shows the first few."""


@dataclass(frozen=True, slots=True)
class SupervisedJob:
    """A supervised training job.

    name: `sft` or `rm`, the namespace of its metrics. noun: for messages, `conversation` or `pair`.
    score_head: of a reward model; None for SFT.
    """

    name: str
    noun: str
    config: AnyConfig
    model: ModelConfig
    train: Examples
    validation: Examples | None
    score_head: ScoreHead | None = None

    @property
    def run_dir(self) -> Path:
        return run_folder(self.config.trainer)


def run_folder(trainer: SFTTrainerConfig) -> Path:
    """Return the folder of checkpoints and logs."""
    output = Path(trainer.output)
    return Path(trainer.run_dir) if trainer.run_dir else output.with_name(f"{output.name}_run")


@dataclass(frozen=True, slots=True)
class Order:
    """The samples of each update: a sequence of random permutations, cut into batches.

    Deterministic in its fields, so a resumed run sees the same batches. A batch may span two permutations.
    """

    num_samples: int
    batch_size: int
    num_updates: int
    seed: int
    total_samples: int

    @classmethod
    def of(cls, num_samples: int, trainer: SFTTrainerConfig) -> Order:
        if trainer.steps is not None:
            return cls(
                num_samples,
                trainer.batch_size,
                trainer.steps,
                trainer.seed,
                trainer.steps * trainer.batch_size,
            )
        total = num_samples * trainer.total_epochs
        return cls(
            num_samples, trainer.batch_size, math.ceil(total / trainer.batch_size), trainer.seed, total
        )

    def batches(self, *, made_updates: int = 0) -> Iterator[NDArray[np.int64]]:
        """Yield the sample indices of each update after the first `made_updates`, i64[batch_size].

        The last batch may be smaller.
        """
        return itertools.islice(self._batches(), made_updates, None)

    def _batches(self) -> Iterator[NDArray[np.int64]]:
        rng = np.random.default_rng(self.seed)
        queue = np.empty(0, np.int64)
        for update in range(self.num_updates):
            size = min(self.batch_size, self.total_samples - update * self.batch_size)
            while len(queue) < size:  # a batch may need the rest of one permutation and the begin of the next
                queue = np.concatenate([queue, rng.permutation(self.num_samples)])
            yield queue[:size]
            queue = queue[size:]


@dataclass(frozen=True, slots=True)
class SupervisedProgress:
    """The state of a checkpoint besides the learner's.

    data: digest of samples, batch size and seed; a resume must have the same.
    """

    data: str
    best_step: int | None = None
    best_loss: float = math.inf

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def resumed(cls, checkpoint: Checkpoint, data: str) -> SupervisedProgress:
        """Read the progress from a checkpoint.

        Raises:
            ConfigError: the checkpoint was made with other data, batch size or seed.
        """
        progress = cls(**json.loads(checkpoint.buffer_state()))
        if progress.data != data:
            raise ConfigError(
                f"checkpoint {checkpoint.folder} was written with other training rows, batch size "
                "or seed and cannot be resumed; set trainer.resume_mode=disable to start over, "
                "or choose another trainer.run_dir"
            )
        return progress


def run_job(job: SupervisedJob) -> Path:
    """Train and return the folder of the model.

    Running the same job again resumes from its newest checkpoint.

    Raises:
        UserError: the model or a checkpoint does not match the config.
        InfrastructureError: a rank was lost, or the disk is full.
    """
    trainer = job.config.trainer
    check_nsight(job.config.profiler.nsight)
    order = Order.of(len(job.train.samples), trainer)
    data = _digest(job.train.samples, trainer)
    checkpoint, progress = _open_run(job, data)
    start = checkpoint.step if checkpoint is not None else 0
    with (
        interruptible(),
        ray_session(job.config.cluster, rank_files({"model": job.config.model})),
        _open_trackers(job, order, checkpoint) as trackers,
    ):
        trackers.console.say(
            job.train.summary(job.noun)
            + (f", from checkpoint {checkpoint.folder}" if checkpoint is not None else "")
        )
        if job.validation is not None:
            trackers.console.say(f"held out: {job.validation.summary(job.noun)}")
        with _open_learner(job, order) as learner:
            if checkpoint is not None:
                verify_by_ranks(
                    checkpoint,
                    learner,
                    trainer.verify,
                    say=trackers.console.say,
                    parent=job.run_dir / "checkpoints",
                )
                learner.run(Learner.load, str(checkpoint.learner))
            elif trainer.untrained_output:
                learner.run(Learner.export, trainer.untrained_output)
            if (aside := put_aside(job.run_dir / "checkpoints", checkpoint)) is not None:
                trackers.console.say(aside)
            # starts the clock of the ETA: loading is not counted
            trackers.console.set_total_steps(order.num_updates)
            Loop(job, order, learner, trackers, progress).run(start)
    return Path(trainer.output)


class Loop:
    """The update loop with its records, validations and checkpoints, and the export at the end."""

    def __init__(
        self,
        job: SupervisedJob,
        order: Order,
        learner: Workers[Learner],
        trackers: Trackers,
        progress: SupervisedProgress,
    ) -> None:
        self._job, self._order, self._learner, self._trackers = job, order, learner, trackers
        self._trainer = job.config.trainer
        self._progress = progress
        self._held_out = self._pack(job.validation.samples) if job.validation is not None else None

    def run(self, start: int) -> None:
        """Make all updates after the first `start`, and leave the model in `trainer.output`."""
        for step, indices in enumerate(self._order.batches(made_updates=start), start=start + 1):
            samples = [self._job.train.samples[index] for index in indices]
            microbatches = self._pack(samples)
            budget = budget_metrics(
                microbatches,
                num_tokens=sum(sample.num_tokens for sample in samples),
                max_tokens=self._job.config.learner.microbatch_tokens,
            )
            self._record_update(step, self._learner.run(Learner.supervised_update, microbatches) | budget)
            if self._is_due(step, self._trainer.test_freq, at_end=True):
                self._validate(step)
            if self._is_due(step, self._trainer.save_freq, at_end=self._trainer.save_freq > 0):
                self._save(step)
        # With export=best the model is already there, unless someone removed it and this resume had nothing
        # to do.
        if self._trainer.export == "last" or not (Path(self._trainer.output) / "config.json").is_file():
            self._learner.run(Learner.export, self._trainer.output)

    def _pack(self, samples: Sequence[Sample]) -> list[Microbatch]:
        is_of_pairs = self._job.score_head is not None  # a pair is compared within one forward
        return pack_for(self._learner, samples, self._job.config.learner, may_split=not is_of_pairs)

    def _is_due(self, step: int, every: int, *, at_end: bool) -> bool:
        return (every > 0 and step % every == 0) or (at_end and step == self._order.num_updates)

    def _record_update(self, step: int, metrics: Mapping[str, float]) -> None:
        values = {f"{self._job.name}/{name}": metrics[name] for name in SHOWN if name in metrics}
        num_seen = min(step * self._order.batch_size, self._order.total_samples)
        values[f"{self._job.name}/epoch"] = num_seen / self._order.num_samples
        self._trackers.write("train", step=step, version=step, values=values)
        if metrics["is_skipped"]:
            self._trackers.console.say(
                f"update {step} was skipped: its loss or gradient is not finite; the batch is saved in "
                "non_finite/"
            )

    def _validate(self, step: int) -> None:
        if self._held_out is None:
            return
        metrics: Mapping[str, float] = self._learner.run(Learner.measure, self._held_out)
        if self._job.score_head is None:
            metrics = {**metrics, "perplexity": math.exp(min(metrics["loss"], 700.0))}  # exp(710) overflows
        values = {f"val/{name}": metrics[name] for name in SHOWN if name in metrics}
        self._trackers.write("validation", step=step, version=step, values=values)
        if metrics["loss"] < self._progress.best_loss:
            self._progress = SupervisedProgress(self._progress.data, step, metrics["loss"])
            if self._trainer.export == "best":
                self._learner.run(Learner.export, self._trainer.output)

    def _save(self, step: int) -> None:
        save_checkpoint(
            self._job.run_dir / "checkpoints",
            step=step,
            version=step,
            save_learner=self._save_learner,
            buffer_state=self._progress.to_bytes(),
            keep_last=self._trainer.keep_last,
        )

    def _save_learner(self, folder: str) -> Sequence[StoredFile]:
        self._learner.run(Learner.start_save, folder)
        return self._learner.run(Learner.finish_save)


def model_with_tokenizer(config: AnyConfig) -> ModelConfig:
    """Return the model config with a tokenizer; a model from scratch gets our byte-level tokenizer.

    Raises:
        ConfigError: there is no model at `model.path`, or it cannot be trained, in this dtype or at all.
    """
    check_prepared(config)
    check_dtype(config.model)
    if config.from_scratch.architecture == "none":
        model = resolve_model(config.model)
        check_kind(model)
        check_folder(model, config.learner)
        return model
    if config.model.tokenizer_path:
        return config.model
    folder = Path(config.trainer.output)
    write_tiny_tokenizer(folder)
    return config.model.model_copy(update={"tokenizer_path": str(folder)})


# --------------------------------------------------------------------------------------------------- starting


def _open_run(job: SupervisedJob, data: str) -> tuple[Checkpoint | None, SupervisedProgress]:
    folder = job.run_dir / "checkpoints"
    checkpoint = find_checkpoint(folder, TrainerConfig(resume_mode=job.config.trainer.resume_mode))
    progress = (
        SupervisedProgress.resumed(checkpoint, data) if checkpoint is not None else SupervisedProgress(data)
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"trainer.run_dir {str(job.run_dir)!r} cannot be written: {error.strerror}"
        ) from error
    write_atomically(job.run_dir / "config.yaml", dump_config(job.config))
    return checkpoint, progress


def _open_trackers(job: SupervisedJob, order: Order, checkpoint: Checkpoint | None) -> Trackers:
    trainer = job.config.trainer
    restored_step = checkpoint.step if checkpoint is not None else None
    console = (
        JobConsole(job.name, total=order.num_updates, restored_step=restored_step or 0)
        if "console" in trainer.logger
        else None
    )
    return open_trackers(
        trainer.logger,
        wandb_mode=trainer.wandb_mode,
        mlflow_uri=trainer.mlflow_uri,
        run_dir=job.run_dir,
        project="agentrl",
        experiment=Path(trainer.output).name,
        resolved_config=job.config.model_dump(mode="json"),
        restored_step=restored_step,
        console=console,
    )


@contextmanager
def _open_learner(job: SupervisedJob, order: Order) -> Iterator[Workers[Learner]]:
    config = job.config
    spec = LearnerSpec(
        job.model,
        config.learner,
        Config().algorithm,
        "on_policy",
        seed=config.trainer.seed,
        temperature=1.0,
        total_updates=order.num_updates,
        dump_folder=str(job.run_dir / "non_finite"),
        from_scratch=config.from_scratch if config.from_scratch.architecture != "none" else None,
        score_head=job.score_head,
        device=config.placement.device_of("actor"),
    )
    with reserve_seats(config.placement, {"actor": config.learner.world_size}) as seats:
        seats = recorded(seats, config.profiler.nsight, job.run_dir / "nsight")
        learner = start_learner(spec, seats["actor"])
        try:
            yield learner
        finally:
            learner.stop()


def _digest(samples: Sequence[Sample], trainer: SFTTrainerConfig) -> str:
    digest = hashlib.sha256(f"{trainer.batch_size} {trainer.seed}".encode())
    for sample in samples:
        digest.update(np.array([sample.num_tokens, *sample.segment_starts]).tobytes())
        digest.update(np.asarray(sample.token_ids, np.int32).tobytes() + sample.loss_mask.tobytes())
    return digest.hexdigest()
