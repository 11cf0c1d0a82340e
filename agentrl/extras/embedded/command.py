"""`agentrl serve`."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Literal

import typer

from agentrl.cli.options import Debug
from agentrl.errors import UserError


def serve(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder of the model, in Hugging Face format, or a hub id.")
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen on; any address except localhost needs --api-key-env.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: a free port.")] = 30000,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="Number format of weights and cache.")
    ] = "float32",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads; at most the machine's.")] = 1,
    num_blocks: Annotated[
        int | None,
        typer.Option(
            min=1, help="Blocks of the KV cache, of 32 tokens each; default: that of rollout.embedded."
        ),
    ] = None,
    max_batch_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens per forward pass; default: that of rollout.embedded."),
    ] = None,
    quantization: Annotated[
        Literal["none", "int8"], typer.Option(help="int8: matrix products in 8 bits, on a CPU with VNNI.")
    ] = "none",
    weight_version: Annotated[
        str, typer.Option(help="Weight version that replies report until the first update.")
    ] = "default",
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable that holds the API key.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Serve a model by the embedded server, which speaks SGLang's native protocol (docs/servers.md)."""
    from agentrl.config.model import ModelConfig
    from agentrl.config.rollout import EmbeddedServerConfig
    from agentrl.data.model_source import find_model
    from agentrl.extras.embedded.server import named_key, set_up_logging
    from agentrl.extras.embedded.server import serve as run

    if threads > (cores := os.cpu_count() or 1):
        raise UserError(f"--threads {threads}: this machine has {cores}; more threads than that are slower")
    given = {"threads": threads, "num_blocks": num_blocks, "max_batch_tokens": max_batch_tokens}
    given_values = {name: value for name, value in given.items() if value is not None}
    config = EmbeddedServerConfig(quantization=quantization, **given_values)
    set_up_logging()
    status = run(
        str(find_model(ModelConfig(path=model))),
        host=host,
        port=port,
        config=config,
        dtype=dtype,
        weight_version=weight_version,
        api_key=named_key(api_key_env),
    )
    sys.exit(status)
