"""Rows of OpenEnv servers, as Parquet files: each begins an episode once, to show its first observation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2
import pyarrow as pa

from agentrl.data.files import write_rows
from agentrl.errors import ConfigError, DataError, ToolError
from agentrl.extras.datatools.task_rows import RowStyle, row_schema
from agentrl.extras.hubs.openenv import (
    KEY,
    Episode,
    OpenEnvServer,
    headers_of,
    observation_text,
    url_of,
)
from agentrl.extras.hubs.openenv_session import ActionRefused, OpenEnvSession
from agentrl.plugins.options import read_options
from agentrl.types import JsonObject

INSTRUCTION = "Act in the environment until its episode is over: take one action at a time."
RESET_TIMEOUT_S = 60.0

_TEXT = pa.string()
_WORLD = pa.struct([("name", _TEXT), ("server", _TEXT), ("reset", _TEXT), ("shown", _TEXT), ("field", _TEXT)])
_PARTNER = pa.struct([("name", _TEXT)])
EPISODE_SCHEMA = row_schema(
    ("index", pa.int64()),
    ("split", _TEXT),
    ("environment_kwargs", _WORLD),
    ("interaction_kwargs", _PARTNER),
    ("tool_selection", pa.list_(_TEXT)),
)


@dataclass(frozen=True, slots=True)
class EpisodeRows:
    """Which rows to write.

    Attributes:
        episode: server, arguments of reset (the seed is added to them), what is shown.
        style: system message, and the template around the first observation.
        describes: whether the prompt describes the server's actions or tools.
    """

    episode: Episode
    style: RowStyle
    describes: bool
    seed: int
    num_train: int
    num_val: int


def read_server(text: str) -> tuple[str, OpenEnvServer]:
    """Return name and server of `NAME=URL` or `NAME={"command": [...]}`.

    Raises:
        ConfigError: it is neither.
    """
    name, _, given = text.partition("=")
    if not name or not given:
        raise ConfigError(
            f"--server={text[:80]!r}: should be NAME=URL, or NAME= and the server's options as JSON"
        )
    try:
        values = json.loads(given) if given.startswith("{") else {"url": given}
    except ValueError as error:
        raise ConfigError(f"--server {name}={given[:80]!r}: is not valid JSON: {error}") from error
    return name, read_options(OpenEnvServer, values, plugin=f"--server {name}")


def read_episode(server: str, reset: str, *, shown: str, field: str) -> Episode:
    """Return the episode of the command's options; `reset` is JSON.

    Raises:
        ConfigError: reset is no JSON object, or has a seed.
    """
    try:
        arguments = json.loads(reset)
    except ValueError as error:
        raise ConfigError(f"--reset: is not valid JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise ConfigError(f"--reset={reset[:80]!r}: should be a JSON object")
    if "seed" in arguments:
        raise ConfigError("--reset: the seed of each row is its own, from --seed on; leave it out")
    return Episode(server, arguments, shown, field)


def write_episodes(out: Path, server: OpenEnvServer, rows: EpisodeRows) -> dict[str, int]:
    """Write `train.parquet` and `val.parquet` into `out`; return the number of rows of each. The seeds of
    `val` come first, those of `train` after them.

    Raises:
        ToolError: the server cannot be reached, or its environment failed.
        DataError: it refuses the arguments of reset.
    """
    val, train = asyncio.run(_episodes(server, rows))
    return {
        split: write_rows(out / f"{split}.parquet", iter(made), EPISODE_SCHEMA)
        for split, made in (("train", train), ("val", val))
    }


async def _episodes(server: OpenEnvServer, rows: EpisodeRows) -> tuple[list[Any], list[Any]]:
    name = rows.episode.server
    url, headers = await url_of(name, server), headers_of(name, server)
    async with _session(url, headers) as session:
        tools = await _tools(session) if rows.describes and not rows.episode.field else []
    about = await _about(url, headers, tools) if rows.describes else ""
    starts = {"val": (rows.seed, rows.num_val), "train": (rows.seed + rows.num_val, rows.num_train)}
    made: dict[str, list[Any]] = {"val": [], "train": []}
    async with _session(url, headers) as session:
        for split, (first, count) in starts.items():
            for index in range(count):
                episode = replace(rows.episode, reset={**rows.episode.reset, "seed": first + index})
                seen = await _first_observation(session, episode)
                made[split].append(_row(split, index, episode, rows.style, about, seen, bool(tools)))
    return made["val"], made["train"]


@asynccontextmanager
async def _session(url: str, headers: Mapping[str, str]) -> AsyncIterator[OpenEnvSession]:
    session = OpenEnvSession(url, headers)
    try:
        await session.open()
        yield session
    finally:
        await session.close()


async def _first_observation(session: OpenEnvSession, episode: Episode) -> str:
    try:
        async with asyncio.timeout(RESET_TIMEOUT_S):
            observed = await session.reset(episode.reset)
    except TimeoutError as error:
        raise ToolError(
            f"OpenEnv server {episode.server!r}: reset {json.dumps(episode.reset)} took more than "
            f"{RESET_TIMEOUT_S:g} s"
        ) from error
    except ActionRefused as error:
        raise DataError(f"OpenEnv server {episode.server!r} refuses the reset: {error}") from error
    if observed.is_done:
        raise DataError(
            f"OpenEnv server {episode.server!r}: the episode {json.dumps(episode.reset)} is over at once"
        )
    return observation_text(observed.observation, episode.shown)


async def _tools(session: OpenEnvSession) -> list[JsonObject]:
    """Return the tools of an environment that has some; of any other, none."""
    await session.reset({})
    try:
        listed = await session.step({"type": "list_tools"})
    except (ActionRefused, ToolError):
        return []
    return [tool for tool in listed.observation.get("tools") or [] if isinstance(tool, dict)]


async def _about(url: str, headers: Mapping[str, str], tools: list[JsonObject]) -> str:
    """Return the description of the environment, and of its tools or actions."""
    metadata, schema = await _get(url, "/metadata", headers), await _get(url, "/schema", headers)
    description = str(metadata.get("description") or "").strip()
    if tools:
        lines = [
            f"{tool.get('name')}: {tool.get('description') or ''} {json.dumps(_arguments_of(tool))}"
            for tool in tools
        ]
        return "\n".join([description, "Tools:", *lines]).strip()
    action = schema.get("action") or {}
    fields = {key: value for key, value in action.get("properties", {}).items() if key != "metadata"}
    shown = {"properties": fields, "required": action.get("required", [])}
    return f"{description}\nAn action is a JSON object: {json.dumps(shown)}".strip()


def _arguments_of(tool: JsonObject) -> Any:
    return tool.get("input_schema") or tool.get("inputSchema") or {}


async def _get(url: str, path: str, headers: Mapping[str, str]) -> JsonObject:
    try:
        async with httpx2.AsyncClient(headers=dict(headers), timeout=RESET_TIMEOUT_S) as client:
            answer = await client.get(url.rstrip("/") + path)
            answer.raise_for_status()
            found = answer.json()
    except (httpx2.HTTPError, ValueError) as error:
        raise ToolError(f"OpenEnv server {url}{path} cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}


def _row(
    split: str, index: int, episode: Episode, style: RowStyle, about: str, seen: str, has_tools: bool
) -> dict[str, Any]:
    world = {
        "name": KEY,
        "server": episode.server,
        "reset": json.dumps(episode.reset, sort_keys=True),
        "shown": episode.shown,
        "field": episode.field,
    }
    is_by_turns = bool(episode.field)
    return {
        "data_source": f"{KEY}/{episode.server}",
        "prompt": style.prompt(f"{about}\n\n{seen}" if about else seen),
        "ability": "environment",
        "reward_model": {"style": "rule", "ground_truth": None},
        "extra_info": {
            "index": index,
            "split": split,
            "environment_kwargs": world,
            "interaction_kwargs": {"name": KEY} if is_by_turns else None,
            "tool_selection": [] if is_by_turns else ["call" if has_tools else "act"],
        },
        "agent_name": "interaction_agent" if is_by_turns else "tool_agent",
    }
