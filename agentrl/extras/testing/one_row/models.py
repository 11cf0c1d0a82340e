"""The models of `agentrl play`: a person at the terminal, a script, or a server."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trio
import yaml

from agentrl.chat.chat import Chat
from agentrl.config.model import ModelConfig
from agentrl.config.rollout import RolloutConfig
from agentrl.config.yaml_files import read_nodes
from agentrl.errors import ConfigError, RequestRefused, ServerError
from agentrl.extras.testing.script import Call, Raw, Says, ScriptedModel, ScriptedTurn
from agentrl.rollout.limits import key_of_started, server_key
from agentrl.servers.client import SGLangClient
from agentrl.servers.launch import check_backend, launcher
from agentrl.servers.server import Client
from agentrl.servers.supervisor import Supervisor

PERSON = "person"
CALL = re.compile(r"/call\s+(\S+)\s*(.*)")
HELP = (
    'You are the model. End a turn with an empty line; `/call NAME {"argument": "value"}` calls a tool; '
    "Ctrl-D gives up."
)
PROBE_TIMEOUT_S = 10.0

Read = Callable[[], str | None]
"""Returns the next line typed; None at the end of the input."""
Say = Callable[[str], None]


class PersonModel(ScriptedModel):
    """Shows the new part of the prompt and lets a person type the turn."""

    def __init__(self, chat: Chat, *, read: Read, say: Say) -> None:
        super().__init__(chat, ())
        self._read, self._say = read, say
        self._shown = ""
        say(HELP)

    async def next_turn(self, index: int, prompt: str) -> ScriptedTurn:
        """Ask the person for a turn. The attempt's deadlines continue to run.

        Raises:
            RequestRefused: the person gave up.
        """
        self._say(prompt.removeprefix(self._shown))
        self._shown = prompt
        while True:
            lines = await trio.to_thread.run_sync(self._read_lines, abandon_on_cancel=True)
            try:
                return read_typed(lines)
            except ConfigError as error:
                self._say(str(error))

    def _read_lines(self) -> list[str]:
        lines: list[str] = []
        while (line := self._read()) is not None:
            if not line:
                return lines
            lines.append(line)
        if not lines:
            raise RequestRefused("the person gave up")
        return lines


def read_typed(lines: Sequence[str]) -> Says:
    """Parse a typed turn: its text, and one call for each line that begins with `/call`.

    Raises:
        ConfigError: the arguments of a call are not a JSON object.
    """
    text: list[str] = []
    calls: list[Call] = []
    for line in lines:
        if (found := CALL.fullmatch(line.strip())) is None:
            text.append(line)
            continue
        try:
            arguments = json.loads(found[2] or "{}")
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"/call {found[1]}: the arguments are not valid JSON: {error}; type the turn again"
            ) from error
        if not isinstance(arguments, dict):
            raise ConfigError(
                f"/call {found[1]}: the arguments must be a JSON object, are {found[2]}; type the turn again"
            )
        calls.append(Call(found[1], arguments))
    return Says("\n".join(text), tuple(calls))


def read_script(path: str) -> list[ScriptedTurn]:
    """Read the turns of a YAML file. Each turn is a text, {text, calls: [{name, arguments}], reasoning}, or
    {raw}.

    Raises:
        ConfigError: the file cannot be read or is malformed.
    """
    try:
        read_nodes(Path(path))
        turns = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"script {path!r} cannot be read: {error}") from error
    if not isinstance(turns, list):
        raise ConfigError(f"script {path!r} must be a list of turns, is {type(turns).__name__}")
    return [_scripted(turn, f"script {path!r}, turn {index}") for index, turn in enumerate(turns, start=1)]


def _scripted(turn: Any, where: str) -> ScriptedTurn:
    if isinstance(turn, str):
        return turn
    if not isinstance(turn, Mapping) or (unknown := set(turn) - {"text", "calls", "reasoning", "raw"}):
        what = f"unknown key {sorted(map(str, unknown))[0]!r}" if isinstance(turn, Mapping) else f"{turn!r}"
        raise ConfigError(f"{where}: {what}; write a text, or text, calls, reasoning, or raw")
    if "raw" in turn:
        return Raw(str(turn["raw"]))
    try:
        calls = tuple(
            Call(str(call["name"]), dict(call.get("arguments") or {})) for call in turn.get("calls") or ()
        )
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{where}: calls must be a list of {{name, arguments}}, is {turn['calls']!r}"
        ) from error
    return Says(str(turn.get("text") or ""), calls, str(turn.get("reasoning") or ""))


@contextmanager
def open_model(
    model: str,
    rollout: RolloutConfig,
    weights: ModelConfig,
    chat: Chat,
    *,
    starts_server: bool,
    read: Read,
    say: Say,
) -> Iterator[Client]:
    """Yield the client that generates: a person (`person`), a server (its URL, or one started here), or a
    script (a file).

    Raises:
        ConfigError: the script is malformed.
        ServerError: the server does not answer or does not start.
    """
    if starts_server:
        check_backend(rollout)
        key = key_of_started(rollout.api_key_env)
        with _started(rollout, weights, key, say) as url:
            yield _connected(url, key)
    elif model.startswith(("http://", "https://")):
        yield _connected(model, server_key(rollout.api_key_env))
    elif model == PERSON:
        yield PersonModel(chat, read=read, say=say)
    else:
        yield ScriptedModel(chat, read_script(model))


def _connected(url: str, key: str | None) -> SGLangClient:
    """Return a client of the server at `url`, after checking that it answers and reports the version of its
    weights.
    """
    client = SGLangClient(url, api_key=key)

    async def check() -> None:
        probe = SGLangClient(url, api_key=key)
        try:
            with trio.fail_after(PROBE_TIMEOUT_S):
                if (await probe.model_info()).version is None:
                    raise ServerError(
                        f"{url} has weights without a version; start it with --weight-version 0"
                    )
        except trio.TooSlowError:
            raise ServerError(f"--model {url} did not answer within {PROBE_TIMEOUT_S:g} s") from None
        except ServerError as error:
            raise ServerError(f"--model {url}: {error}", status=error.status) from error
        finally:
            await probe.aclose()

    trio.run(check)
    return client


@contextmanager
def _started(rollout: RolloutConfig, weights: ModelConfig, key: str, say: Say) -> Iterator[str]:
    """Start a server with the config's backend and model, yield its URL, and stop it at the end."""
    with tempfile.TemporaryDirectory(prefix="agentrl-play-") as folder:
        supervisor = Supervisor(
            launcher(rollout, weights, api_key=key),
            log_file=Path(folder) / "server.log",
            start_timeout_s=rollout.server_start_timeout_s,
            max_restarts=0,
        )
        say(f"starting the {rollout.backend} server ...")
        try:
            yield supervisor.start(weights.path, "0")
        finally:
            supervisor.stop()
