"""`agentrl generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.evaluation import (
    Agent,
    Arguments,
    Greedy,
    MaxTokens,
    MaxTurnTokens,
    MinP,
    Model,
    N,
    Rows,
    ServedModel,
    Temperature,
    Templates,
    Tools,
    TopK,
    TopP,
    load_base,
    say,
)
from agentrl.cli.options import Debug
from agentrl.config.storage_urls import shown_path
from agentrl.errors import InfrastructureError


def generate(
    source: Annotated[
        str, typer.Option("--in", metavar="IN.parquet", help="Rows in verl's schema; its columns are kept.")
    ],
    out: Annotated[
        str,
        typer.Option(
            metavar="OUT.parquet", help="File or URL to write: the rows with a column of responses."
        ),
    ],
    arguments: Arguments = None,
    model: Model = None,
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
    response_key: Annotated[str, typer.Option(help="Column to write.")] = "responses",
    debug: Debug = False,
) -> None:
    """Generate n responses for each row, without scoring them: `agentrl score` reads what is written.

    Attempts are kept in OUT.parquet.attempts as soon as they are finished: the same command resumes. If OUT
    is a URL, they stay on this machine.
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
    config, _ = load_base(arguments or [], sampling, tools=tools, templates=template or [])
    from agentrl.data.storage import local_path, mirrored_file
    from agentrl.evaluation.run import EvaluationRequest
    from agentrl.extras.research.generate import generate as run

    request = EvaluationRequest(
        config,
        model,
        (str(local_path(source)),),
        Path(),
        agent=agent,
        served_model=served_model,
        max_rows=rows,
    )
    with mirrored_file(out) as file:
        num_failed = run(request, file, response_key=response_key, say=say)
    typer.echo(f"wrote {shown_path(out)}")
    if num_failed:
        raise InfrastructureError(
            f"{num_failed} responses failed and are null; run the same command again to retry them"
        )
