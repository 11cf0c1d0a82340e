"""Location of an evaluated model: a folder, for which servers are started, or URLs of running servers."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, Protocol, TypeVar
from urllib.parse import urlsplit

import trio

from agentrl.config.model import ModelConfig
from agentrl.config.rollout import RolloutConfig
from agentrl.config.storage_urls import SCHEMES, is_url
from agentrl.data.model_source import resolve_model
from agentrl.errors import ConfigError, ServerError
from agentrl.evaluation.attempt_keys import fingerprint
from agentrl.evaluation.scratch import scratch_folder
from agentrl.rollout.limits import key_of_started, server_key
from agentrl.rollout.message_model import served_models
from agentrl.servers.client import SGLangClient
from agentrl.servers.health import ServerStatus
from agentrl.servers.launch import check_backend, launcher
from agentrl.servers.protocol import ModelInfo
from agentrl.servers.supervisor import Supervisor

PROBE_TIMEOUT_S = 30.0
OPENAI_PATH = "/v1"
"""Ending of the URL of an OpenAI-compatible server. All other URLs use SGLang's native protocol."""
_NO_ROUTE = frozenset({200, 404, 405, 501})
"""Statuses of an error about what was asked, or about a body that nobody expects."""
UNPUBLISHED_VERSION = 0
"""Version of tokens from a server that was started without
`--weight-version`: it does not matter without training.
"""

Say = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ModelPlace:
    """A folder or hub id (`kind` is folder, no urls), or
    URLs of servers with SGLang's or OpenAI's protocol. named_by: the option or key that names the URLs.
    """

    kind: Literal["folder", "sglang", "openai"]
    urls: tuple[str, ...] = ()
    named_by: str = "--model"


def read_place(
    model: str | None, config: ModelConfig, *, urls: Sequence[str]
) -> tuple[ModelPlace, ModelConfig]:
    """Return the location of the model, and the section `model` with this model.

    `model` is the option `--model`; None: the config's model, or the running servers at `urls`.

    Raises:
        ConfigError: the URLs are of two kinds, or one of the names is not a URL.
    """
    urls = (
        tuple(urls)
        if model is None
        else tuple(part.strip().rstrip("/") for part in model.split(",") if _is_server(part))
    )
    if not urls:
        own = {} if model is None else {"path": model, "revision": None}
        return ModelPlace("folder"), config.model_copy(update=own)
    if model is not None and len(urls) < len(model.split(",")):
        raise ConfigError(f"--model {model!r}: give one folder, or only URLs")
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(
                f"--model {url!r} is not the URL of a server; write http://HOST:PORT, or http://HOST:PORT/v1 "
                "for OpenAI's protocol"
            )
    kinds = {urlsplit(url).path.endswith(OPENAI_PATH) for url in urls}
    if len(kinds) > 1:
        raise ConfigError(
            f"--model {model!r}: all URLs must have the same protocol: either all end in {OPENAI_PATH} "
            "(OpenAI's), or none (SGLang's)"
        )
    named_by = "rollout.urls" if model is None else "--model"
    return ModelPlace("openai" if kinds.pop() else "sglang", urls, named_by), config


def _is_server(text: str) -> bool:
    """Return whether a part of `--model` is an address of a server, and not a folder in object storage."""
    return is_url(text.strip()) and text.strip().partition("://")[0] not in SCHEMES


class Servers(Protocol):
    """The servers of an evaluation."""

    @property
    def api_key(self) -> str | None:
        """API key for the servers; None: they need none."""

    def urls(self) -> Sequence[str]:
        """Return the URLs of the servers currently known to answer.

        Raises:
            ServerError: a server failed permanently.
        """

    def statuses(self) -> Sequence[ServerStatus]:
        """Return the status of each server, for display."""


@dataclass(frozen=True, slots=True)
class RunningServers:
    """Servers that already run and are managed elsewhere."""

    addresses: tuple[str, ...]
    api_key: str | None = field(repr=False)

    def urls(self) -> Sequence[str]:
        return self.addresses

    def statuses(self) -> Sequence[ServerStatus]:
        return [ServerStatus(url, "ready") for url in self.addresses]


@dataclass(frozen=True, slots=True)
class StartedServers:
    """Servers started by this process. A server that dies is restarted at another address."""

    supervisors: tuple[Supervisor, ...]
    api_key: str = field(repr=False)

    def urls(self) -> Sequence[str]:
        statuses = self.statuses()
        failed = [status.message for status in statuses if status.state == "failed"]
        if failed:
            raise ServerError(f"a server failed permanently: {failed[0]}")
        return [status.url for status in statuses if status.state in ("needs_weights", "ready")]

    def statuses(self) -> Sequence[ServerStatus]:
        return [supervisor.status() for supervisor in self.supervisors]


@dataclass(frozen=True, slots=True)
class KnownModel:
    """The section `model` with local folders, and the identity of the weights.

    `served_name` is the model's name at an OpenAI-compatible URL, else None.
    """

    config: ModelConfig
    identity: str
    served_name: str | None = None


