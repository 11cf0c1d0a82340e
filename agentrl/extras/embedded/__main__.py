"""`python -m agentrl.extras.embedded MODEL --port N`: the embedded server as a process of its own."""

from __future__ import annotations

import argparse
import sys
from typing import get_args

from agentrl.errors import UserError
from agentrl.heap import without_collections

with without_collections():
    from agentrl.config.rollout import EmbeddedServerConfig
    from agentrl.extras.embedded.server import DEFAULT_WEIGHT_VERSION, named_key, serve, set_up_logging


def main(arguments: list[str] | None = None) -> int:
    options = vars(_parser().parse_args(arguments))
    config = EmbeddedServerConfig(**{name: options.pop(name) for name in EmbeddedServerConfig.model_fields})
    variable, is_piped = options.pop("api_key_env"), options.pop("api_key_stdin")
    set_up_logging()
    try:
        api_key = sys.stdin.readline().rstrip("\n") if is_piped else named_key(variable)
        return serve(options.pop("model"), config=config, api_key=api_key, **options)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m agentrl.extras.embedded", description="Serve a model with SGLang's native protocol."
    )
    parser.add_argument("model", help="folder of the model")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; others than this machine's need an API key"
    )
    parser.add_argument("--port", type=int, default=30000, help="0: a free one")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument(
        "--weight-version",
        default=DEFAULT_WEIGHT_VERSION,
        help="version that replies report until weights are published",
    )
    parser.add_argument(
        "--api-key-env", help="environment variable with the API key that requests must carry"
    )
    parser.add_argument(
        "--api-key-stdin", action="store_true", help="the key is the first line of the standard input"
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run Python code that comes with the model"
    )
    parser.add_argument("--external-lib", help="module or file.py imported before the model is loaded")
    parser.add_argument("--parent-pid", type=int, help="end when this process is no longer the parent")
    for name, field in EmbeddedServerConfig.model_fields.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(field.default),
            choices=get_args(field.annotation) or None,  # of a Literal
            default=field.default,
            help=field.description,
        )
    return parser


if __name__ == "__main__":
    sys.exit(main())
