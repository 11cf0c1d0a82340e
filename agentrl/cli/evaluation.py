"""`agentrl eval` and `agentrl generate`: their options, and their output at the end."""

from __future__ import annotations

import dataclasses
import datetime
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.cli.options import Debug
from agentrl.config.storage_urls import is_url

if TYPE_CHECKING:
    from agentrl.config.schema import Config
    from agentrl.evaluation.report import Report
    from agentrl.evaluation.run import EvaluationRequest

WIDTH = 132
"""Width of the table, in characters, if there is no terminal that defines it."""
DEFAULT_CONFIG = "eval"
"""The packaged config, used if the command line names none."""

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG.yaml] [KEY=VALUE]...",
        help="Config of a run (optional) and overrides, as in `agentrl train`.",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER|HUB_ID|URL[,URL...]",
        help="Model folder or hub id, for which servers are started (rollout.backend), or URLs of "
        "running servers: of SGLang's protocol, or of OpenAI's if they end in /v1. Default: the "
        "model of the config.",
    ),
]
N = Annotated[int | None, typer.Option("--n", min=1, help="Attempts per problem (eval.n).")]
Agent = Annotated[
    str | None, typer.Option(help="Agent that plays all rows; default: each row's own, else agent.default.")
]
Tools = Annotated[
    str | None, typer.Option(metavar="NAME[,NAME...]", help="Tools that are offered (agent.tools).")
]
Templates = Annotated[
    list[str] | None,
    typer.Option(
        "--template",
        metavar="[DATA_SET=]NAME",
        help="Prompt template around the questions, of all datasets or of one.",
    ),
]
Greedy = Annotated[bool, typer.Option("--greedy", help="Greedy decoding (eval.temperature=0).")]
Temperature = Annotated[float | None, typer.Option(min=0, help="eval.temperature")]
TopP = Annotated[float | None, typer.Option("--top-p", min=0, max=1, help="eval.top_p")]
TopK = Annotated[int | None, typer.Option("--top-k", help="eval.top_k; -1: off.")]
MinP = Annotated[float | None, typer.Option("--min-p", min=0, max=1, help="eval.min_p")]
MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", min=1, help="Maximum tokens per attempt (eval.max_response_tokens)."),
]
MaxTurnTokens = Annotated[
    int | None,
    typer.Option("--max-turn-tokens", min=1, help="Maximum tokens per turn (eval.max_turn_tokens)."),
]
Rows = Annotated[int | None, typer.Option("--rows", min=1, help="Use only the first N rows of each dataset.")]
ServedModel = Annotated[
    str | None,
    typer.Option(
        "--served-model", help="Name of the model at an OpenAI-compatible URL; default: the only model there."
    ),
]


