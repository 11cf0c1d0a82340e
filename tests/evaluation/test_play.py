"""Attempts side by side: the world's failures are tried again and never scored, and every attempt is kept
once.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import trio
from rich.console import Console
from trio.testing import MockClock

from agentrl.errors import InfrastructureError, RewardError, ServerError
from agentrl.evaluation.concurrency import Concurrency
from agentrl.evaluation.data_sets import EvaluationProblem
from agentrl.evaluation.model_place import RunningServers, Servers
from agentrl.evaluation.play import MAX_FAILURES_IN_A_ROW, Counts, ProblemPlayer
from agentrl.evaluation.progress import EvalProgress
from agentrl.evaluation.store import AttemptStore
from agentrl.evaluation.time_left import TimeLeft
from agentrl.rollout.recorder import Attempt
from agentrl.rollout.sampling import GreedySampling
from agentrl.tracking.attempts import FailedAttempt
from agentrl.types import Failure, Outcome, Task, Trajectory
from parts.trajectories import Rows, make_trajectory

SERVERS = RunningServers(("http://a",), None)
Outcomes = Callable[[Attempt, int], Outcome]


class FakePlayer:
    """Each try of an attempt ends as `outcomes` says; remembers how many ran at once."""

    def __init__(self, outcomes: Outcomes) -> None:
        self.tries: Counter[tuple[int, int]] = Counter()
        self.most = self._running = 0
        self._outcomes = outcomes

    async def play(self, attempt: Attempt, sampling: object) -> Trajectory:
        key = (attempt.group_id, attempt.member)
        self.tries[key] += 1
        self._running += 1
        self.most = max(self.most, self._running)
        await trio.sleep(1)
        self._running -= 1
        outcome = self._outcomes(attempt, self.tries[key])
        return make_trajectory(
            [0, 0],
            group_id=attempt.group_id,
            member=attempt.member,
            task_id=attempt.task.task_id,
            messages=attempt.task.messages,
            outcome=outcome,
            failure=None if outcome is Outcome.COMPLETED else Failure("broken"),
            metrics={"accuracy": 1.0, "generate_s": 1.0},
        )


class FakeScorer:
    """Where `compares`, notes which members were compared."""

    def __init__(self, compares: bool) -> None:
        self._compares = compares
        self.compared: list[tuple[int, ...]] = []

    def has_group_rewards(self, task: Task) -> bool:
        return self._compares

    async def score_group(self, task: Task, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        self.compared.append(tuple(t.member for t in trajectories))
        return [t.replace(metrics={"rank": float(t.member)}) for t in trajectories]


class NoRouter:
    def set_servers(self, urls: Sequence[str], *, version: int) -> None:
        self.urls = urls

    async def watch(self) -> None:
        await trio.sleep_forever()


class LostServers:
    def urls(self) -> Sequence[str]:
        raise ServerError("a server failed permanently")


def problems(num: int, n: int) -> list[EvaluationProblem]:
    rows = Rows()
    return [
        EvaluationProblem(number, rows.task(number), tuple(f"{number}/{member}" for member in range(n)))
        for number in range(num)
    ]


class Scene:
    """One evaluation of 3 problems, 2 attempts each, in a folder."""

    def __init__(
        self, folder: Path, outcomes: Outcomes, *, compares: bool = False, limit: int = 64, num: int = 3
    ) -> None:
        self.player, self.scorer = FakePlayer(outcomes), FakeScorer(compares)
        self.problems = problems(num, 2)
        self.concurrency = Concurrency(limit)
        self.time_left = TimeLeft(2 * num, max_tokens=64, timeout_s=60.0)
        self.finished: list[Trajectory] = []
        self.failed: list[FailedAttempt] = []
        self._folder = folder

    def play(self, servers: Servers = SERVERS) -> Counts:
        with AttemptStore(self._folder / "attempts.sqlite") as store:
            player = ProblemPlayer(
                self.player,
                self.scorer,
                store,
                self.concurrency,
                self.time_left,
                sampling=GreedySampling(),
                max_retries=2,
                on_finished=self.finished.append,
                on_failed=self.failed.append,
            )

            async def main() -> Counts:
                await player.run(self.problems, servers, NoRouter())
                return player.counts

            return trio.run(main, clock=MockClock(autojump_threshold=0.05))

    def stored(self) -> list[Trajectory | None]:
        with AttemptStore(self._folder / "attempts.sqlite") as store:
            return list(store.read([key for problem in self.problems for key in problem.keys]))


@pytest.mark.parametrize(("is_scored", "shown"), [(True, "accuracy 1.000 so far, "), (False, "")])
def test_where_there_is_no_terminal_a_line_now_and_then_says_how_far_it_is(
    tmp_path: Path, is_scored: bool, shown: str
) -> None:
    scene = Scene(tmp_path, lambda attempt, _: Outcome.TIMEOUT if attempt.member else Outcome.COMPLETED)
    scene.play()
    out, now = io.StringIO(), [0.0]
    console = Console(file=out, width=200)
    with EvalProgress(
        16,
        10,
        scene.concurrency,
        scene.time_left,
        is_scored=is_scored,
        console=console,
        clock=lambda: now[0],
    ) as progress:
        for trajectory in sorted(scene.finished, key=lambda t: t.member):
            now[0] += 8.0
            progress.add(trajectory)
    lines = out.getvalue().splitlines()
    assert len(lines) == 3, "every second of six, 8 s apart"
    assert lines[0].startswith(f"12 of 16 attempts; {shown}"), lines
    assert lines[-1].endswith("done in 0:00, 3 failed"), lines


def always(outcome: Outcome) -> Outcomes:
    return lambda attempt, number: outcome


def test_every_try_that_failed_is_told(tmp_path: Path) -> None:
    scene = Scene(
        tmp_path, lambda attempt, number: Outcome.TOOL_ERROR if attempt.member else Outcome.COMPLETED
    )
    scene.play()
    assert Counter((f.member, f.became) for f in scene.failed) == {(1, "retried"): 6, (1, "not_scored"): 3}
    assert {f.failure.text for f in scene.failed} == {"broken"}


def test_each_attempt_is_played_and_kept_once(tmp_path: Path) -> None:
    scene = Scene(tmp_path, always(Outcome.COMPLETED))
    counts = scene.play()
    assert (counts.played, counts.failed) == (6, 0)
    assert set(scene.player.tries.values()) == {1}
    assert [(t.group_id, t.member) for t in scene.stored() if t] == [
        (group, member) for group in range(3) for member in range(2)
    ]
    assert len(scene.finished) == 6
    assert scene.play().played == 0, "nothing is left to play"


def test_the_worlds_failures_are_tried_again(tmp_path: Path) -> None:
    scene = Scene(tmp_path, lambda attempt, number: Outcome.MODEL_ERROR if number < 3 else Outcome.COMPLETED)
    counts = scene.play()
    assert (counts.played, counts.failed) == (6, 0)
    assert counts.retries == {"model_error": 12}
    assert scene.concurrency.reasons["overload"] >= 1, "the servers were spared"


def test_what_keeps_failing_is_a_failure_and_no_wrong_answer_and_is_played_again_next_time(
    tmp_path: Path,
) -> None:
    scene = Scene(
        tmp_path, lambda attempt, _: Outcome.TOOL_ERROR if attempt.group_id == 1 else Outcome.COMPLETED
    )
    assert scene.play().failed == 2
    assert [t.outcome for t in scene.stored()[2:4] if t] == [Outcome.TOOL_ERROR] * 2
    again = Scene(tmp_path, always(Outcome.COMPLETED))
    assert again.play().played == 2
    assert set(again.player.tries) == {(1, 0), (1, 1)}
    assert {t.outcome for t in again.stored() if t} == {Outcome.COMPLETED}


def test_members_that_are_compared_are_kept_together(tmp_path: Path) -> None:
    scene = Scene(tmp_path, always(Outcome.COMPLETED), compares=True)
    scene.play()
    assert sorted(scene.scorer.compared) == [(0, 1)] * 3
    assert [t.metrics["rank"] for t in scene.stored() if t] == [0.0, 1.0] * 3


class BrokenScorer(FakeScorer):
    async def score_group(self, task: Task, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        raise RewardError("cannot compare")


def test_members_that_cannot_be_compared_are_failures_and_end_nothing(tmp_path: Path) -> None:
    scene = Scene(tmp_path, always(Outcome.COMPLETED), compares=True, num=MAX_FAILURES_IN_A_ROW)
    scene.scorer = BrokenScorer(compares=True)
    assert scene.play().failed == 2 * MAX_FAILURES_IN_A_ROW
    assert {(t.outcome, t.failure.text) for t in scene.stored() if t and t.failure} == {
        (Outcome.REWARD_ERROR, "cannot compare")
    }
    assert {(f.outcome, f.became) for f in scene.failed} == {(Outcome.REWARD_ERROR, "not_scored")}


def test_never_more_at_once_than_there_is_room_for(tmp_path: Path) -> None:
    scene = Scene(tmp_path, always(Outcome.COMPLETED), limit=4, num=20)
    scene.play()
    assert scene.player.most == 4


def test_an_evaluation_in_which_everything_fails_ends(tmp_path: Path) -> None:
    scene = Scene(tmp_path, always(Outcome.ABORTED), num=MAX_FAILURES_IN_A_ROW)
    with pytest.raises(BaseExceptionGroup) as caught:
        scene.play()
    assert caught.group_contains(
        InfrastructureError, match="attempts failed one after the other, the last .aborted.: broken"
    )


def test_servers_that_are_lost_for_good_end_it(tmp_path: Path) -> None:
    scene = Scene(tmp_path, always(Outcome.COMPLETED))
    with pytest.raises(BaseExceptionGroup) as caught:
        scene.play(LostServers())
    assert caught.group_contains(ServerError, match="permanently")
