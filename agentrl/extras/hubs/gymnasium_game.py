"""The environment `gymnasium`, a game with `reset` and `step`; its reward is the sum of the game's."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any, ClassVar

from agentrl.errors import DataError, PluginError
from agentrl.extras.hubs.gymnasium_text import check_seen, describe_actions, read_action, seen_as, text_of
from agentrl.extras.hubs.packages import hub_package
from agentrl.plugins import Attempted, Environment, Reward, RewardResult, ToolResult, WrongCall, tool
from agentrl.plugins.options import Options, read_options
from agentrl.types import JsonObject

KEY = "gymnasium"
"""Name of the environment and of the reward, and first part of the data source."""


class OpenGame:
    """A game that was reset. Not safe for threads.

    Attributes:
        actions: which texts are actions.
        seen: what is shown of the state.
        total: the sum of the rewards so far.
    """

    def __init__(self, game: str, seed: int, options: str) -> None:
        """Reset a game.

        Raises:
            DataError: there is no such game, or it refuses the options.
            PluginError: the package is not installed, or the game is not for text.
        """
        self._env = _make(game, options)
        try:
            self._text = text_of(game)
            self.actions = describe_actions(self._env.action_space, self._text.actions)
            self._is_drawn = self._env.render_mode == "ansi"
            if not self._is_drawn:
                check_seen(self._env.observation_space)
            observation, _ = self._env.reset(seed=seed)
        except PluginError as error:
            self._env.close()
            raise PluginError(f"game {game!r}: {error}") from error
        except BaseException:
            self._env.close()
            raise
        self.total, self.num_steps, self.is_over = 0.0, 0, False
        self.seen = self._shown(observation)

    def act(self, said: str) -> str:
        """Take an action; return what it leads to.

        Raises:
            WrongCall: the game is over, or the text is no action.
        """
        if self.is_over:
            raise WrongCall("the game is over")
        action = read_action(self._env.action_space, self._text.actions, said)
        observation, reward, is_terminated, is_truncated, _ = self._env.step(action)
        if not math.isfinite(reward):
            raise ValueError(f"the game gave the reward {reward}")
        self.total += float(reward)
        self.num_steps += 1
        self.is_over = bool(is_terminated or is_truncated)
        self.seen = self._shown(observation)
        points = f"{float(reward):+.4g} points" if reward else "no points"
        return f"{self.seen}\n{points}{', the game is over' if self.is_over else ''}"

    @property
    def outcome(self) -> float:
        """The sum of all rewards; before the end, at most `GameText.unfinished`."""
        worst = self._text.unfinished
        return self.total if self.is_over or worst is None else min(self.total, worst)

    def close(self) -> None:
        self._env.close()

    def _shown(self, observation: Any) -> str:
        return seen_as(observation, self._env.render() if self._is_drawn else None)


def _make(game: str, options: str) -> Any:
    gymnasium = hub_package("gymnasium", extra=KEY, needed_by=f"the environment {KEY!r}")
    registration = hub_package("gymnasium.envs.registration", extra=KEY, needed_by=KEY)
    if ":" in game:
        raise DataError(f"game {game!r}: a row names no module; register the game in a file of agent.plugins")
    try:
        values = json.loads(options)
        if not isinstance(values, dict):
            raise TypeError("they are no JSON object")
        creator = gymnasium.spec(game).entry_point
        if isinstance(creator, str):
            creator = registration.load_env_creator(creator)
        if "ansi" in getattr(creator, "metadata", {}).get("render_modes", ()):
            values = {"render_mode": "ansi", **values}
        return gymnasium.make(game, disable_env_checker=True, **values)
    except gymnasium.error.Error as error:
        raise DataError(f"game {game!r}: {str(error).splitlines()[0][:300]}") from error
    except (TypeError, ValueError, AssertionError) as error:
        raise DataError(
            f"game {game!r} refuses the options {options[:200]}: {type(error).__name__}: {error}"
        ) from error


class GymnasiumGame(Environment):
    """A game of the row, played by the tool `act`."""

    name: ClassVar[str] = KEY

    async def start(self, *, game: str = "", seed: int = 0, options: str = "{}", **unknown: Any) -> None:
        """Open the game.

        Args:
            game: an id such as `FrozenLake-v1`.
            seed: of the game; the attempts of a group begin alike.
            options: arguments of the game, as JSON.

        Raises:
            DataError: the row names no game, or the game refuses the options.
        """
        if unknown:
            raise DataError(
                f"environment {self.name!r}: unknown environment_kwargs {', '.join(sorted(unknown))}; "
                "should be game, seed and options"
            )
        if not (type(game) is type(options) is str and game and type(seed) is int and seed >= 0):
            raise DataError(
                f"environment {self.name!r}: environment_kwargs need game and options (texts) and seed (a "
                f"whole number from 0), are game={game!r}, options={str(options)[:80]!r}, seed={seed!r}"
            )
        self._game = await asyncio.to_thread(OpenGame, game, seed, options)

    @tool
    def act(self, action: str) -> ToolResult:
        """Take the next action of the game and see what it leads to.

        Args:
            action: the action, as the rules name it.
        """
        return ToolResult(self._game.act(action), is_final=self._game.is_over)

    async def facts(self) -> JsonObject:
        game = self._game
        return {"return": game.outcome, "steps": game.num_steps, "is_over": game.is_over}

    async def close(self) -> None:
        if hasattr(self, "_game"):
            self._game.close()


class GameRewardOptions(Options):
    """`scale`: the return is multiplied by it."""

    scale: float = 1.0


class GameReward(Reward):
    """The sum of the game's rewards. Metrics: steps, is_over."""

    name: ClassVar[str] = KEY

    def __init__(self, config: JsonObject | None = None) -> None:
        super().__init__(config)
        self._options = read_options(GameRewardOptions, self.config, plugin=f"reward {self.name!r}")

    def score(self, attempt: Attempted) -> RewardResult | None:
        """Return the reward, or None if the attempt had no game."""
        facts = attempt.facts
        if not {"return", "steps", "is_over"} <= facts.keys():
            return None
        metrics = {"steps": float(facts["steps"]), "is_over": float(facts["is_over"])}
        return RewardResult(self._options.scale * float(facts["return"]), metrics)
