"""The simulated learner makes the calls of the controller's loop, in its order."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from agentrl.config.schema import Config
from agentrl.controller import train
from agentrl.extras.plan.clock import run_virtually
from agentrl.extras.plan.loop import LearnerLoop


class Recorded:
    """A run of the controller whose verbs only note that they were called."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.step = 0
        self.lineage = SimpleNamespace(lags=None)
        self.roles = None
        self.proximal_folder = None
        self.column_folder = lambda: nullcontext(None)

    def take(self) -> list[object]:
        self.calls.append("take")
        return []

    def publish(self) -> None:
        self.calls.append(f"publish after step {self.step}")

    def record(self, *_: object, **__: object) -> None:
        self.calls.append("stepped")

    def timer(self, name: str) -> nullcontext[None]:
        return nullcontext()

    memory_for_learner = traced = nullcontext


class Simulated(LearnerLoop):
    """A simulated learner whose verbs only note that they were called."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.step = 0
        note = self.calls.append
        self._watch = SimpleNamespace(spent=lambda *_: None, stepped=lambda step: note("stepped"))

    async def take(self) -> list[object]:  # type: ignore[override]
        self.calls.append("take")
        return []

    async def learn(self, batch: object) -> None:
        self.calls.append("learn")

    async def publish(self) -> None:
        self.calls.append(f"publish after step {self.step}")


def test_a_step_of_the_simulation_is_a_step_of_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    run, loop = Recorded(), Simulated()
    monkeypatch.setattr(train, "learn", lambda *_, **__: run.calls.append("learn") or [])
    train.train_step(run, Config())  # type: ignore[arg-type]
    run_virtually(loop.train_step, seed=0)
    assert loop.calls == run.calls == ["take", "learn", "publish after step 1", "stepped"]
