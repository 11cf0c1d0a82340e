"""The environment `openenv`: an episode of an OpenEnv server, played by tools or by the turns themselves."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from agentrl.errors import DataError, EnvironmentFailed, PluginError, ToolError
from agentrl.extras.hubs.openenv_session import ActionRefused, Observed, OpenEnvSession, ServerFull
from agentrl.extras.hubs.process import HubProgram, hub_process
from agentrl.extras.hubs.shared import shared
from agentrl.extras.hubs.variables import clean_environment, header_values
from agentrl.plugins import (
    Attempted,
    Environment,
    Interaction,
    InteractionReply,
    Reward,
    RewardResult,
    WrongCall,
    tool,
)
from agentrl.plugins.options import Options, read_options
from agentrl.types import JsonObject, Message

KEY = "openenv"
"""Name of the environment, of its partner and of the reward, and first part of the data source."""
FULL_PAUSE_S = 0.5
"""Seconds between two tries to get a session of a server that has none free."""


class OpenEnvServer(Options):
    """A server that runs, or a command that starts one: exactly one of `url` and `command`."""

    url: str | None = Field(None, description="URL of a running server.")
    command: tuple[str, ...] = Field(
        (),
        description="Starts a server on 127.0.0.1, one per rollout process; `{port}` is a free port.",
    )
    env: dict[str, str] = Field(default_factory=dict, description="Variables of the command.")
    pass_env: tuple[str, ...] = Field((), description="Variables of the run that the command gets, too.")
    headers_env: dict[str, str] = Field(
        default_factory=dict, description="HTTP header -> environment variable with its value."
    )
    max_sessions: int = Field(
        16,
        ge=1,
        description="Episodes at a time of each rollout process; further attempts wait in their start.",
    )
    start_timeout_s: float = Field(120.0, gt=0, description="Deadline of the command's start.")

    @model_validator(mode="after")
    def _has_one_place(self) -> OpenEnvServer:
        if (self.url is None) == (not self.command):
            raise ValueError("set either url or command")
        if self.url is not None and urlsplit(self.url).scheme not in ("http", "https"):
            raise ValueError(f"url {self.url!r} should begin with http:// or https://")
        if self.command and not any("{port}" in word for word in self.command):
            raise ValueError("command: write {port} where the server gets its port")
        return self


class OpenEnvOptions(Options):
    """Options in `agent.environment_config.openenv`. Rows say which server they need by its name here."""

    servers: dict[str, OpenEnvServer]


def program_of(name: str, server: OpenEnvServer) -> HubProgram:
    """Return the hub process that keeps the server of a command.

    Raises:
        ConfigError: a variable that it gets is not set.
    """
    passed = clean_environment(
        server.pass_env, key=f"agent.environment_config.openenv.servers.{name}.pass_env"
    )
    variables = tuple(sorted({**passed, **server.env}.items()))
    return HubProgram(f"OpenEnv server {name!r}", sys.executable, "agentrl_server.py", variables)


def headers_of(name: str, server: OpenEnvServer) -> dict[str, str]:
    """Return the HTTP headers; raises as `header_values`."""
    return header_values(
        server.headers_env, key=f"agent.environment_config.openenv.servers.{name}.headers_env"
    )


async def url_of(name: str, server: OpenEnvServer) -> str:
    """Return the server's URL, after starting it if need be.

    Raises:
        ToolError: its command failed.
    """
    if server.url is not None:
        return server.url
    asked = {"command": list(server.command), "health": "/health"}
    try:
        async with asyncio.timeout(server.start_timeout_s):
            found: str = await hub_process(program_of(name, server)).call("url", asked)
    except TimeoutError as error:
        raise ToolError(
            f"OpenEnv server {name!r} was not healthy within {server.start_timeout_s:g} s"
        ) from error
    except EnvironmentFailed as error:
        raise ToolError(str(error)) from error
    return found


@dataclass(frozen=True, slots=True)
class Episode:
    """What a row says of its episode.

    Attributes:
        server: name of a server of the config.
        reset: arguments of the server's reset.
        shown: the field of the observation that the policy reads; "": all of them, as JSON.
        field: the field of the action that a turn's text becomes; "": the policy acts by tools.
    """

    server: str
    reset: JsonObject
    shown: str = ""
    field: str = ""

    @classmethod
    def of(cls, kwargs: Mapping[str, Any]) -> Episode:
        """Read a row's `environment_kwargs`.

        Raises:
            DataError: a key is unknown, missing, or has a value of another type.
        """
        if unknown := sorted(kwargs.keys() - {"server", "reset", "shown", "field"}):
            raise DataError(
                f"environment {KEY!r}: unknown environment_kwargs {', '.join(unknown)}; should be server, "
                "reset, shown and field"
            )
        texts = {key: kwargs.get(key) or "" for key in ("server", "shown", "field")}
        try:
            reset = json.loads(kwargs.get("reset") or "{}")
        except (TypeError, ValueError):
            reset = None
        if not all(isinstance(text, str) for text in texts.values()) or not isinstance(reset, dict):
            raise DataError(
                f"environment {KEY!r}: environment_kwargs need texts, and reset as a JSON object, are "
                f"{str(dict(kwargs))[:200]}"
            )
        return cls(texts["server"], reset, texts["shown"], texts["field"])


class OpenEnv(Environment):
    """An episode of a server: played by the tools `act` and `call`, or by turns (the partner `openenv`)."""

    name: ClassVar[str] = KEY

    def __init__(self, config: JsonObject | None = None) -> None:
        super().__init__(config)
        self._options = read_options(OpenEnvOptions, self.config, plugin=f"environment {self.name!r}")
        self._session: OpenEnvSession | None = None
        self._slots: asyncio.Semaphore | None = None
        self._rewards: list[float] = []
        self._num_steps = 0
        self._is_done = False

    async def start(self, **environment_kwargs: Any) -> None:
        """Open a session and begin the episode.

        Raises:
            DataError: the row names no server of the config.
            ToolError: the server cannot be reached, or its environment failed.
        """
        self._episode = Episode.of(environment_kwargs)
        name = self._episode.server
        if name not in self._options.servers:
            raise DataError(
                f"environment {KEY!r}: the row needs the server {name!r}; agent.environment_config.openenv."
                f"servers has {', '.join(sorted(self._options.servers)) or 'none'}"
            )
        server = self._options.servers[name]
        slots = shared((KEY, name, server.max_sessions), lambda: asyncio.Semaphore(server.max_sessions))
        await slots.acquire()
        self._slots = slots
        url, headers = await url_of(name, server), headers_of(name, server)
        while True:
            session = self._session = OpenEnvSession(url, headers)
            await session.open()
            try:
                self._is_done = (await session.reset(self._episode.reset)).is_done
                return
            except ServerFull:  # other processes may have its sessions; agent.environment_timeout_s ends this
                await session.close()
                await asyncio.sleep(FULL_PAUSE_S)
            except ActionRefused as error:
                raise DataError(
                    f"environment {KEY!r}: the server refuses the row's reset: {error}"
                ) from error

    @tool
    async def act(self, action: dict[str, Any]) -> str:
        """Take the next action and see what it leads to.

        Args:
            action: the fields of the action, as they were described.
        """
        return self.shown(await self.step(action))

    @tool
    async def call(self, tool: str, arguments: dict[str, Any]) -> str:
        """Call one of the tools that were described, and read its answer.

        Args:
            tool: the name of the tool.
            arguments: its arguments.
        """
        observed = await self.step({"type": "call_tool", "tool_name": tool, "arguments": arguments})
        error = observed.observation.get("error")
        if isinstance(error, dict):
            raise WrongCall(str(error.get("message", error))[:500])
        return answer_text(observed.observation.get("result"))

    async def step(self, action: JsonObject) -> Observed:
        """Take an action.

        Raises:
            WrongCall: the episode is over, or the server has no such action.
            ToolError: the environment failed, or the server is lost.
        """
        if self._is_done:
            raise WrongCall("the episode is over")
        assert self._session is not None, "tools are called between `start` and `close`"
        try:
            observed = await self._session.step(action)
        except ActionRefused as error:
            raise WrongCall(str(error)) from error
        self._num_steps += 1
        return self._took(observed)

    async def say(self, text: str) -> str:
        """Take a turn's text as the action, and return what is shown; raises as `step`."""
        if not self._episode.field:
            raise PluginError(
                "the partner 'openenv' needs environment_kwargs.field: the field of the action that is the "
                "turn's text"
            )
        return self.shown(await self.step({self._episode.field: text}))

    def shown(self, observed: Observed) -> str:
        """Return the text of an observation."""
        text = observation_text(observed.observation, self._episode.shown)
        return f"{text}\n(the episode is over)" if observed.is_done else text

    @property
    def is_done(self) -> bool:
        return self._is_done

    async def facts(self) -> JsonObject:
        """Return rewards and length of the episode.

        Raises:
            ToolError: the session was lost: what was earned is not known.
        """
        if self._session is not None and self._session.is_broken:
            raise ToolError(f"OpenEnv server {self._episode.server!r}: a step was not answered")
        return {
            "return": sum(self._rewards),
            "last_reward": self._rewards[-1] if self._rewards else 0.0,
            "steps": self._num_steps,
            "is_done": self._is_done,
        }

    async def close(self) -> None:
        session, self._session = self._session, None
        slots, self._slots = self._slots, None
        try:
            if session is not None:
                await session.close()
        finally:
            if slots is not None:
                slots.release()

    def _took(self, observed: Observed) -> Observed:
        if observed.reward is not None:
            self._rewards.append(observed.reward)
        self._is_done = observed.is_done
        return observed


