"""Rewards of scope batch: an evaluation is one batch, scored when all of its attempts are finished."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from agentrl.evaluation.run import Prepared
from agentrl.rewards.select import RewardTable
from agentrl.rollout.asyncio_host import AsyncioHost
from agentrl.rollout.scoring import Scorer
from agentrl.rollout.trio_run import in_trio
from agentrl.types import SCORED_OUTCOMES, Task, Trajectory


def with_batch_rewards(prepared: Prepared) -> Iterable[Trajectory]:
    """Return the finished attempts in their order, with rewards of scope batch added.

    Failed attempts are unchanged.

    Raises:
        RewardError: such a reward raised or timed out. The attempts are kept, and the next run calls the
            reward again.
    """
    table = RewardTable(prepared.config.reward, prepared.plugins)
    if not table.may_score("batch"):
        return prepared.finished()
    attempts = list(prepared.finished())
    rows = [row for row, attempt in enumerate(attempts) if attempt.outcome in SCORED_OUTCOMES]
    tasks = [prepared.problems[attempts[row].group_id].task for row in rows]
    scored = in_trio(_score, prepared, table, tasks, [attempts[row] for row in rows]) if rows else []
    for row, attempt in zip(rows, scored, strict=True):
        attempts[row] = attempt
    return attempts


async def _score(prepared: Prepared, table: RewardTable, tasks: Sequence[Task], attempts: Sequence[Trajectory]) -> list[Trajectory]:
    config = prepared.config
    with AsyncioHost() as host:
        scorer = Scorer(config.reward, table, host=host, max_response_tokens=config.agent.max_response_tokens)
        try:
            return await scorer.score_batch(tasks, attempts)
        finally:
            await scorer.aclose()
