"""Calls of rewards: each runs where the reward wants, has a deadline, and any failure becomes a
RewardError.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import trio

from agentrl.errors import LearnerError, RewardError
from agentrl.plugins import AnyReward, Attempted, Reward, RewardResult, Unreachable
from agentrl.plugins.blame import blaming
from agentrl.plugins.call_threads import CallThreads
from agentrl.plugins.contained import contained
from agentrl.plugins.foreign_loop import foreign_loop
from agentrl.plugins.last_words import note, noting
from agentrl.plugins.rewards import Scope
from agentrl.plugins.stepping import stepping
from agentrl.rewards.custom import described, is_finite_number
from agentrl.rewards.pool import AnswerDeathError, WorkerPool
from agentrl.rewards.recipes import Recipe

NUM_THREADS = 8
MAX_WAIT_FACTOR = 20
"""Bound of the wait for a free thread or process, in deadlines.

Reached only if all of them hang in a reward.
"""

Subject = Attempted | Sequence[Attempted]
Result = RewardResult | None | Sequence[float | None] | Sequence[RewardResult | None]


class AsyncHost(Protocol):
    """Runs asyncio functions for trio: `agentrl.rollout.asyncio_host.AsyncioHost`."""

    async def run(self, function: Callable[..., Awaitable[Any]], *args: object) -> Any: ...


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """One configured reward. `name` is its name in events and metrics, `weight` its factor in the sum."""

    name: str
    reward: AnyReward
    weight: float
    timeout_s: float
    recipe: Recipe | None  # to rebuild it in a worker process
    sources: tuple[str, ...] = ()  # data sources that it applies to; (): all

    @property
    def scope(self) -> Scope:
        return self.reward.scope


class RewardCalls:
    """Calls rewards concurrently. Use it within one trio run; `aclose` ends its processes."""

    def __init__(self, host: AsyncHost, *, num_processes: int) -> None:
        self._host = host
        self._threads = CallThreads("rewards", num=NUM_THREADS)
        self._processes = WorkerPool(num_processes)
        self._places: dict[Term, trio.CapacityLimiter] = {}

    async def aclose(self) -> None:
        await self._processes.aclose()

    async def call_all(self, calls: Sequence[tuple[Term, Subject]]) -> list[Result]:
        """Make all calls concurrently; return their results in order. The first failure cancels the others.

        Raises:
            RewardError, LearnerError: see `call`.
        """
        if all(term.reward.runs_in == "inline" for term, _ in calls):
            return [await self.call(*one) for one in calls]
        results: list[Result] = [None] * len(calls)
        failed: list[RewardError | LearnerError] = []

        async def call(index: int) -> None:
            try:
                results[index] = await self.call(*calls[index])
            except (RewardError, LearnerError) as error:
                failed.append(error)
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for index in range(len(calls)):
                nursery.start_soon(call, index)
        if failed:
            raise failed[0]
        return results

    async def call(self, term: Term, subject: Subject) -> Result:
        """Return the reward's result for `subject`: one attempt, or a list of them for the scopes group and
        batch.

        Raises:
            RewardError: it raised, returned an invalid result for its scope, exceeded its deadline, or its
                process died.
            LearnerError: a rank of the reward model was lost; no further batch can be scored.
        """
        with blaming("reward", term.name):
            try:
                result = await self._timed(term, subject)
            except RewardError as error:
                raise RewardError(f"reward {term.name!r}: {error}") from error
            except LearnerError:
                raise
            except Exception as error:  # boundary of one score: a reward raised
                raise RewardError(f"reward {term.name!r} {_why(term, subject, error)}") from error
            _check_result(term, subject, result)
            return result

    async def _timed(self, term: Term, subject: Subject) -> Any:
        if term.reward.runs_in == "inline":
            with contained(), noting(note()):
                return term.reward.score(subject)
        # This deadline bounds the wait for a free place; `begin` replaces it by the reward's own.
        with trio.CancelScope(deadline=trio.current_time() + MAX_WAIT_FACTOR * term.timeout_s) as deadline:

            def begin() -> None:
                deadline.deadline = trio.current_time() + term.timeout_s

            async with self._place(term):
                return await self._placed(term, subject, begin)
        raise RewardError(f"timed out after {term.timeout_s:g} s")

    async def _placed(self, term: Term, subject: Subject, begin: Callable[[], None]) -> Any:
        """Call the reward where it runs. `begin` starts its deadline: waiting for a place does not count."""
        score = term.reward.score
        if term.reward.runs_in == "process":
            assert term.recipe is not None, term
            subject = _for_process(subject)
            if (
                not isinstance(term.reward, Reward)
                or not isinstance(subject, Attempted)
                or term.reward.max_answer_cpu_s is None
            ):
                return await self._processes.score(term.recipe, subject, begin=begin)
            try:
                return await self._processes.score(term.recipe, subject, begin=begin, rehearse=subject.task)
            except AnswerDeathError:
                if (failed := term.reward.failed(subject)) is None:
                    raise
                return failed
        if term.reward.runs_in == "thread":

            def work() -> Any:
                trio.from_thread.run_sync(begin)
                with contained():
                    return score(subject)

            return await self._threads.run(work)
        begin()
        if term.reward.runs_in == "asyncio":
            return await self._host.run(score, subject)
        with contained(trio.Cancelled):
            return await stepping(score(subject))

    def _place(self, term: Term) -> trio.CapacityLimiter:
        if term not in self._places:
            self._places[term] = trio.CapacityLimiter(term.reward.max_concurrent or float("inf"))
        return self._places[term]


def _for_process(subject: Subject) -> Subject:
    """Return `subject` without the environment, which lives in this process."""
    if not isinstance(subject, Attempted):
        return [replace(attempt, environment=_elsewhere(attempt)) for attempt in subject]
    return replace(subject, environment=_elsewhere(subject))


def _elsewhere(attempt: Attempted) -> Unreachable | None:
    why = "the reward runs in a process of its own (runs_in = 'process')"
    return None if attempt.environment is None else Unreachable(why)


def _why(term: Term, subject: Subject, error: Exception) -> str:
    runs_in = term.reward.runs_in
    if (runs_in == "asyncio" or runs_in == "trio") and (found := foreign_loop(error, runs_in)) is not None:
        return f'{found}: write `runs_in = "{"trio" if runs_in == "asyncio" else "asyncio"}"` in its class'
    attempts = [subject] if isinstance(subject, Attempted) else subject
    bare = next((attempt.task.task_id for attempt in attempts if attempt.task.ground_truth is None), None)
    hint = (
        ""
        if bare is None
        else f"; the row {bare} has no reward_model.ground_truth (data.reward_model_key), if that is what it "
        "needs"
    )
    return f"raised {type(error).__name__}: {error}{hint}"


def _check_result(term: Term, subject: Subject, result: Any) -> None:
    if term.scope == "trajectory":
        is_right, wanted = _is_result(result), "a RewardResult of finite numbers, or None"
    elif isinstance(subject, Attempted):
        is_right = _is_list(result, subject.num_turns) and all(
            value is None or is_finite_number(value) for value in result
        )
        wanted = f"one finite number or None for each of the {subject.num_turns} turns"
    else:
        is_right = _is_list(result, len(subject)) and all(map(_is_result, result))
        wanted = f"one RewardResult of finite numbers, or None, for each of the {len(subject)} attempts"
    if not is_right:
        is_value = isinstance(result, RewardResult) and not is_finite_number(result.value)
        shown = result.value if is_value else result
        raise RewardError(f"reward {term.name!r} returned {described(shown)}; return {wanted}")


def _is_list(result: Any, length: int) -> bool:
    return isinstance(result, Sequence) and not isinstance(result, str) and len(result) == length


def _is_result(result: Any) -> bool:
    if result is None:
        return True
    return (
        isinstance(result, RewardResult)
        and is_finite_number(result.value)
        and all(map(is_finite_number, result.metrics.values()))
        and all(map(is_finite_number, result.by_conversation.values()))
    )