class OpenEnvPartner(Interaction):
    """Takes each turn's text as the action, and replies with what it leads to."""

    name: ClassVar[str] = KEY

    async def start(self, **unknown: Any) -> None:
        if unknown or not isinstance(self.environment, OpenEnv):
            raise DataError(
                "the partner 'openenv' has no interaction_kwargs, and needs the environment 'openenv'; write "
                "rows with `agentrl data openenv --field NAME`"
            )

    async def respond(self, messages: Sequence[Message]) -> InteractionReply:
        try:
            text = await self.environment.say(messages[-1].content)
        except WrongCall as error:
            text = f"error: {error}"
        return InteractionReply(text, is_done=self.environment.is_done)


class OpenEnvRewardOptions(Options):
    """`of`: the sum of the episode's rewards, or the last one. `scale`: it is multiplied by it."""

    of: Literal["sum", "last"] = "sum"
    scale: float = 1.0


class OpenEnvReward(Reward):
    """The rewards of the server. Metrics: steps, is_done."""

    name: ClassVar[str] = KEY

    def __init__(self, config: JsonObject | None = None) -> None:
        super().__init__(config)
        self._options = read_options(OpenEnvRewardOptions, self.config, plugin=f"reward {self.name!r}")

    def score(self, attempt: Attempted) -> RewardResult | None:
        """Return the reward, or None if the attempt had no episode."""
        facts = attempt.facts
        if not {"return", "last_reward", "steps", "is_done"} <= facts.keys():
            return None
        value = facts["return" if self._options.of == "sum" else "last_reward"]
        metrics = {"steps": float(facts["steps"]), "is_done": float(facts["is_done"])}
        return RewardResult(self._options.scale * float(value), metrics)


def observation_text(observation: JsonObject, shown: str) -> str:
    """Return the field `shown` of an observation; all fields as JSON if `shown` is "".

    Raises:
        ToolError: it has no such field.
    """
    if not shown:
        return json.dumps(observation, ensure_ascii=False)
    if shown not in observation:
        raise ToolError(
            f"the observation has no field {shown!r}; it has {', '.join(sorted(observation)) or 'none'}"
        )
    value = observation[shown]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def answer_text(result: Any) -> str:
    """Return a tool's result as text: the texts of its content, or the whole as JSON."""
    content = result.get("content") if isinstance(result, dict) else None
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        return "\n".join(str(part.get("text", f"[{part.get('type')} omitted]")) for part in content)
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
