"""An OpenEnv server with a ladder to climb: the policy says up or down until it is on the right rung.

pip install openenv-core    (into an environment of its own)
python examples/ladder_server.py --port 8000
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

MAX_STEPS = 4
MAX_DISTANCE = 3


class Climb(Action):
    """up or down."""

    move: str


class Rungs(Observation):
    """The rung where you are and the rung to reach."""

    text: str


class Ladder(Environment):
    """A ladder with the rungs 1 to 9. Being on the right rung within four steps gives 1 point."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Rungs:
        rng = random.Random(seed)
        self.rung = rng.randint(1, 9)
        near = range(max(1, self.rung - MAX_DISTANCE), min(9, self.rung + MAX_DISTANCE) + 1)
        self.goal = rng.choice([rung for rung in near if rung != self.rung])
        self._state = State(episode_id=episode_id, step_count=0)
        return self._seen(0.0)

    def step(self, action: Climb, timeout_s: float | None = None, **_: Any) -> Rungs:
        self._state.step_count += 1
        self.rung += {"up": 1, "down": -1}.get(action.move.strip(), 0)
        return self._seen(float(self.rung == self.goal))

    @property
    def state(self) -> State:
        return self._state

    def _seen(self, reward: float) -> Rungs:
        is_done = bool(reward) or self._state.step_count == MAX_STEPS
        return Rungs(text=f"on {self.rung}, to {self.goal}", reward=reward, done=is_done)


app = create_fastapi_app(Ladder, Climb, Rungs, max_concurrent_envs=256)

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    uvicorn.run(app, host="127.0.0.1", port=parser.parse_args().port, log_level="warning")
