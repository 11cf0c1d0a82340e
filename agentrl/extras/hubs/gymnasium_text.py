"""Games of Gymnasium as text: their rules, their actions, and what is seen of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentrl.errors import PluginError
from agentrl.plugins import WrongCall

MAX_ACTION_CHARS = 200
MAX_NUMBERS = 64
"""Numbers that an observation may have; more are a picture."""

_COLOUR = re.compile(r"\x1b\[([0-9;]*)m")
_BRACKETS = {"34": "()", "35": "<>"}
"""By the foreground colour; for all other colours, square ones."""


@dataclass(frozen=True, slots=True)
class GameText:
    """What a policy is told of a game.

    rules: sentences. actions: names of the actions 0, 1, ...; empty: they are numbers.
    unfinished: return of an attempt whose game was not played to its end; None: the rewards so far. It is the
        worst that a game with penalties can give, or not playing would be better than playing.
    """

    rules: str
    actions: tuple[str, ...] = ()
    unfinished: float | None = None


GAMES: Mapping[str, GameText] = {
    "FrozenLake": GameText(
        "You walk over a frozen lake from S to G. F is ice that holds you; a step into a hole, H, ends the "
        "game. [ ] marks the field where you are. Reaching G gives 1 point.",
        ("left", "down", "right", "up"),
    ),
    "CliffWalking": GameText(
        "You walk from the lower left corner to T. You are at x. Each step costs 1 point; a step onto the "
        "cliff, C, costs 100 and puts you back to the start.",
        ("up", "right", "down", "left"),
        unfinished=-200.0,
    ),
    "Taxi": GameText(
        "You drive a taxi between the places R, G, Y and B. Walls are | and cannot be crossed. [ ] marks the "
        "taxi, ( ) the waiting passenger, < > the destination. Each step costs 1 point, a wrong pickup or "
        "dropoff 10; bringing the passenger to the destination gives 20.",
        ("south", "north", "east", "west", "pickup", "dropoff"),
        unfinished=-200.0,
    ),
    "Blackjack": GameText(
        "You play blackjack against a dealer, who draws up to 17. You see (your sum, the dealer's open card, "
        "whether you have an ace that counts 11: 1 or 0). Going over 21 loses. Winning gives 1 point, losing "
        "costs 1.",
        ("stick", "hit"),
        unfinished=-1.0,
    ),
}
"""Rules by the id without its version. Other games have none but the names of their spaces."""


def text_of(game: str) -> GameText:
    """Return what is told of a game with an id such as `FrozenLake-v1`."""
    return GAMES.get(game.rsplit("/", 1)[-1].rsplit("-v", 1)[0], GameText(""))


def read_action(space: Any, names: Sequence[str], said: str) -> Any:
    """Return the action that a text names: its name, its number, numbers with commas between, or the text.

    Raises:
        WrongCall: it is none of the space's actions.
    """
    said = said[: MAX_ACTION_CHARS + 1].strip()
    action: Any = None
    if said.lower() in names:
        action = names.index(said.lower()) + int(space.start)
    elif type(space).__name__ == "Text":
        action = said
    elif re.fullmatch(r"-?[0-9]{1,9}(\s*,\s*-?[0-9]{1,9})*", said):
        numbers = [int(number) for number in said.split(",")]
        if type(space).__name__ == "Discrete":
            action = numbers[0] if len(numbers) == 1 else None
        else:
            action = (
                np.array(numbers, np.int64) if type(space).__name__ == "MultiDiscrete" else tuple(numbers)
            )
    if action is None or not space.contains(action):
        raise WrongCall(f"{said[:40]!r} is no action here; it should be {describe_actions(space, names)}")
    return action


def describe_actions(space: Any, names: Sequence[str]) -> str:
    """Return which texts are actions.

    Raises:
        PluginError: actions of this space cannot be written as a text.
    """
    kind = type(space).__name__
    if names:
        return f"one of {', '.join(names)}"
    if kind == "Discrete":
        return f"a number from {int(space.start)} to {int(space.start + space.n - 1)}"
    if kind == "MultiDiscrete" and space.nvec.ndim == 1:
        limits = ", ".join(map(str, space.nvec))
        return f"{len(space.nvec)} numbers with commas between, each from 0 and below {limits}"
    if kind == "Tuple" and all(type(part).__name__ == "Discrete" for part in space.spaces):
        return "numbers with commas between: " + ", ".join(
            describe_actions(part, ()) for part in space.spaces
        )
    if kind == "Text":
        return f"a text of {space.min_length} to {space.max_length} characters"
    raise PluginError(
        f"actions of the kind {kind} cannot be written as a text; games need Discrete, MultiDiscrete, Text "
        "or a Tuple of Discrete"
    )


def check_seen(space: Any) -> None:
    """Refuse pictures.

    Raises:
        PluginError: an observation has too many numbers to be read.
    """
    numbers = int(np.prod(space.shape)) if type(space).__name__ == "Box" else 0
    if numbers > MAX_NUMBERS:
        raise PluginError(
            f"observations are {numbers:,} numbers (shape {tuple(space.shape)}), which no policy can read as "
            f"text; games need at most {MAX_NUMBERS}, or the render mode 'ansi'"
        )


def seen_as(observation: Any, picture: str | None) -> str:
    """Return what is shown: the picture in characters, with brackets for colours, or else the observation."""
    return _plain(observation) if picture is None else _bracketed(picture).strip("\n")


def _bracketed(picture: str) -> str:
    closing: list[str] = []

    def replaced(found: re.Match[str]) -> str:
        codes = found[1].split(";")
        if codes in ([""], ["0"]):
            return closing.pop() if closing else ""
        brackets = next((_BRACKETS[code] for code in codes if code in _BRACKETS), "[]")
        closing.append(brackets[1])
        return brackets[0]

    return _COLOUR.sub(replaced, picture)


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_plain(one)}" for key, one in value.items())
    if isinstance(value, tuple | list) or (isinstance(value, np.ndarray) and value.ndim):
        return f"({', '.join(_plain(one) for one in value)})"
    if isinstance(value, str):
        return value
    return f"{float(value):.4g}" if isinstance(value, float | np.floating) else str(int(value))
