"""`CheckpointWriter`: writes checkpoints in the background.

The loop continues once the learner has copied its state.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from agentrl.config.trainer import TrainerConfig
from agentrl.controller.checkpoint import Checkpoint, begin, complete, prune, unwritten
from agentrl.controller.roles import Roles
from agentrl.errors import AgentRLError, ConfigError, InfrastructureError, LearnerError


class CheckpointWriter:
    """Writes one checkpoint at a time. Older ones are pruned only after the new one is complete.

    An error in the background thread is raised by the next call of `save`, `check` or `finish`.
    """

    def __init__(
        self,
        parent: Path,
        trainer: TrainerConfig,
        *,
        newest: Checkpoint | None = None,
        wait_for_records: Callable[[], None] = lambda: None,
        pinned: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """newest: the newest complete checkpoint; at first the one that the run resumes from.

        None: the initial weights.
        wait_for_records: returns when the trajectories of all steps so far are written: a replay needs those
            up to the checkpoint. Called in the background.
        pinned: returns the names of checkpoints that are being read, and are not removed now.
        """
        self._wait_for_records = wait_for_records
        self._pinned = pinned
        self._parent = parent
        self._trainer = trainer
        self.newest = newest
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[Checkpoint] | None = None

    def save(
        self, roles: Roles, *, step: int, version: int, buffer_state: bytes, metric: float | None
    ) -> Checkpoint | None:
        """Wait for the previous checkpoint, then start writing that of `step`.

        Returns the completed checkpoint if `save_in_background` is false, else None.

        Args:
            metric: the value that `keep_best` compares; None if this step was not validated.

        Raises:
            CheckpointError: this or the previous checkpoint could not be written; earlier ones are untouched.
        """
        self.finish()
        partial = begin(self._parent, step=step, buffer_state=buffer_state)
        with _removing(partial):
            roles.start_save(str(partial / "learner"))
        self._pending = self._executor.submit(self._complete, roles, partial, step, version, metric)
        return None if self._trainer.save_in_background else self.finish()

    def check(self) -> Checkpoint | None:
        """Return a checkpoint that was completed in the background since the last call, or raise its error.

        Returns None without waiting if none is pending or it is still being written.
        """
        return self.finish() if self._pending is not None and self._pending.done() else None

    def finish(self) -> Checkpoint | None:
        """Wait for the pending checkpoint and return it; None if none is pending.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        return pending.result()

    def give_up(self) -> Checkpoint | None:
        """Return the newest complete checkpoint after a loss of ranks, or None; wait for a pending write
        first."""
        with suppress(AgentRLError):  # the write failed with the ranks, or it completed and is the newest
            self.finish()
        return self.newest

    def close(self) -> None:
        """Wait for the pending write and ignore its outcome: for a run that ends early."""
        self._executor.shutdown(wait=True)

    def _complete(
        self, roles: Roles, partial: Path, step: int, version: int, metric: float | None
    ) -> Checkpoint:
        with _removing(partial):
            written = roles.finish_save()
            self._wait_for_records()
        self.newest = checkpoint = complete(partial, written, step=step, version=version, metric=metric)
        prune(self._parent, self._trainer, pinned=self._pinned())
        return checkpoint


@contextmanager
def _removing(partial: Path) -> Iterator[None]:
    """Remove the partial checkpoint if its write fails within the block.

    Raises:
        CheckpointError: the write failed.
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
    """Return the value of `trainer.best_metric`; None without a validation, or if no attempt was scored.

    Raises:
        ConfigError: `trainer.keep_best` is set and the validation has no such metric.
    """
    if validation is None or (
        "val/failed" in validation and validation["val/failed"] == validation["val/trajectories"]
    ):
        return None
    if trainer.keep_best > 0 and trainer.best_metric not in validation:
        raise ConfigError(
            f"trainer.best_metric={trainer.best_metric!r} is not a validation metric; available: "
            f"{', '.join(sorted(validation))}"
        )
    return validation.get(trainer.best_metric)
