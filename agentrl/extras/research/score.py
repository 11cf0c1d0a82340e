"""Score stored responses with the rewards of training: the second step of generate and score.

A response that could not be scored (its reward raised, hung, or its process died) has a null score and is
counted with its reason. It never has a score of zero.
"""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import trio

from agentrl.adapters.catalog import open_plugins
from agentrl.config.agent import AgentConfig
from agentrl.config.data import DataConfig
from agentrl.config.reward import RewardConfig
from agentrl.data.atomic_files import appearing_whole, require_writable_file
from agentrl.errors import ConfigError, DataError, PluginError, RewardError
from agentrl.extras.research.responses import ResponseFile, StoredRow
from agentrl.figures.attempts import EvaluatedAttempt
from agentrl.plugins.blame import failure_of
from agentrl.plugins.rewards import RewardResult
from agentrl.plugins.sources import Reference
from agentrl.rewards.calls import RewardCalls, Term
from agentrl.rewards.select import RewardTable
from agentrl.rollout.asyncio_host import AsyncioHost
from agentrl.servers.trio_run import in_trio

MAX_CALLS = 64
"""Concurrent reward calls, of all kinds together."""
MAX_THREAD_CALLS = 8
"""As many as RewardCalls has threads, so that a call does not spend its deadline waiting for a thread."""


@dataclass(frozen=True, slots=True)
class ScoredResponse:
    """Result for one response.

    Attributes:
        score: the reward; None if the response could not be scored.
        accuracy: in [0, 1], as the reward reports it, else 1.0 for a positive score; None without a score.
        answer: canonical text of the final answer, if the reward reports one.
        failure: why there is no score, in words that are the same for all failures of the kind.
        message: the full text of the failure.
    """

    source: str
    problem: str
    member: int
    score: float | None
    accuracy: float | None = None
    answer: str | None = None
    failure: str | None = None
    message: str | None = None

    def attempt(self) -> EvaluatedAttempt:
        """Return the response as a record for statistics: one turn, with unknown token counts (0)."""
        return EvaluatedAttempt(
            source=self.source,
            problem=self.problem,
            member=self.member,
            accuracy=self.accuracy,
            reward=self.score,
            answer=self.answer,
            format=None,
            is_truncated=False,
            num_tokens=0,
            num_turns=1,
            num_tool_calls=0,
            num_tool_errors=0,
            failure=self.failure,
            difficulty=None,
            agent="",
        )


