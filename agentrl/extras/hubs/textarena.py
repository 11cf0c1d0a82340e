"""Games of TextArena: for one player by the tool `act` or by turns, for several by turns (agent `textarena`).

They run in a hub process, because the package brings clients of model vendors. The reward is the game's own.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from pydantic import Field

from agentrl.errors import DataError, PluginError
from agentrl.extras.hubs.interpreter import InterpreterOptions, interpreter_program
from agentrl.extras.hubs.process import HubProcess, HubProgram, hub_process
from agentrl.plugins import (
    AgentLoop,
    Attempted,
    Environment,
    Reward,
    RewardResult,
    Session,
    ToolResult,
    WrongCall,
    tool,
)
from agentrl.plugins.options import Options, read_options
from agentrl.types import JsonObject, Message, Task, Turn

KEY = "textarena"
"""Name of the environment, of its agent and of the reward, and first part of the data source."""


class TextArenaOptions(InterpreterOptions):
    """Options in `agent.environment_config.textarena`."""

    modules: tuple[str, ...] = Field((), description="Modules that register games of your own.")
    step_timeout_s: float = Field(
        10.0,
        gt=0,
        description="Deadline of a game for an action. Others wait meanwhile: games run one at a time.",
    )


def program_of(options: TextArenaOptions) -> HubProgram:
    """Return the hub process of these options; raises as `interpreter_program`.

    Some games choose from sets of words, whose order differs from process to process without a hash seed.
    """
    return interpreter_program(
        options, world=KEY, script="agentrl_textarena.py", defaults={"PYTHONHASHSEED": "0"}
    )


@dataclass(frozen=True, slots=True)
class Match:
    """What a row says of its game.

    Attributes:
        game: an id such as `Nim-v0`.
        options: arguments of the game, as JSON.
        players: number of seats; 0: the fewest that the game takes.
        seat: the policy's only seat; None: the policy has all seats.
        opponent: the model of `agent.opponents` in the other seats; None if `seat` is None.
    """

    game: str
    seed: int = 0
    options: str = "{}"
    players: int = 0
    seat: int | None = None
    opponent: str | None = None

    @classmethod
    def of(cls, kwargs: Mapping[str, Any]) -> Match:
        """Read a row's `environment_kwargs`, with or without `name`.

        Raises:
            DataError: a key is unknown or missing, or has a value of another type.
        """
        given = {key: value for key, value in kwargs.items() if key != "name"}
        try:
            match = cls(**given)
        except TypeError as error:
            raise DataError(
                f"environment {KEY!r}: environment_kwargs need game, and may have seed, options, players, "
                f"seat and opponent; are {str(given)[:200]}"
            ) from error
        numbers = (match.seed, match.players, 0 if match.seat is None else match.seat)
        if (
            not (type(match.game) is type(match.options) is str and match.game)
            or not all(type(number) is int and number >= 0 for number in numbers)
            or (match.seat is None) != (match.opponent is None)
            or not isinstance(match.opponent, str | None)
        ):
            raise DataError(
                f"environment {KEY!r}: environment_kwargs need game and options as texts, seed and players "
                "as whole numbers from 0, and seat (a number) with opponent (a name), or neither; are "
                f"{str(given)[:200]}"
            )
        return match

    def arguments(self) -> JsonObject:
        """Return the options as an object.

        Raises:
            DataError: they are no JSON object.
        """
        try:
            found = json.loads(self.options)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise DataError(
                f"environment {KEY!r}: environment_kwargs.options must be a JSON object, is "
                f"{self.options[:80]!r}"
            )
        return found


class OpenMatch:
    """A game in the hub process.

    Attributes:
        num_players: number of seats.
        seat: the player to move.
        seen: what that player has not seen yet.
        is_over: whether it has ended.
        rewards: of each seat, by its number as a text; None before the end.
        reason: why it ended, in the game's words.
        invalid: seats that ended it by a move that the rules do not have.
    """

    def __init__(self, process: HubProcess) -> None:
        self._process, self._id = process, uuid.uuid4().hex
        self._is_asked_for = False
        self.num_actions = 0

    async def begin(self, match: Match, options: TextArenaOptions) -> None:
        """Begin the game; `close` is needed even if this raises or is cancelled.

        Raises:
            DataError: there is no such game, it refuses options or players, or it lacks what it needs.
            EnvironmentFailed: it raised, or the process failed.
        """
        asked = {
            "id": self._id,
            "game": match.game,
            "seed": match.seed,
            "players": match.players,
            "options": match.arguments(),
            "modules": list(options.modules),
            "step_timeout_s": options.step_timeout_s,
        }
        self._is_asked_for = True
        begun = await self._process.call("begin", asked)
        self.num_players: int = begun["players"]
        if match.seat is not None and match.seat >= self.num_players:
            raise DataError(
                f"game {match.game!r} has the seats 0 to {self.num_players - 1}, and the row's seat is "
                f"{match.seat}"
            )
        self._take(begun)

    async def act(self, text: str) -> None:
        """Take a text as the action of the player to move; raises as `begin`, also if it takes too long."""
        self._take(await self._process.call("act", {"id": self._id, "text": text}))
        self.num_actions += 1

    async def close(self) -> None:
        if self._is_asked_for and self._process.is_running:
            await self._process.call("end", {"id": self._id})

    def _take(self, view: JsonObject) -> None:
        self.seat: int = view["seat"]
        self.seen: str = view["seen"]
        self.is_over: bool = view["is_over"]
        self.rewards: dict[str, float] | None = view["rewards"]
        self.reason: str = view.get("reason", "")
        self.invalid: list[int] = view.get("invalid", [])


class TextArenaGame(Environment):
    """A game of TextArena, played by the tool `act` (one player) or by the agent `textarena`."""

    name: ClassVar[str] = KEY

    def __init__(self, config: JsonObject | None = None) -> None:
        super().__init__(config)
        self._options = read_options(TextArenaOptions, self.config, plugin=f"environment {self.name!r}")
        self._program = program_of(self._options)

    async def start(self, **environment_kwargs: Any) -> None:
        """Begin the game; raises as `OpenMatch.begin`."""
        self.row = Match.of(environment_kwargs)
        self.match = OpenMatch(hub_process(self._program))
        await self.match.begin(self.row, self._options)

    @tool
    async def act(self, action: str) -> ToolResult:
        """Take the next action of the game and see what it leads to.

        Args:
            action: the action, as the rules describe it.
        """
        if self.match.is_over:
            raise WrongCall("the game is over")
        if self.match.num_players > 1:
            raise PluginError(
                f"game {self.row.game!r} has {self.match.num_players} players; the agent 'textarena' plays "
                "it, and no tool"
            )
        await self.match.act(action)
        return ToolResult(self.match.reason or self.match.seen, is_final=self.match.is_over)

    async def facts(self) -> JsonObject:
        match = self.match
        return {
            "rewards": match.rewards,
            "players": match.num_players,
            "seat": self.row.seat,
            "steps": match.num_actions,
            "reason": match.reason,
            "invalid": match.invalid,
        }

    async def close(self) -> None:
        if hasattr(self, "match"):
            await self.match.close()


class _Seat(Protocol):
    """The session's own conversation, or another."""

    async def generate(self) -> Turn: ...

    def add_user_message(self, text: str) -> None: ...


