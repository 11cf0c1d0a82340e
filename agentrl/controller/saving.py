"""Writes the checkpoints of a run, in the background if it may: the loop goes on as soon as the learner has made its copy."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from agentrl.config.trainer import TrainerConfig
from agentrl.controller.checkpoint import Checkpoint, begin, complete, prune, unwritten
from agentrl.controller.roles import Roles
from agentrl.errors import AgentRLError, ConfigError, InfrastructureError, LearnerError


class CheckpointWriter:
    """One checkpoint at a time; it gets its manifest and its name when everything is written, and only then others are removed.

    What fails in the background is raised by the next call of any method but `close`.
    """

    def __init__(self, parent: Path, trainer: TrainerConfig, *, newest: Checkpoint | None = None) -> None:
        """newest: what the run goes on from; None: the initial weights."""
        self._parent = parent
        self._trainer = trainer
        self._newest = newest
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[Checkpoint] | None = None

    def save(self, roles: Roles, *, step: int, version: int, buffer_state: bytes, metric: float | None) -> Checkpoint | None:
        """Begin the checkpoint of `step`, after the one before is complete; complete and return it at once without `save_in_background`.

        Args:
            metric: the value that `keep_best` goes by, None when this step was not validated.

        Raises:
            CheckpointError: this one or the one before could not be written; earlier ones are untouched.
        """
        self.finish()
        partial = begin(self._parent, step=step, buffer_state=buffer_state)
        with _removing(partial):
            roles.start_save(str(partial / "learner"))
        self._pending = self._executor.submit(self._complete, roles, partial, step, version, metric)
        return None if self._trainer.save_in_background else self.finish()

    def check(self) -> Checkpoint | None:
        """Return the checkpoint that was completed in the background since the last look, if any; raise what went wrong there."""
        return self.finish() if self._pending is not None and self._pending.done() else None

    def finish(self) -> Checkpoint | None:
        """Wait until nothing is being written; return the checkpoint that is complete with it, None where nothing was being written.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        return pending.result()

    def give_up(self) -> Checkpoint | None:
        """Return the newest checkpoint of this run's weights, None without one, once nothing is being written: the ranks were lost."""
        with suppress(AgentRLError):  # it ended with the ranks, or is the newest
            self.finish()
        return self._newest

    def close(self) -> None:
        """Wait until nothing is being written, whatever becomes of it: for a run that ends early."""
        self._executor.shutdown(wait=True)

    def _complete(self, roles: Roles, partial: Path, step: int, version: int, metric: float | None) -> Checkpoint:
        with _removing(partial):
            roles.finish_save()
        self._newest = checkpoint = complete(partial, step=step, version=version, metric=metric)
        prune(self._parent, self._trainer)
        return checkpoint


@contextmanager
def _removing(partial: Path) -> Iterator[None]:
    """Remove a checkpoint that is not whole when its writing fails within the block.

    Raises:
        CheckpointError: it could not be written.
        LearnerError: a rank was lost meanwhile.
    """
    try:
        yield
    except LearnerError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    except InfrastructureError as error:
        raise unwritten(partial, error) from error


def metric_of(validation: Mapping[str, float] | None, trainer: TrainerConfig) -> float | None:
    """Return the value of `trainer.best_metric`, None without a validation, or of one in which no attempt could be scored.

    Raises:
        ConfigError: the best are to be kept and the validation has no such metric.
    """
    if validation is None or ("val/failed" in validation and validation["val/failed"] == validation["val/trajectories"]):
        return None
    if trainer.keep_best > 0 and trainer.best_metric not in validation:
        raise ConfigError(
            f"trainer.best_metric={trainer.best_metric!r} is no metric of validation; there are: {', '.join(sorted(validation))}"
        )
    return validation.get(trainer.best_metric)
