"""Write the results of an evaluation: the Parquet file of all attempts, and the report.

Rewards of scope batch are added first: an evaluation is one batch, scored when all of its attempts are
finished.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.data.files import batches
from agentrl.data.parquet_files import writing_parquet
from agentrl.data.trajectories import SCHEMA, encode
from agentrl.evaluation.contamination import find_overlap
from agentrl.evaluation.description import DataSetLine, RunDescription, package_commit
from agentrl.evaluation.evidence import Evidence
from agentrl.evaluation.report import Report, write_report
from agentrl.evaluation.run import Prepared
from agentrl.figures.attempts import ATTEMPTS
from agentrl.figures.thresholds import Threshold
from agentrl.rewards.select import RewardTable
from agentrl.rollout.asyncio_host import AsyncioHost
from agentrl.rollout.scoring import Scorer
from agentrl.servers.trio_run import in_trio
from agentrl.types import SCORED_OUTCOMES, Task, Trajectory

PRODUCERS = b"agentrl.producers"
"""Metadata key of the file: data set -> producer of its attempts (see `producer_of`), as JSON."""
_CHUNK = 256


def write_results(
    prepared: Prepared,
    *,
    started: str,
    seconds: float,
    training_files: Sequence[str],
    thresholds: Sequence[Threshold],
) -> Report:
    """Write all attempts, `results.json` and the report into the request's folder.

    Args:
        started, seconds: start of this process (ISO 8601), and its duration.
        training_files: checked for overlap with the questions; empty: no check.
        thresholds: figures that must be reached; missed ones are listed in the report.

    Raises:
        DataError: a training file cannot be read.
        RewardError: a reward of scope batch failed.
        InfrastructureError: a file cannot be written.
    """
    folder = prepared.request.folder
    producers = {data_set.name: data_set.producer for data_set in prepared.data_sets}
    evidence = write_attempts(folder / ATTEMPTS, with_batch_rewards(prepared), producers)
    config = prepared.config
    run = RunDescription(
        model=", ".join(prepared.place.urls) or config.model.path,
        servers=_servers(prepared),
        data_sets=tuple(
            DataSetLine(one.name, len(one.dataset), one.template_name) for one in prepared.data_sets
        ),
        sampling=config.eval.model_dump(mode="json"),
        config=config.model_dump(mode="json"),
        started=started,
        seconds=seconds,
        commit=package_commit(),
    )
    note = (
        find_overlap(evidence.questions, training_files, prompt_key=config.data.prompt_key)
        if training_files
        else None
    )
    return write_report(folder, run, evidence, contamination=note, thresholds=thresholds)


def write_attempts(path: Path, trajectories: Iterable[Trajectory], producers: Mapping[str, Any]) -> Evidence:
    """Write trajectories into one Parquet file, atomically, and return the evidence for a report."""
    evidence = Evidence()
    own = {PRODUCERS: json.dumps(producers, default=str).encode()}
    schema = SCHEMA.with_metadata({**SCHEMA.metadata, **own})
    with writing_parquet(path, schema, compression="zstd") as writer:
        for chunk in batches(trajectories, _CHUNK):
            writer.write_batch(encode(chunk).replace_schema_metadata(schema.metadata))
            for trajectory in chunk:
                evidence.add(trajectory)
    return evidence


def _servers(prepared: Prepared) -> str:
    if prepared.place.kind == "folder":
        count = max(prepared.config.rollout.num_started, 1)
        return f"{count} {prepared.config.rollout.backend} server{'s' if count > 1 else ''}"
    speaks = "OpenAI's chat completions" if prepared.place.kind == "openai" else "SGLang's protocol"
    return f"running servers, protocol {speaks}: {', '.join(prepared.place.urls)}"


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


async def _score(
    prepared: Prepared, table: RewardTable, tasks: Sequence[Task], attempts: Sequence[Trajectory]
) -> list[Trajectory]:
    config = prepared.config
    with AsyncioHost() as host:
        scorer = Scorer(
            config.reward,
            table,
            host=host,
            max_response_tokens=config.agent.max_response_tokens,
            chat=prepared.chat,
        )
        try:
            return await scorer.score_batch(tasks, attempts)
        finally:
            await scorer.aclose()
