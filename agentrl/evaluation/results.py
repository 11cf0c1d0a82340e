"""Write the results of an evaluation: the Parquet file of all attempts, and the report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from agentrl.data.atomic_files import appearing_whole
from agentrl.data.trajectories import SCHEMA, encode
from agentrl.evaluation.batch_scores import with_batch_rewards
from agentrl.evaluation.batches import batches
from agentrl.evaluation.contamination import ContaminationNote, find_overlap
from agentrl.evaluation.description import DataSetLine, RunDescription, package_commit
from agentrl.evaluation.evidence import Evidence
from agentrl.evaluation.report import Report, write_report
from agentrl.evaluation.run import Prepared
from agentrl.figures.attempts import ATTEMPTS
from agentrl.figures.thresholds import Threshold
from agentrl.types import Trajectory

PRODUCERS = b"agentrl.producers"
"""Metadata key of the file: data set -> producer of its attempts (see `producer_of`), as JSON."""
_CHUNK = 256


def write_results(
    prepared: Prepared, *, started: str, seconds: float, training_files: Sequence[str], thresholds: Sequence[Threshold]
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
        data_sets=tuple(DataSetLine(one.name, len(one.dataset), one.template_name) for one in prepared.data_sets),
        sampling=config.eval.model_dump(mode="json"),
        config=config.model_dump(mode="json"),
        started=started,
        seconds=seconds,
        commit=package_commit(),
    )
    note = _contamination(evidence, training_files, config.data.prompt_key)
    return write_report(folder, run, evidence, contamination=note, thresholds=thresholds)


def write_attempts(path: Path, trajectories: Iterable[Trajectory], producers: Mapping[str, Any]) -> Evidence:
    """Write trajectories into one Parquet file, atomically, and return the evidence for a report."""
    evidence = Evidence()
    own = {PRODUCERS: json.dumps(producers, default=str).encode()}
    schema = SCHEMA.with_metadata({**SCHEMA.metadata, **own})
    with appearing_whole(path) as partial, pq.ParquetWriter(partial, schema, compression="zstd") as writer:
        for chunk in batches(trajectories, _CHUNK):
            writer.write_batch(encode(chunk).replace_schema_metadata(schema.metadata))
            for trajectory in chunk:
                evidence.add(trajectory)
    return evidence


def _contamination(evidence: Evidence, training_files: Sequence[str], prompt_key: str) -> ContaminationNote | None:
    return find_overlap(evidence.questions, training_files, prompt_key=prompt_key) if training_files else None


def _servers(prepared: Prepared) -> str:
    if prepared.place.kind == "folder":
        count = max(prepared.config.rollout.num_started, 1)
        return f"{count} {prepared.config.rollout.backend} server{'s' if count > 1 else ''}"
    speaks = "OpenAI's chat completions" if prepared.place.kind == "openai" else "SGLang's protocol"
    return f"running servers, asked by {speaks}: {', '.join(prepared.place.urls)}"
