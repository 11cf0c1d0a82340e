"""`agentrl score`: its options, its progress and its table."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.cli.options import Debug
from agentrl.errors import UserError
from agentrl.granted import granted_cpus

if TYPE_CHECKING:
    from rich.table import Table

    from agentrl.config.schema import Config
    from agentrl.extras.research.score import ScoredResponse
    from agentrl.figures.summary import EvalSummary

LINE_EVERY_S = 10.0
"""Seconds between progress lines, if there is no terminal for a bar."""
LINE_CHARACTERS = 200
MAX_PASS_COLUMNS = 3


def score(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="IN.parquet", help="Rows with a column of responses, a list of texts per row."
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            metavar="OUT.parquet",
            help="File to write: the same rows with a column of scores; may be IN itself.",
        ),
    ],
    function: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:NAME",
            help="Your compute_score(data_source, solution_str, ground_truth, extra_info); default: by "
            "data_source.",
        ),
    ] = None,
    kwargs: Annotated[
        str, typer.Option(metavar="JSON", help="Additional keyword arguments of the function, as JSON.")
    ] = "{}",
    config: Annotated[
        str | None,
        typer.Option(
            metavar="CONFIG.yaml",
            help="Take rewards (`reward`), plugins and column names (`data`) from this config.",
        ),
    ] = None,
    response_key: Annotated[str, typer.Option(help="Column of the responses.")] = "responses",
    scores_key: Annotated[str, typer.Option(help="Column to write.")] = "scores",
    prompt_key: Annotated[str | None, typer.Option(help="Column of the chat messages.")] = None,
    data_source_key: Annotated[str | None, typer.Option(help="Column that chooses the reward.")] = None,
    reward_model_key: Annotated[str | None, typer.Option(help="Column of {ground_truth}.")] = None,
    extra_info_key: Annotated[
        str | None, typer.Option(help="Column passed to the function as extra_info.")
    ] = None,
    timeout_s: Annotated[
        float | None,
        typer.Option(
            "--timeout", min=0.1, help="Deadline of one response, in seconds; default: reward.timeout_s."
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="Processes for functions and heavy rewards; default: one per CPU."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Score stored responses: the rows of IN with a column `scores`, one float per response, and a table by
    data source.

    The reward is chosen by data_source, as in training, or is your function. What could not be scored (it
    raised, or hung) is null in the column and counted with its reason, never 0.
    """
    from agentrl.extras.research.score import score_file

    keys = {
        "prompt_key": prompt_key,
        "data_source_key": data_source_key,
        "reward_model_key": reward_model_key,
        "extra_info_key": extra_info_key,
    }
    settings = _settings(
        config, {name: key for name, key in keys.items() if key is not None}, function, kwargs, timeout_s
    )
    try:
        with _progress() as watch:
            scored = score_file(
                path,
                out,
                columns=settings.data,
                reward=settings.reward,
                agent=settings.agent,
                response_key=response_key,
                scores_key=scores_key,
                num_processes=processes or granted_cpus(),
                watch=watch,
            )
    except KeyboardInterrupt:
        typer.echo(f"interrupted; {out} is unchanged", err=True)
        raise typer.Exit(130) from None
    _show(scored)
    typer.echo(f"wrote {out}")


def _settings(
    config: str | None, keys: dict[str, str], function: str | None, kwargs: str, timeout_s: float | None
) -> Config:
    from agentrl.config.compose import load_config
    from agentrl.config.schema import Config
    from agentrl.plugins.sources import Reference

    loaded = Config() if config is None else load_config(config)
    changes: dict[str, Any] = {} if timeout_s is None else {"timeout_s": timeout_s}
    if function is not None:
        reference = Reference.parse(function)
        if reference is None:
            raise UserError(
                f"--function {function!r} names no function; write FILE.py:NAME, such as "
                "my_reward.py:compute_score"
            )
        named = {"path": reference.source, "name": reference.attribute, "kwargs": _json_object(kwargs)}
        changes["custom_function"] = loaded.reward.custom_function.model_copy(update=named)
    elif _json_object(kwargs):
        raise UserError("--kwargs needs --function")
    return loaded.model_copy(
        update={
            "data": loaded.data.model_copy(update=keys),
            "reward": loaded.reward.model_copy(update=changes),
        }
    )


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"--kwargs {text!r} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"--kwargs {text!r} must be a JSON object, such as '{{\"strict\": true}}'")
    return value


@contextmanager
def _progress() -> Iterator[Any]:
    """Yield a function of (done, total) that shows progress on standard error.

    It shows a bar on a terminal, and occasional lines elsewhere.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from agentrl.tracking.progress import duration

    console = Console(stderr=True)
    bar = Progress(
        TextColumn("scoring"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    responses = bar.add_task("scoring", total=None)
    began = said = time.monotonic()

    def watch(done: int, total: int) -> None:
        nonlocal said
        bar.update(responses, completed=done, total=total)
        now = time.monotonic()
        if not console.is_terminal and now - said >= LINE_EVERY_S:
            said = now
            left_s = (now - began) / done * (total - done)
            typer.echo(f"scored {done} of {total} responses, done in {duration(left_s)}", err=True)

    if not console.is_terminal:
        yield watch
    else:
        with bar:
            yield watch


def _show(scored: Sequence[ScoredResponse]) -> None:
    from rich.console import Console

    from agentrl.figures.summary import summarise

    if not scored:
        typer.echo("no row has a response")
        return
    summary = summarise([one.attempt() for one in scored])
    # In a file or pipe, a table line may be as long as necessary.
    Console(width=None if sys.stdout.isatty() else LINE_CHARACTERS).print(score_table(summary))
    for source in summary.sources:
        for warning in source.warnings:
            typer.echo(f"{source.name}: {warning}")
    kinds = Counter((one.source, one.failure) for one in scored if one.failure is not None)
    for (name, kind), num in sorted(kinds.items()):
        first = next(one for one in scored if (one.source, one.failure) == (name, kind))
        typer.echo(
            f"{name}: {num} not scored: {kind} (first: row {first.problem}, response {first.member}: "
            f"{first.message})"
        )


def score_table(summary: EvalSummary) -> Table:
    """Return one line per data source, and an overall line if there are several.

    95 % intervals are in brackets.
    """
    from rich.table import Table

    from agentrl.figures.summary import estimate_at
    from agentrl.figures.table import with_interval

    n = max(source.n for source in summary.shown)
    ks = sorted({n, *(2**i for i in range(1, n.bit_length()))})[-MAX_PASS_COLUMNS:] if n > 1 else []
    table = Table(
        "data source", "rows", "responses", "not scored", "score", f"mean@{n}", *(f"pass@{k}" for k in ks)
    )
    for source in summary.shown:
        counts = (source.num_problems, source.num_attempts, source.num_attempts - source.num_scored)
        passes = (estimate_at(source.pass_at, k) for k in ks)
        table.add_row(
            source.name, *map(str, counts), *map(with_interval, (source.reward, source.accuracy, *passes))
        )
    return table
