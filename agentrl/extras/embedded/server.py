"""The process of the embedded server: port, model, key, start, shutdown.

It exits with status 1 when the generation loop dies; its supervisor then restarts it.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from agentrl.chat.codec import load_tokenizer
from agentrl.config.model_kind import sees_images
from agentrl.config.rollout import EmbeddedServerConfig
from agentrl.data.image_layout import PLACEHOLDER, ImageLayout, ImageTokens
from agentrl.errors import UserError
from agentrl.extras.embedded.app import App, Decode, build_app
from agentrl.extras.embedded.engine import Engine
from agentrl.extras.embedded.image_rows import ImageRows
from agentrl.extras.embedded.layers import prepare_layers
from agentrl.extras.embedded.requests import GenerateRequest, RequestLimits
from agentrl.extras.embedded.sampler import GREEDY
from agentrl.extras.embedded.service import Service
from agentrl.extras.embedded.weights import Weights
from agentrl.heap import without_collections
from agentrl.loopback import is_local
from agentrl.plugins.sources import import_source

DEFAULT_WEIGHT_VERSION = "default"
"""SGLang's version of weights that were never published."""

_WATCH_INTERVAL_S = 0.2
_KEEP_ALIVE_S = 600
_SHUTDOWN_GRACE_S = 3

_log = logging.getLogger("agentrl.servers")


@dataclass(eq=False)
class _Ending:
    """Why the server shuts itself down. `server` is set once it exists."""

    server: uvicorn.Server | None = None
    reason: str | None = field(default=None)

    def end(self, reason: str) -> None:
        assert self.server is not None
        self.reason = reason
        _log.error("%s: the server ends", reason)
        self.server.should_exit = self.server.force_exit = True