def evaluate(
    arguments: Arguments = None,
    model: Model = None,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE[,...]",
            help="Benchmarks (gsm8k, aime_2024, aime_2025, math_500) and files; default: data.val_files.",
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER|URL",
            help="Folder or URL (agentrl docs storage) of the results; default: runs/eval/MODEL.",
        ),
    ] = None,
    n: N = None,
    agent: Agent = None,
    tools: Tools = None,
    template: Templates = None,
    greedy: Greedy = False,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    max_tokens: MaxTokens = None,
    max_turn_tokens: MaxTurnTokens = None,
    rows: Rows = None,
    served_model: ServedModel = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the benchmarks' original files; default: $AGENTRL_DATA, else the Hugging Face "
            "hub."
        ),
    ] = None,
    trained_on: Annotated[
        str | None,
        typer.Option(
            metavar="FILE[,...]",
            help="Training files to search for the questions (contamination); default: data.train_files of "
            "CONFIG.",
        ),
    ] = None,
    fail_below: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE[.FIGURE]=VALUE",
            help="Exit with code 3 if a figure is below its threshold, such as gsm8k=0.5, gsm8k.pass@8=0.7.",
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Evaluate a model: the agents, tools, interactions and rewards of training, and figures with their
    intervals.

    Every finished attempt is kept at once: the same command resumes, and repeats nothing that was finished
    (docs/evaluation.md).
    """
    sampling = {
        "n": n,
        "temperature": 0.0 if greedy else temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "max_response_tokens": max_tokens,
        "max_turn_tokens": max_turn_tokens,
    }
    config, is_named = load_base(arguments or [], sampling, tools=tools, templates=template or [])
    from agentrl.evaluation.run import EvaluationRequest

    request = EvaluationRequest(
        config,
        model,
        tuple(_split(on)) or config.data.val_files,
        Path(),
        agent=agent,
        served_model=served_model,
        data_dir=data_dir,
        max_rows=rows,
    )
    files = _split(trained_on) or [
        file for file in config.data.train_files if is_named and (is_url(file) or Path(file).is_file())
    ]
    from agentrl.data.storage import mirrored_folder

    with mirrored_folder(
        out or default_folder(model or config.model.path or config.rollout.urls[:1])
    ) as folder:
        report = _evaluated(dataclasses.replace(request, folder=folder), files, fail_below or [])
    _show(report, out or str(folder))
    if report.failed_thresholds:
        from agentrl.figures.thresholds import EXIT_BELOW

        sys.exit(EXIT_BELOW)


def load_base(
    arguments: Sequence[str], sampling: Mapping[str, Any], *, tools: str | None, templates: Sequence[str]
) -> tuple[Config, bool]:
    """Return the config that results from arguments and options, and whether a file was named.

    Raises:
        ConfigError: the config is invalid, or a template or value is unknown.
    """
    from agentrl.config.compose import load_config

    is_named = bool(arguments) and "=" not in arguments[0] and not arguments[0].startswith("~")
    file, overrides = (arguments[0], arguments[1:]) if is_named else (DEFAULT_CONFIG, arguments)
    options = [f"eval.{name}={value}" for name, value in sampling.items() if value is not None]
    if tools is not None:
        options.append(f"agent.tools=[{tools}]")
    config = load_config(file, [*overrides, *options])
    named = {data_set or "*": name for data_set, _, name in (text.rpartition("=") for text in templates)}
    sampling_config = config.eval.model_copy(update={"templates": {**config.eval.templates, **named}})
    return config.model_copy(update={"eval": sampling_config}), is_named


def default_folder(model: str | Sequence[str]) -> Path:
    """Return the default results folder, named after the
    last part of the model's path or its first address.
    """
    name = model if isinstance(model, str) else next(iter(model), "")
    name = name.partition(",")[0].rstrip("/")
    name = name.partition("://")[2] if "://" in name else Path(name).name
    return Path("runs") / "eval" / (re.sub(r"[^\w.-]+", "_", name) or "model")


def _evaluated(
    request: EvaluationRequest, training_files: Sequence[str], fail_below: Sequence[str]
) -> Report:
    from agentrl.evaluation.contamination import refuse_unreadable
    from agentrl.evaluation.results import write_results
    from agentrl.evaluation.run import play_missing, prepare
    from agentrl.figures.thresholds import parse_threshold, refuse_unknown

    thresholds = [parse_threshold(text) for text in fail_below]
    refuse_unreadable(training_files, prompt_key=request.config.data.prompt_key)
    started, began = datetime.datetime.now().astimezone().isoformat(timespec="seconds"), time.monotonic()
    with prepare(request, say=say) as prepared:
        refuse_unknown(
            thresholds,
            sorted({problem.task.data_source for problem in prepared.problems}),
            n=prepared.config.eval.n,
        )
        play_missing(prepared, say=say)
        return write_results(
            prepared,
            started=started,
            seconds=time.monotonic() - began,
            training_files=training_files,
            thresholds=thresholds,
        )


def _show(report: Report, folder: str) -> None:
    from rich.console import Console

    from agentrl.evaluation.report import TEXT
    from agentrl.figures.table import summary_table

    console = Console()
    (console if console.is_terminal else Console(width=WIDTH)).print(summary_table(report.summary))
    for source in report.summary.sources:
        for warning in source.warnings:
            typer.echo(f"{source.name}: {warning}")
    for line in report.failed_thresholds:
        typer.echo(f"below its threshold: {line}", err=True)
    typer.echo(f"report: {folder.rstrip('/')}/{TEXT}")


def _split(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def say(text: str) -> None:
    typer.echo(text, err=True)