def score_file(
    path: Path,
    out: Path,
    *,
    columns: DataConfig,
    reward: RewardConfig,
    agent: AgentConfig,
    response_key: str = "responses",
    scores_key: str = "scores",
    num_processes: int,
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> list[ScoredResponse]:
    """Write the rows of `path` to `out` with a column of scores, one float per response; return all results.

    Every row is checked before the first is scored. All other columns, their types and the row groups are
    preserved; `out` is written atomically.

    Args:
        columns: names the columns.
        reward: selects the rewards, as in training.
        agent: names the plugins to load.
        num_processes: processes for rewards that run in their own process, such as a custom function that is
            not async.
        watch: called with the number of responses scored so far and the total.

    Raises:
        DataError: a row is malformed, has no reward, or lacks what its reward needs.
        PluginError: the custom function or a reward cannot be loaded.
        ConfigError: nobody listens at the URL of a reward's service.
    """
    file = ResponseFile(path, columns, response_key)
    if scores_key in file.schema.names:
        raise DataError(f"{path}: a column {scores_key!r} already exists; choose another with --scores-key")
    require_writable_file(out)
    table = RewardTable(in_processes(reward), open_plugins(agent))
    table.check_services()
    total, done = _check_rows(file, table), itertools.count(1)
    return in_trio(_score_file, file, out, table, scores_key, num_processes, lambda: watch(next(done), total))


def in_processes(config: RewardConfig) -> RewardConfig:
    """Return `config` with its custom function in separate processes, which can be killed if they hang.

    An async function gets `runs_in=thread` instead.
    """
    custom = config.custom_function
    if custom.path is None:
        return config
    if custom.scope != "trajectory":
        raise ConfigError(
            f"reward.custom_function.scope={custom.scope}: stored responses are scored one by one; use "
            "scope=trajectory"
        )
    try:
        is_async = inspect.iscoroutinefunction(Reference(custom.path, custom.name).load())
    except PluginError as error:
        raise PluginError(f"custom function: {error}") from error
    placed = custom.model_copy(update={"runs_in": "thread" if is_async else "process"})
    return config.model_copy(update={"custom_function": placed})


def _check_rows(file: ResponseFile, table: RewardTable) -> int:
    """Raise for the first row that cannot be scored; return the number of responses."""
    total = 0
    for row in file.stored_rows():
        own = table.own(row.task)
        if own.scope != "trajectory":
            raise DataError(
                f"{row.task.task_id}: reward {own.name!r} has the scope {own.scope}; stored responses are "
                "scored one by one"
            )
        own.reward.check(row.task)
        total += len(row.responses)
    return total


async def _score_file(
    file: ResponseFile,
    out: Path,
    table: RewardTable,
    scores_key: str,
    num_processes: int,
    on_scored: Callable[[], None],
) -> list[ScoredResponse]:
    field = pa.field(scores_key, pa.list_(pa.float64()))
    scored: list[ScoredResponse] = []
    with AsyncioHost() as host, appearing_whole(out) as partial:
        calls = RewardCalls(host, num_processes=num_processes)
        scorer = _Scorer(calls, table, num_processes, on_scored)
        try:
            with pq.ParquetWriter(partial, file.schema.append(field), compression="zstd") as writer:
                start = 0
                for index in range(file.parquet.num_row_groups):
                    group = file.parquet.read_row_group(index)
                    rows = await scorer.score_rows(file.read(group, start))
                    scores = pa.array([[one.score for one in row] for row in rows], field.type)
                    writer.write_table(
                        group.append_column(field, scores), row_group_size=max(1, group.num_rows)
                    )
                    scored += itertools.chain.from_iterable(rows)
                    start += group.num_rows
        finally:
            await calls.aclose()
    return scored


class _Scorer:
    """Scores responses concurrently, within one trio run."""

    def __init__(
        self, calls: RewardCalls, table: RewardTable, num_processes: int, on_scored: Callable[[], None]
    ) -> None:
        self._calls = calls
        self._table = table
        # A call waits here for a free process or thread, before its deadline starts.
        self._places = {
            "process": trio.CapacityLimiter(num_processes),
            "thread": trio.CapacityLimiter(MAX_THREAD_CALLS),
        }
        self._on_scored = on_scored

    async def score_rows(self, rows: Iterable[StoredRow]) -> list[list[ScoredResponse]]:
        """Score all responses of `rows`, which are read lazily; return the results by row, in order."""
        results: list[list[ScoredResponse]] = []
        remaining = _responses(rows, results)

        async def work() -> None:
            for row, member, response, of_row in remaining:
                of_row[member] = await self._score(row, member, response)
                self._on_scored()

        async with trio.open_nursery() as nursery:
            for _ in range(MAX_CALLS):
                nursery.start_soon(work)
        return results

    async def _score(self, row: StoredRow, member: int, response: str | None) -> ScoredResponse:
        identity = (row.task.data_source, row.task.task_id, member)
        if response is None:
            return ScoredResponse(*identity, None, failure="no response", message="the response is null")
        term = self._table.own(row.task)
        try:
            async with self._places.get(term.reward.runs_in) or nullcontext():
                result = await self._calls.call(term, row.attempted(response))
        except RewardError as error:
            return ScoredResponse(*identity, None, failure=_kind(term, error), message=str(failure_of(error)))
        if result is None:
            return ScoredResponse(
                *identity, None, failure="does not apply", message=f"reward {term.name!r} does not apply"
            )
        assert isinstance(result, RewardResult), term
        return ScoredResponse(*identity, float(result.value), _accuracy(result), _answer(result))


def _responses(
    rows: Iterable[StoredRow], results: list[list[ScoredResponse]]
) -> Iterator[tuple[StoredRow, int, str | None, list[ScoredResponse]]]:
    """Yield each response with its row, its index, and the list in `results` that receives its result."""
    for row in rows:
        results.append([_UNSCORED] * len(row.responses))
        for member, response in enumerate(row.responses):
            yield row, member, response, results[-1]


def _accuracy(result: RewardResult) -> float:
    reported = result.metrics.get("accuracy")
    return float(result.value > 0) if reported is None or not 0 <= reported <= 1 else float(reported)


def _answer(result: RewardResult) -> str | None:
    answer = result.details.get("answer")
    return answer if answer is None or isinstance(answer, str) else json.dumps(answer, sort_keys=True)


_UNSCORED = ScoredResponse("", "", 0, None)


def _kind(term: Term, error: RewardError) -> str:
    """Return the part of an error's text that is common to its kind, without the returned value."""
    text = str(error).removeprefix(f"reward {term.name!r}").lstrip(": ").partition(":")[0]
    subject, returned, _ = text.partition(" returned ")
    return f"{subject} returned no score" if returned else text
