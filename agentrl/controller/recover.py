"""Recovery from a lost learner rank: all ranks restart from the newest checkpoint.

Rollout actors, servers and buffer keep running.

stop        the surviving ranks: they wait for the lost one in a collective, or soon will
launch      all ranks, in the same seats; they load the newest complete checkpoint, or keep initial weights
go back     to the checkpoint's step: the buffer takes back what later steps consumed; metrics are cut there
publish     the weights as a new version; it also resumes servers that a broken publish left paused
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from agentrl.cluster.readiness import StartUp
from agentrl.cluster.starting import Starting, wait_until_all_ready
from agentrl.config.trainer import Verify
from agentrl.controller.checkpoint import Checkpoint, read_checkpoint
from agentrl.controller.roles import Roles
from agentrl.controller.saving import CheckpointWriter
from agentrl.controller.verification import verify_by_ranks
from agentrl.errors import LearnerError, RankLost


class Ranks:
    """The ranks of all roles, and the function that launches them again."""

    def __init__(self, launch: Callable[[], Roles], *, max_restarts: int, verify: Verify) -> None:
        """Launch the ranks.

        Args:
            launch: starts all ranks without waiting for them.
            verify: how much of a checkpoint is verified before it is loaded.
        """
        self._launch = launch
        self._max_restarts = max_restarts
        self._verify = verify
        self.num_restarts = 0
        self.roles = launch()

    def bring_up(
        self,
        others: Sequence[Starting],
        checkpoint: Checkpoint | None,
        *,
        start_up: StartUp,
        say: Callable[[str], None],
        parent: Path,
    ) -> None:
        """Wait until the ranks and all `others` are ready, and load the checkpoint.

        If a rank is lost meanwhile, all ranks restart.

        Args:
            parent: checkpoints of the run; the error for a damaged checkpoint names an older one of them.

        Raises:
            AgentRLError: a part does not start, the checkpoint is damaged, or `learner.max_restarts` is used
                up.
        """
        while True:
            ranks = self.roles.ranks
            start_up.add(*ranks)
            try:
                wait_until_all_ready([*ranks, *others], table=start_up.line)
                if checkpoint is not None:
                    self._load(checkpoint, say, parent=parent)
            except RankLost as lost:
                if not self.roles.is_lost:
                    raise
                say(f"{lost}; restarting all ranks ({self.count_restart(lost)})")
                start_up.remove(*ranks)
                self.roles.stop()
                self.roles = self._launch()
            else:
                return

    def count_restart(self, cause: LearnerError) -> str:
        """Count a restart because of `cause`; return "restart i of n" for the log.

        Raises:
            LearnerError: `learner.max_restarts` is used up.
        """
        if self.num_restarts == self._max_restarts:
            raise LearnerError(
                f"{cause}, and learner.max_restarts={self._max_restarts} is used up"
            ) from cause
        self.num_restarts += 1
        return f"restart {self.num_restarts} of {self._max_restarts}"

    @contextmanager
    def recovering(
        self,
        checkpoints: CheckpointWriter,
        *,
        go_back: Callable[[int], None],
        timer: Callable[[str], AbstractContextManager[None]],
        say: Callable[[str], None],
    ) -> Iterator[None]:
        """Catch the loss of a learner rank within the block and restore the newest checkpoint.

        The rest of the block is skipped. The training loop then repeats its block from the restored step.

        Args:
            go_back: resets the run to a step, whose weights the ranks have loaded.

        Raises:
            LearnerError: `learner.max_restarts` is used up; or no rank was lost, so a restart would not help.
        """
        try:
            yield
        except LearnerError as error:
            lost: LearnerError | None = error
            while lost is not None:
                checkpoint = self._stop_and_choose(lost, checkpoints, say)
                try:
                    with timer("recover"):
                        self.roles = self._launch()
                        wait_until_all_ready(self.roles.ranks)
                        if checkpoint is not None:
                            self._load(read_checkpoint(checkpoint.folder), say)
                        go_back(0 if checkpoint is None else checkpoint.step)
                    lost = None
                except LearnerError as another:  # a rank was lost meanwhile
                    lost = another

    def _load(
        self, checkpoint: Checkpoint, say: Callable[[str], None], *, parent: Path | None = None
    ) -> None:
        verify_by_ranks(checkpoint, self.roles.learner, self._verify, say=say, parent=parent)
        self.roles.load(checkpoint.learner)

    def _stop_and_choose(
        self, cause: LearnerError, checkpoints: CheckpointWriter, say: Callable[[str], None]
    ) -> Checkpoint | None:
        """Stop all ranks; return the checkpoint to start from, None for the initial weights."""
        if not self.roles.is_lost:
            raise cause
        self.roles.stop()  # at once: survivors in a collective would wait for learner.collective_timeout_s
        which = self.count_restart(cause)
        checkpoint = checkpoints.give_up()
        begin = "the initial weights" if checkpoint is None else checkpoint.folder.name
        say(f"{cause}; restarting all ranks from {begin} ({which})")
        return checkpoint
