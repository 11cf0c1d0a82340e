"""An environment of verifiers (0.4): say the larger one of two numbers (agentrl/extras/hubs/README.md)."""

from __future__ import annotations

import random
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["LargerNumber"]


class LargerNumberData(vf.TaskData):
    answer: str


class LargerNumberTask(vf.Task[LargerNumberData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class LargerNumberConfig(vf.TasksetConfig):
    num_tasks: int = 1000
    seed: int = 0


class LargerNumber(vf.Taskset[LargerNumberTask, LargerNumberConfig]):
    def load(self) -> Iterator[LargerNumberTask]:
        rng = random.Random(self.config.seed)
        for _ in range(self.config.num_tasks):
            one, other = rng.sample(range(10, 100), 2)
            data = LargerNumberData(prompt=f"{one} or {other}?", answer=str(max(one, other)))
            yield LargerNumberTask(data, self.config.task)