def describe_model(
    place: ModelPlace, config: ModelConfig, *, api_key_env: str | None, served_name: str | None = None
) -> KnownModel:
    """Determine the model's identity before anything is generated. Running servers are asked for their model.

    Raises:
        ConfigError: the model or its tokenizer cannot be found.
        ServerError: a running server does not answer, or the servers have different weights.
    """
    if place.kind == "folder":
        resolved = resolve_model(config)
        return KnownModel(resolved, fingerprint(resolved.path))
    api_key = server_key(api_key_env)
    if place.kind == "openai":
        name = trio.run(_served_name, place, api_key, served_name)
        return KnownModel(config, f"{name} at {', '.join(sorted(place.urls))}", name)
    infos = trio.run(_infos, place, api_key)
    if len(set(infos)) > 1:
        shown = ", ".join(
            f"{url}: {info.model_path} version {info.version}"
            for url, info in zip(place.urls, infos, strict=True)
        )
        raise ServerError(f"the servers have different weights: {shown}")
    return KnownModel(_with_tokenizer(config, infos[0]), identity_of(infos[0]))


@contextmanager
def open_servers(
    place: ModelPlace, config: RolloutConfig, model: ModelConfig, *, say: Say
) -> Iterator[Servers]:
    """Yield the running servers, or start servers for the folder, which are stopped afterwards.

    Raises:
        ServerError: a server does not start.
    """
    if place.urls:
        yield RunningServers(place.urls, server_key(config.api_key_env))
        return
    check_backend(config)
    count, key = max(config.num_started, 1), key_of_started(config.api_key_env)
    with scratch_folder() as folder, ExitStack() as stack:
        supervisors = tuple(
            Supervisor(
                launcher(config, model, api_key=key),
                log_file=folder / f"server_{index}.log",
                start_timeout_s=config.server_start_timeout_s,
                hang_timeout_s=config.server_hang_timeout_s,
                max_restarts=config.max_server_restarts,
            )
            for index in range(count)
        )
        say(f"starting {count} {config.backend} server{'s' if count > 1 else ''} of {model.path}")
        began = time.monotonic()
        for supervisor in supervisors:
            stack.callback(supervisor.stop)
            supervisor.start(model.path, str(UNPUBLISHED_VERSION))
        say(f"started in {time.monotonic() - began:.0f} s")
        yield StartedServers(supervisors, key)


def identity_of(info: ModelInfo) -> str:
    """Return the identity of a running server's weights.

    It is the fingerprint of the folder, if the server read the weights from a folder that exists locally.
    """
    is_as_in_folder = info.version in (None, 0) and (Path(info.model_path) / "config.json").is_file()
    return fingerprint(info.model_path) if is_as_in_folder else f"{info.model_path}@{info.version}"


def _with_tokenizer(model: ModelConfig, info: ModelInfo) -> ModelConfig:
    """Return the section of the model whose tokenizer writes the prompts.

    It is the config's model, or that of the server's folder if the folder exists locally.
    """
    if not model.path and not model.tokenizer_path:
        if not Path(info.model_path).is_dir():
            raise ConfigError(
                f"the server serves {info.model_path!r}, which is not a local folder; set its "
                "tokenizer: model.tokenizer_path=FOLDER_OR_HUB_ID"
            )
        model = model.model_copy(update={"path": info.model_path})
    return resolve_model(model, with_weights=False)


async def _served_name(place: ModelPlace, api_key: str | None, wanted: str | None) -> str:
    """Return the name of the model that all servers offer: the wanted one, or the only common one."""
    urls = place.urls
    listed = [
        await _answered(place.named_by, url, partial(served_models, url, api_key=api_key)) for url in urls
    ]
    common = [name for name in listed[0] if all(name in names for names in listed)]
    if wanted is not None and wanted not in common:
        raise ConfigError(
            f"--served-model {wanted!r} is not served; {urls[0]} has {', '.join(listed[0]) or 'no models'}"
        )
    if wanted is None and len(common) != 1:
        raise ConfigError(
            f"{', '.join(urls)}: choose the model with --served-model; served by all: "
            f"{', '.join(common) or 'none'}"
        )
    return wanted or common[0]


async def _answered(named_by: str, url: str, question: Callable[[], Awaitable[T]]) -> T:
    try:
        with trio.move_on_after(PROBE_TIMEOUT_S):
            return await question()
    except ServerError as error:
        other = ": another kind of server?" if error.status in _NO_ROUTE else ""
        raise ServerError(f"{named_by} {url}: {error}{other}", status=error.status) from error
    raise ServerError(f"{named_by} {url} did not answer within {PROBE_TIMEOUT_S:g} s")


async def _infos(place: ModelPlace, api_key: str | None) -> list[ModelInfo]:
    infos = []
    for url in place.urls:
        client = SGLangClient(url, api_key=api_key)
        try:
            infos.append(await _answered(place.named_by, url, client.model_info))
        finally:
            await client.aclose()
    return infos
