"""`agentrl export`."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

import typer

from agentrl.cli.options import Debug
from agentrl.config.storage_urls import shown


def export(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT", help="Folder or URL of a checkpoint: RUN/checkpoints/step_000020."
        ),
    ],
    out: Annotated[
        str,
        typer.Argument(metavar="OUT", help="Folder or URL to write; it must not exist."),
    ],
    adapter: Annotated[
        bool,
        typer.Option(
            "--adapter", help="Write only the LoRA adapter, in peft's format, instead of the merged model."
        ),
    ] = False,
    role: Annotated[
        str | None,
        typer.Option(help="Role whose adapter is meant (model.lora.roles); default: the policy's own."),
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="Folder or hub id of the base model, if it has moved.")
    ] = None,
    trust: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            help="Run the model code that the checkpoint names; refused without this option.",
        ),
    ] = False,
    verify: Annotated[
        Literal["sample", "full"],
        typer.Option(
            help="What is verified of the checkpoint first. full: every byte; sample: sizes of all files, "
            "and the bytes of all but large shards, of which 64 MiB each."
        ),
    ] = "sample",
    debug: Debug = False,
) -> None:
    """Write the policy of a checkpoint in Hugging Face format, as transformers and SGLang load it. Needs no
    Ray and no GPU.
    """
    from agentrl.data.storage import local_checkpoint, new_folder
    from agentrl.extras.export.export import export_checkpoint

    with new_folder(out) as folder:
        export_checkpoint(
            local_checkpoint(checkpoint),
            folder,
            adapter_only=adapter,
            role=role,
            base=base,
            trusts_code=trust,
            verify=verify,
            say=partial(typer.echo, err=True),
        )
    typer.echo(f"wrote {shown(out)}")