def seat_name(seat: int) -> str:
    """Return the name of a seat's conversation."""
    return f"player_{seat}"


class TextArenaAgent(AgentLoop):
    """Plays by turns: the text of each turn is an action. Each seat of a game for several players is a
    conversation of its own; the row's `opponent` speaks in those that are not the policy's.
    """

    name: ClassVar[str] = KEY
    uses_tools: ClassVar[bool] = False

    def opponents(self, task: Task) -> Sequence[str]:
        opponent = (task.environment_kwargs or {}).get("opponent")
        return [] if opponent is None else [opponent]

    async def run(self, task: Task, session: Session) -> None:
        world = session.environment
        if not isinstance(world, TextArenaGame):
            raise PluginError(
                f"task {task.task_id}: the agent 'textarena' needs the environment 'textarena'; write rows "
                "with `agentrl data textarena`"
            )
        match, seats = world.match, dict[int, _Seat]()
        while not match.is_over:
            seat = match.seat
            if seat in seats:
                seats[seat].add_user_message(match.seen)
            else:
                seats[seat] = self._opened(task, session, world)
            turn = await seats[seat].generate()
            await session.run_asyncio(match.act, turn.message.content)

    def _opened(self, task: Task, session: Session, world: TextArenaGame) -> _Seat:
        """Return the conversation of the player to move, which begins with what that player sees."""
        match, row = world.match, world.row
        if match.num_players == 1:
            return session  # the row's prompt shows the game's first words
        rules = [message for message in task.messages if message.role == "system"]
        opponent = None if row.seat in (None, match.seat) else row.opponent
        prompt = [*rules, Message("user", match.seen)]
        return session.conversation(seat_name(match.seat), prompt, opponent=opponent)


class TextArenaRewardOptions(Options):
    """`scale`: rewards are multiplied by it. `unfinished`: the reward of a game that a budget of the run
    ended; it is the worst that games give, or not playing would be better than losing.
    """

    scale: float = 1.0
    unfinished: float = -1.0


class TextArenaReward(Reward):
    """The game's reward of each seat of the policy. Metrics: steps, is_over, is_invalid (a move that the
    rules do not have ended the game).
    """

    name: ClassVar[str] = KEY

    def __init__(self, config: JsonObject | None = None) -> None:
        super().__init__(config)
        self._options = read_options(TextArenaRewardOptions, self.config, plugin=f"reward {self.name!r}")

    def score(self, attempt: Attempted) -> RewardResult | None:
        """Return the reward, or None if the attempt had no game. For several players, `value` is that of the
        row's seat, or of seat 0.
        """
        facts = attempt.facts
        if not {"rewards", "players", "seat", "steps", "invalid"} <= facts.keys():
            return None
        rewards: Mapping[str, float] | None = facts["rewards"]
        metrics = {
            "steps": float(facts["steps"]),
            "is_over": float(rewards is not None),
            "is_invalid": float(bool(facts["invalid"])),
        }

        def of(seat: int) -> float:
            return self._options.scale * (self._options.unfinished if rewards is None else rewards[str(seat)])

        seats = {seat_name(seat): seat for seat in range(facts["players"])}
        by_conversation = {name: of(seat) for name, seat in seats.items() if name in attempt.spoke}
        return RewardResult(of(facts["seat"] or 0), metrics, by_conversation=by_conversation)