def set_up_logging() -> None:
    """Log to standard error, without progress bars and the libraries' chatter."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.WARNING)
    disable_progress_bar()


def serve(
    model_path: str,
    *,
    host: str = "127.0.0.1",
    port: int = 30000,
    config: EmbeddedServerConfig | None = None,
    dtype: str = "float32",
    weight_version: str = DEFAULT_WEIGHT_VERSION,
    api_key: str | None = None,
    parent_pid: int | None = None,
    trust_remote_code: bool = False,
    external_lib: str | None = None,
) -> int:
    """Serve the model in a folder until SIGTERM or Ctrl-C; return the exit status.

    Args:
        port: 0 chooses a free port; the log line "listening on http://..." names it.
        weight_version: version that replies report until weights are published.
        api_key: required in every request. Mandatory if other machines can reach `host`.
        parent_pid: exit when this process is no longer the parent.
        trust_remote_code: run Python code that comes with the model.
        external_lib: `package.module` or `file.py` to import before the model is loaded.

    Raises:
        UserError: no model in the folder, the port is taken, the key is missing for a host that others
            reach, or `config` asks for what this processor does not have.
    """
    config = config or EmbeddedServerConfig()
    if not api_key and not is_local(host):
        raise UserError(
            f"host {host} is open to other machines: name an environment variable with an API key "
            "(--api-key-env), or use 127.0.0.1"
        )
    if not (Path(model_path) / "config.json").is_file():
        raise UserError(f"{model_path!r} is no model folder: it has no config.json")
    listener = _bind(host, port)
    torch.set_num_threads(config.threads)
    if external_lib is not None:
        import_source(external_lib)
    with without_collections():
        model = _load(model_path, dtype, trust_remote_code=trust_remote_code)
    prepare_layers(model, config.linear_kernels, config.quantization)
    images = ImageRows.of(model, Path(model_path))
    engine = Engine(model, config, images=images)
    limits = _limits(model, engine, model_path)
    ending = _Ending()

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        engine.start()
        watch = asyncio.create_task(_watch(engine, parent_pid, ending))
        await _warm_up(service)
        _log.info("listening on http://%s:%d", host, listener.getsockname()[1])
        yield
        watch.cancel()
        service.abort_all()

    service = Service(engine, Weights(model), model_path=model_path, version=weight_version)
    info = {
        "version": f"agentrl-{importlib.metadata.version('agentrl')}",
        "backend": "agentrl-embedded",
        "dtype": dtype,
        "enable_lora": True,
        "enable_return_routed_experts": engine.has_experts,
        **config.model_dump(),
    }
    routes = App(service, limits, decode=_decoder(model_path), info=info)
    app = build_app(routes, api_key=api_key, is_on_loopback=is_local(host), lifespan=lifespan)
    settings = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_SHUTDOWN_GRACE_S,
        lifespan="on",
    )
    ending.server = uvicorn.Server(settings)
    try:
        ending.server.run(sockets=[listener])
    finally:
        # not in the lifespan: a forced exit skips its end, and the engine's thread would keep the process
        # alive
        engine.stop()
    return 1 if ending.reason or not ending.server.started else 0


async def _watch(engine: Engine, parent_pid: int | None, ending: _Ending) -> None:
    while True:
        await asyncio.sleep(_WATCH_INTERVAL_S)
        if not engine.is_alive:
            return ending.end("the generation loop died")
        if parent_pid is not None and os.getppid() != parent_pid:
            return ending.end(f"the parent process {parent_pid} is gone")


async def _warm_up(service: Service) -> None:
    """Generate one token before the server is ready. A server that cannot fails here."""
    request = GenerateRequest(
        "warm-up", [0], 1, GREEDY, frozenset(), return_logprob=False, skip_special_tokens=True
    )
    await service.generate(request)
    service.is_warm = True


def named_key(variable: str | None) -> str | None:
    """Return the API key in `variable` of the environment, None for None; raise UserError if it is unset."""
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise UserError(f"the environment variable {variable} with the server's API key is not set")
    return os.environ[variable]


def _bind(host: str, port: int) -> socket.socket:
    # Bound before the model loads: a taken port is an error at once, not after minutes.
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"cannot listen on {host}:{port}: {error}; choose another --port, or 0 for a free one"
        ) from error
    return listener


def _load(model_path: str, dtype: str, *, trust_remote_code: bool) -> PreTrainedModel:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kind: Any = AutoModelForImageTextToText if sees_images(Path(model_path)) else AutoModelForCausalLM
    try:
        model, info = kind.from_pretrained(
            model_path,
            dtype=getattr(torch, dtype),
            attn_implementation="sdpa",
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"the model in {model_path!r} cannot be loaded: {str(error).splitlines()[0]}"
        ) from error
    # transformers draws what is missing at random and only warns.
    if missing := sorted(info["missing_keys"]):
        raise UserError(
            f"the model in {model_path!r} cannot be loaded: its files lack {len(missing)} weights, as "
            f"{missing[0]!r}; use the folder of a complete model"
        )
    loaded: PreTrainedModel = model.to(device)
    return loaded


def _limits(model: PreTrainedModel, engine: Engine, model_path: str) -> RequestLimits:
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context is None:
        raise UserError(
            f"the config of {model_path!r} does not say max_position_embeddings, the model's context length"
        )
    return RequestLimits(
        engine.vocab_size,
        int(context),
        engine.cache_tokens,
        _eos_ids(model),
        engine.has_experts,
        _image_tokens(model_path) if engine.has_images else None,
    )


def _image_tokens(model_path: str) -> ImageTokens | None:
    layout, folder = ImageLayout.read(Path(model_path)), Path(model_path)
    has_tokenizer = (folder / "tokenizer.json").is_file()
    placeholder = load_tokenizer(folder).token_to_id(PLACEHOLDER) if has_tokenizer else None
    return None if layout is None or placeholder is None else ImageTokens(layout, placeholder)


def _eos_ids(model: PreTrainedModel) -> frozenset[int]:
    ids: set[int] = set()
    for source in (model.config, model.generation_config):
        value = getattr(source, "eos_token_id", None)
        ids.update([value] if isinstance(value, int) else value or [])
    return frozenset(token for token in ids if token >= 0)


def _decoder(model_path: str) -> Decode:
    folder = Path(model_path)
    if not (folder / "tokenizer.json").is_file():
        return lambda ids, skip_special: ""
    tokenizer = load_tokenizer(folder)
    return lambda ids, skip_special: tokenizer.decode(ids, skip_special_tokens=skip_special)
