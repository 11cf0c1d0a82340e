"""A learner rank is lost: all ranks start again from the newest checkpoint, while rollout actors, servers and buffer stay.

stop        the ranks that are left: they wait for the lost one, or soon will
launch      all ranks, in the same seats; they load the newest whole checkpoint, or keep the initial weights where there is none
go back     to the checkpoint's step: the buffer takes back what later steps consumed, the metrics forget those steps
publish     the weights as a new version; a server that a broken publish had paused goes on with it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from agentrl.controller.checkpoint import Checkpoint, read_checkpoint
from agentrl.controller.readiness import StartUp
from agentrl.controller.roles import Roles
from agentrl.errors import LearnerError, RankLost
from agentrl.workers.starting import Starting, wait_until_all_ready

if TYPE_CHECKING:
    from agentrl.controller.run import Run


class Ranks:
    """The ranks of all roles, and how to start them anew."""

    def __init__(self, launch: Callable[[], Roles], *, max_restarts: int) -> None:
        """Begin to start them. launch: does it, without waiting."""
        self._launch = launch
        self._max_restarts = max_restarts
        self.num_restarts = 0
        self.roles = launch()

    def bring_up(self, others: Sequence[Starting], checkpoint: Checkpoint | None, *, start_up: StartUp, say: Callable[[str], None]) -> None:
        """Wait until the ranks and all `others` stand, and load the checkpoint; should a rank be lost meanwhile, all ranks start again.

        Raises:
            AgentRLError: one of them does not come up; or `learner.max_restarts` is used up.
        """
        while True:
            ranks = self.roles.ranks
            start_up.add(*ranks)
            try:
                wait_until_all_ready([*ranks, *others], table=start_up.line)
                if checkpoint is not None:
                    self.roles.load(checkpoint.learner)
            except RankLost as lost:
                if not self.roles.is_lost:
                    raise
                say(f"{lost}; all ranks start again ({self.count_restart(lost)})")
                start_up.remove(*ranks)
                self.stop()
                self.start_again()
            else:
                return

    def count_restart(self, cause: LearnerError) -> str:
        """Count the restart that `cause` makes necessary, and return which of how many it is.

        Raises:
            LearnerError: it would be one too many.
        """
        if self.num_restarts == self._max_restarts:
            raise LearnerError(f"{cause}, and learner.max_restarts={self._max_restarts} is used up") from cause
        self.num_restarts += 1
        return f"restart {self.num_restarts} of {self._max_restarts}"

    def start_again(self) -> None:
        """Begin to start all ranks where those before stood, which have been stopped."""
        self.roles = self._launch()

    def stop(self) -> None:
        """End all ranks, dead ones included."""
        self.roles.stop()


@contextmanager
def recovering(run: Run) -> Iterator[None]:
    """Let the run go on after the block from the newest checkpoint, should a rank of the learner be lost within it.

    Raises:
        LearnerError: `learner.max_restarts` is used up; or no rank was lost, and the numbers are at fault.
    """
    try:
        yield
    except LearnerError as error:
        lost: LearnerError | None = error
        while lost is not None:
            lost = _recover(run, lost)


def _recover(run: Run, cause: LearnerError) -> LearnerError | None:
    """Start all ranks again; return the error when one of them is lost meanwhile."""
    if not run.roles.is_lost:
        raise cause
    run.ranks.stop()  # at once: survivors in a collective would wait for learner.collective_timeout_s
    which = run.ranks.count_restart(cause)
    checkpoint = run.checkpoints.give_up()
    begin = "the initial weights" if checkpoint is None else checkpoint.folder.name
    run.observer.say(f"{cause}; all ranks start again from {begin} ({which})")
    try:
        with run.timer("recover"):
            run.ranks.start_again()
            wait_until_all_ready(run.roles.ranks)
            if checkpoint is not None:
                run.roles.load(read_checkpoint(checkpoint.folder).learner)
            run.go_back(0 if checkpoint is None else checkpoint.step)
    except LearnerError as error:
        return error
    return None
