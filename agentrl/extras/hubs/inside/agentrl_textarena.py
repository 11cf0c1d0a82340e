"""A hub process with games of TextArena: each call begins a game, takes an action in one, or ends one.

Games draw from Python's one generator of random numbers. Each game here has a state of it of its own, so that
games side by side do not change each other's luck.
"""

from __future__ import annotations

import difflib
import importlib
import math
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import textarena as ta  # type: ignore[import-not-found]
from agentrl_hub import Refused, serve  # type: ignore[import-not-found]  # beside this file, where it runs
from textarena.envs.registration import ENV_REGISTRY  # type: ignore[import-not-found]

MAX_PLAYERS = 15
"""Numbers of players that are tried for a game whose number is not given."""
MAX_ERROR_CHARS = 200
ALARM_AGAIN_S = 1.0

_GAMES: dict[str, Game] = {}


class Game:
    """A game that was reset.

    Attributes:
        num_players: seats 0, 1, ...
        is_over: whether it has ended; then `rewards` has the reward of each seat.
    """

    def __init__(
        self, name: str, seed: int, num_players: int, options: dict[str, Any], step_timeout_s: float
    ) -> None:
        """num_players: 0 for the fewest that the game takes.

        Raises:
            Refused: there is no such game, it refuses options or players, or lacks what it needs.
        """
        self._luck: Any = None
        self._step_timeout_s = step_timeout_s
        self.is_over = False
        self.rewards: dict[str, float] | None = None
        self.about: dict[Any, dict[str, Any]] = {}
        with self._own_luck():
            _seed(seed)
            self._env = _made(name, options)
            self.num_players = _reset(self._env, name, seed, num_players)

    def act(self, text: str) -> None:
        """Take the text as the action of the player to move; raises TimeoutError if that takes too long."""
        if self.is_over:
            raise Refused("the game is over")
        with self._own_luck(), _deadline(self._step_timeout_s):
            self.is_over, _ = self._env.step(text)
            if self.is_over:
                rewards, about = self._env.close()
                self.rewards = {str(seat): float(rewards[seat]) for seat in range(self.num_players)}
                if not all(map(math.isfinite, self.rewards.values())):
                    raise ValueError(f"the game gave the rewards {self.rewards}")
                self.about = about if isinstance(about, dict) else {}

    def view(self) -> dict[str, Any]:
        """Return who moves next and what that player has not seen yet; at the end, the rewards."""
        told: dict[str, Any] = {"is_over": self.is_over, "rewards": self.rewards, "seat": 0, "seen": ""}
        if self.is_over:
            ends = [self.about.get(seat, {}) for seat in range(self.num_players)]
            invalid = [seat for seat, end in enumerate(ends) if end.get("invalid_move")]
            return {**told, "reason": str(ends[0].get("reason") or ""), "invalid": invalid}
        inner = _inner(self._env)
        seat, messages = inner.get_observation()
        if isinstance(messages, str):
            return {**told, "seat": seat, "seen": messages}
        names = inner.state.role_mapping
        shown = [
            text if sender == ta.GAME_ID else f"[{names.get(sender, f'Player {sender}')}] {text}"
            for sender, text, _ in messages
            if sender != seat  # the player's own words are in the conversation
        ]
        return {**told, "seat": seat, "seen": "\n".join(shown)}

    @contextmanager
    def _own_luck(self) -> Iterator[None]:
        if self._luck is not None:
            random.setstate(self._luck)
        try:
            yield
        finally:
            self._luck = random.getstate()


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the code of a game that takes longer.

    Some games of 0.7.4 loop for ever once all players are eliminated. The alarm repeats, for games that
    swallow exceptions.
    """

    def late(number: int, frame: object) -> None:
        raise TimeoutError(f"an action took longer than step_timeout_s={seconds:g} s")

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds, ALARM_AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


async def begin(
    id: str,
    game: str,
    seed: int,
    players: int,
    options: dict[str, Any],
    modules: list[str],
    step_timeout_s: float,
) -> Any:
    """Begin a game under a name of the caller's."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise Refused(f"module {module!r} cannot be imported: {error}") from error
    begun = Game(game, seed, players, options, step_timeout_s)
    _GAMES[id] = begun
    return {"players": begun.num_players, **begun.view()}


async def act(id: str, text: str) -> Any:
    """Take an action in a game."""
    if id not in _GAMES:
        raise RuntimeError("the game is gone: its process was started again")
    _GAMES[id].act(text)
    return _GAMES[id].view()


async def end(id: str) -> Any:
    """Forget a game."""
    _GAMES.pop(id, None)


def _made(name: str, options: dict[str, Any]) -> Any:
    if name not in ENV_REGISTRY:
        close = difflib.get_close_matches(name, ENV_REGISTRY, n=4)
        hint = f"did you mean {', '.join(close)}?" if close else "see textarena.pprint_registry_detailed()"
        raise Refused(f"TextArena has no game {name!r}; {hint}")
    try:
        return ta.make(name, **options)
    except Exception as error:
        raise Refused(f"game {name!r} cannot be made: {type(error).__name__}: {_line(error)}") from error


def _seed(seed: int) -> None:
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def _reset(env: Any, name: str, seed: int, num_players: int) -> int:
    """Reset a game; return its number of players.

    Most games refuse a number of players by `assert`, some by a ValueError.
    """
    refused: Exception | None = None
    for number in [num_players] if num_players else range(1, MAX_PLAYERS + 1):
        _seed(seed)  # a number that was refused leaves no trace in what a later one begins with
        try:
            env.reset(num_players=number, seed=seed)
            return number
        except (AssertionError, ValueError) as error:
            refused = error
    asked = f"{num_players}" if num_players else f"1 to {MAX_PLAYERS}"
    raise Refused(f"game {name!r} refuses {asked} players: {_line(refused)}") from refused


def _inner(env: Any) -> Any:
    while isinstance(env, ta.Wrapper):
        env = env.env
    return env


def _line(error: object) -> str:
    return " ".join(str(error).replace("*", " ").split())[:MAX_ERROR_CHARS]


serve({"begin": begin, "act": act, "end": end})
