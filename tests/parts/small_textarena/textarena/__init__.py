"""A small package in the place of TextArena, which `make test` does not install. It has the same entry
points; tests/extras/hubs/test_real_textarena.py has the real one.
"""

from __future__ import annotations

import os
import random
import time
from contextlib import suppress
from typing import Any

from textarena.envs.registration import ENV_REGISTRY

GAME_ID = -1


class State:
    """Whose turn it is, and what each player has not seen yet."""

    def __init__(self, num_players: int) -> None:
        self.current_player_id = 0
        self.role_mapping = {seat: f"Player {seat}" for seat in range(num_players)}
        self._unseen: dict[int, list[tuple[int, str, None]]] = {seat: [] for seat in range(num_players)}

    def tell(self, text: str, *, sender: int = GAME_ID) -> None:
        for messages in self._unseen.values():
            messages.append((sender, text, None))

    def unseen(self) -> list[tuple[int, str, None]]:
        found = self._unseen[self.current_player_id]
        self._unseen[self.current_player_id] = []
        return found


class Wrapper:
    """Adds the brackets that a move is written in."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def step(self, action: str) -> tuple[bool, dict]:
        return self.env.step(action if "[" in action else f"[{action}]")


class Race:
    """Each player adds 1 to `step` to the count in turn; who reaches the goal wins. A die of the game's is
    told with each move.
    """

    seats = 2

    def __init__(self, goal: int = 4, step: int = 2) -> None:
        self.goal, self.step_size = goal, step

    def reset(self, num_players: int, seed: int | None = None) -> None:
        assert num_players == self.seats, f"The number of players has to be {self.seats}"
        self.state, self.count, self.rewards = State(num_players), 0, {}
        self.state.tell(f"to {self.goal}")

    def get_observation(self) -> tuple[int, Any]:
        return self.state.current_player_id, self.state.unseen()

    def step(self, action: str) -> tuple[bool, dict]:
        state, seat = self.state, self.state.current_player_id
        if action == "[crash]":
            raise RuntimeError("no such move")
        if action == "[die]":
            os._exit(7)
        if action == "[hang]":
            with suppress(Exception):
                time.sleep(600)
            time.sleep(600)
        state.tell(action, sender=seat)
        self.is_invalid = action.strip("[]") not in map(str, range(1, self.step_size + 1))
        if self.is_invalid:
            self.rewards = {other: 1.0 if other != seat else -1.0 for other in state.role_mapping}
            return True, {}
        self.count += int(action.strip("[]"))
        state.tell(f"{self.count}, die {random.randint(1, 6)}")
        if self.count >= self.goal:
            self.rewards = {other: 1.0 if other == seat else -1.0 for other in state.role_mapping}
            return True, {}
        state.current_player_id = (seat + 1) % self.seats
        return False, {}

    def close(self) -> tuple[dict, dict]:
        last = self.state.current_player_id
        ends = {seat: {"reason": "the end", "invalid_move": False} for seat in self.rewards}
        ends[last]["invalid_move"] = self.is_invalid
        return self.rewards, ends


class Climb(Race):
    """The same for one player."""

    seats = 1


class Choosy(Race):
    """Draws a die before it refuses a number of players, by a ValueError."""

    def reset(self, num_players: int, seed: int | None = None) -> None:
        begins_with = random.randint(1, 10**6)
        if num_players != self.seats:
            raise ValueError(f"Choosy is for {self.seats} players")
        super().reset(num_players, seed)
        self.state.tell(f"it begins with {begins_with}")


class Wordy(Race):
    def __init__(self) -> None:
        raise LookupError("****\n  Resource words not found")


def make(game: str, **options: Any) -> Any:
    return Wrapper(ENV_REGISTRY[game](**options))


ENV_REGISTRY |= {"Race-v0": Race, "Climb-v0": Climb, "Choosy-v0": Choosy, "Wordy-v0": Wordy}
