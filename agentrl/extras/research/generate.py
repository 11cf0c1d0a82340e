"""Generation without scoring: rows with an added column of responses, which `agentrl score` can score."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.data.atomic_files import appearing_whole, require_writable_file
from agentrl.data.files import batches
from agentrl.errors import ConfigError, DataError
from agentrl.evaluation.model_place import Say
from agentrl.evaluation.run import EvaluationRequest, Prepared, play_missing, prepare
from agentrl.rollout.scoring import attempted
from agentrl.types import SCORED_OUTCOMES

ATTEMPTS_SUFFIX = ".attempts"
"""Suffix of the folder with the attempts, beside the output file."""


def generate(request: EvaluationRequest, out: Path, *, response_key: str, say: Say) -> int:
    """Write the rows of `request.on`, one Parquet file, to `out`, with n responses each.

    A response is the text that functions with verl's signature get (`reward.solution_str`): all that follows
    the prompt. Failed responses are null; their number is returned.

    Raises:
        UserError: the file, a row or the config is invalid; a prompt is longer than data.max_prompt_tokens.
        InfrastructureError: no server is available.
    """
    [source] = request.on
    table = _read(source, response_key)
    require_writable_file(out)
    data = request.config.data
    if data.overlong_prompts == "filter":  # an error instead: each row needs its responses
        data = data.model_copy(update={"overlong_prompts": "error"})
    config = request.config.model_copy(update={"data": data})
    request = replace(
        request, config=config, folder=out.with_name(out.name + ATTEMPTS_SUFFIX), is_scored=False
    )
    with prepare(request, say=say) as prepared:
        play_missing(prepared, say=say)
        responses = list(_responses(prepared))
    table = table.slice(0, len(responses)).append_column(
        response_key, pa.array(responses, pa.list_(pa.large_string()))
    )
    with appearing_whole(out) as partial:
        pq.write_table(table, partial, compression="zstd")
    return sum(text is None for row in responses for text in row)


def _read(source: str, response_key: str) -> pa.Table:
    if not Path(source).exists():
        raise DataError(f"--in {source!r} does not exist")
    if Path(source).suffix != ".parquet":
        raise ConfigError(
            f"--in {source!r} must be a Parquet file: its columns are written with the responses"
        )
    try:
        table = pq.read_table(source)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"--in {source!r} cannot be read as Parquet: {error}") from error
    if response_key in table.column_names:
        raise ConfigError(
            f"--in {source!r} already has a column {response_key!r}; choose another with --response-key"
        )
    return table


def _responses(prepared: Prepared) -> Iterator[list[str | None]]:
    """Yield the responses of each row, in the order of rows and members."""
    n, limit = prepared.config.eval.n, prepared.config.agent.max_response_tokens
    chat = prepared.chat if prepared.config.reward.solution_str == "decoded" else None
    for problem, members in zip(prepared.problems, batches(prepared.finished(), n), strict=True):
        yield [
            attempted(problem.task, trajectory, max_response_tokens=limit, chat=chat).solution_str
            if trajectory.outcome in SCORED_OUTCOMES
            else None
            for trajectory in members
        ]
