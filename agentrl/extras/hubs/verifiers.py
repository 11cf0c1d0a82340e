"""Environments of the package verifiers: their own rollouts, with the policy behind the gateway.

They run in a hub process, because the package needs other versions than this one. Their rollout asks for
turns at the attempt's endpoint, which records the tokens; reward and metrics come back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field

from agentrl.errors import DataError, EnvironmentFailed, PluginError
from agentrl.extras.hubs.interpreter import InterpreterOptions, interpreter_program
from agentrl.extras.hubs.process import HubProcess, HubProgram, hub_process
from agentrl.plugins import (
    AgentLoop,
    Attempted,
    Environment,
    GroupReward,
    OpenAIEndpoint,
    Reward,
    RewardResult,
    Session,
)
from agentrl.plugins.options import Options, read_options
from agentrl.types import JsonObject, Task

KEY = "verifiers"
"""Name of the environment, of its agent and of the reward, and first part of the data source."""


class VerifiersOptions(InterpreterOptions):
    """Options in `agent.environment_config.verifiers`."""

    seat: dict[str, Any] = Field(
        default_factory=dict,
        description="The seat of the policy, as verifiers' `[env.agent]` has it: harness, runtime, limits.",
    )


def program_of(options: VerifiersOptions) -> HubProgram:
    """Return the hub process of these options; raises as `interpreter_program`."""
    return interpreter_program(options, world=KEY, script="agentrl_verifiers.py")


class VerifiersEnvironment(Environment):
    """A task of an environment of verifiers. The agent `verifiers` plays it."""

    name: ClassVar[str] = KEY

    def __init__(self, config: JsonObject | None = None) -> None:
        super().__init__(config)
        self._options = read_options(VerifiersOptions, self.config, plugin=f"environment {self.name!r}")
        self._program = program_of(self._options)
        self._played: JsonObject | None = None

    async def start(
        self, *, environment: str = "", arguments: str = "{}", task: str = "", **unknown: Any
    ) -> None:
        """Read the row.

        Args:
            environment: name of the environment.
            arguments: of `load_environment`, or options of the taskset, as JSON.
            task: the task's data, as JSON.

        Raises:
            DataError: the row names no environment, or its JSON makes no sense.
        """
        if unknown or not environment:
            raise DataError(
                f"environment {KEY!r}: environment_kwargs need environment, arguments and task; write "
                "rows with `agentrl data verifiers`"
            )
        self._environment = environment
        self._arguments, self._task = _object(arguments, "arguments"), _object(task, "task")
        self._scorer = RolloutScorer.of(self._program, environment, self._arguments, self._options.seat)

    async def play(self, endpoint: OpenAIEndpoint) -> None:
        """Have verifiers play the task, with the policy at `endpoint`. Runs under asyncio.

        Raises:
            DataError: verifiers refuses the environment or its arguments.
            EnvironmentFailed: the rollout failed, or the process.
        """
        asked = {
            "environment": self._environment,
            "arguments": self._arguments,
            "seat": self._options.seat,
            "task": self._task,
            "base_url": endpoint.base_url,
            "api_key": endpoint.api_key,
            "model": endpoint.model,
        }
        played = await self._process().call("play", asked)
        if "error" in played:
            raise EnvironmentFailed(
                f"environment {self._environment!r} of verifiers failed: {played['error']}"
            )
        self._played = played

    async def facts(self) -> JsonObject:
        played = self._played or {}
        return {
            "environment": getattr(self, "_environment", ""),
            "reward": played.get("reward"),
            "metrics": played.get("metrics", {}),
            "stop": played.get("stop"),
            **({"rollout": played["rollout"], "scorer": self._scorer} if "rollout" in played else {}),
        }

    def _process(self) -> HubProcess:
        return hub_process(self._program)


@dataclass(frozen=True, slots=True)
class RolloutScorer:
    """Where the attempts of a group are scored together: an environment in a hub process.

    A reward of a group does not see the environments of its attempts, only their facts. So the facts name the
    scorer that their rollout process knows.
    """

    program: HubProgram
    asked: JsonObject

    @classmethod
    def of(cls, program: HubProgram, environment: str, arguments: JsonObject, seat: JsonObject) -> str:
        """Make a scorer known to this process, and return its name."""
        asked = {"environment": environment, "arguments": arguments, "seat": seat}
        name = json.dumps(asked, sort_keys=True)
        _SCORERS[name] = cls(program, asked)
        return name

    async def score(self, rollouts: Sequence[JsonObject]) -> list[JsonObject]:
        """Return reward and metrics of each rollout.

        Raises:
            EnvironmentFailed: the environment raised, or the process failed.
        """
        asked = {**self.asked, "rollouts": list(rollouts)}
        scored: list[JsonObject] = await hub_process(self.program).call("score", asked)
        return scored


_SCORERS: dict[str, RolloutScorer] = {}


class VerifiersAgent(AgentLoop):
    """Leaves the attempt to the rollout of verifiers. The attempt ends when the rollout does."""

    name: ClassVar[str] = KEY
    uses_tools: ClassVar[bool] = False  # the environment brings its own

    async def run(self, task: Task, session: Session) -> None:
        world = session.environment
        if not isinstance(world, VerifiersEnvironment):
            raise PluginError(
                f"task {task.task_id}: the agent 'verifiers' needs the environment 'verifiers'; write rows "
                "with `agentrl data verifiers`"
            )
        async with session.serve_openai() as endpoint:
            await session.run_asyncio(world.play, endpoint)


class VerifiersRewardOptions(Options):
    """`scale`: the reward is multiplied by it. `cut_off`: the reward of an attempt that a budget of the run
    ended; verifiers gives it none.
    """

    scale: float = 1.0
    cut_off: float = 0.0


class VerifiersReward(Reward):
    """The reward that verifiers gave. Metrics: its metrics and the parts of its reward, and is_cut_off."""

    name: ClassVar[str] = KEY

    def __init__(self, config: JsonObject | None = None) -> None:
        super().__init__(config)
        self._options = read_options(VerifiersRewardOptions, self.config, plugin=f"reward {self.name!r}")

    def score(self, attempt: Attempted) -> RewardResult | None:
        """Return the reward, or None if the attempt had no environment of verifiers."""
        facts = attempt.facts
        if not {"environment", "reward", "metrics"} <= facts.keys():
            return None
        if "rollout" in facts:
            raise PluginError(
                f"environment {facts['environment']!r} of verifiers scores a group together: set "
                f'reward.sources={{"{KEY}/{facts["environment"]}": "{VerifiersGroupReward.name}"}}'
            )
        if facts["reward"] is None:
            return RewardResult(self._options.cut_off, {"is_cut_off": 1.0})
        metrics: Mapping[str, float] = facts["metrics"]
        return RewardResult(self._options.scale * facts["reward"], {**metrics, "is_cut_off": 0.0})


class VerifiersGroupReward(GroupReward):
    """The rewards of an environment that scores a group together (`load_environment`). Metrics: as those of
    `verifiers`.

    It is scored in the process of the environment, from the tasks and what was said. Attempts that a budget
    of the run ended are not among those that are compared.
    """

    name: ClassVar[str] = "verifiers_group"
    runs_in = "asyncio"

    def __init__(self, config: JsonObject | None = None) -> None:
        super().__init__(config)
        self._options = read_options(VerifiersRewardOptions, self.config, plugin=f"reward {self.name!r}")

    async def score(  # type: ignore[override]  # async, as `runs_in` says
        self, attempts: Sequence[Attempted]
    ) -> list[RewardResult | None]:
        """Return the rewards; None for an attempt without an environment of verifiers."""
        compared = [number for number, attempt in enumerate(attempts) if "rollout" in attempt.facts]
        results: list[RewardResult | None] = [self._uncompared(attempt) for attempt in attempts]
        if not compared:
            return results
        scorer = _SCORERS[attempts[compared[0]].facts["scorer"]]
        scored = await scorer.score([attempts[number].facts["rollout"] for number in compared])
        for number, one in zip(compared, scored, strict=True):
            metrics = {**one["metrics"], "is_cut_off": 0.0}
            results[number] = RewardResult(self._options.scale * one["reward"], metrics)
        return results

    def _uncompared(self, attempt: Attempted) -> RewardResult | None:
        if not {"environment", "reward", "metrics"} <= attempt.facts.keys():
            return None
        return RewardResult(self._options.cut_off, {"is_cut_off": 1.0})


def _object(text: str, key: str) -> JsonObject:
    try:
        found = json.loads(text)
    except (TypeError, ValueError):
        found = None
    if not isinstance(found, dict):
        raise DataError(
            f"environment {KEY!r}: environment_kwargs.{key} must be a JSON object, is {text[:80]!r}"
        )
    return found
