"""Training and validation share a gateway."""

from __future__ import annotations

import trio

from agentrl.config.evaluation import EvalConfig
from agentrl.ports import ReservedPort
from agentrl.rollout.player_stack import Validating
from agentrl.types import Lease, Outcome
from parts.guests import ByChat, guest
from parts.rollout_stage import stage_rewards

SAMPLING = EvalConfig(temperature=1.0)


class Rows:
    """Leases its tasks, one attempt each, and notes when all of them are there."""

    def __init__(self, tasks) -> None:
        self.waiting = [Lease(1000 + index, task, 1, 0) for index, task in enumerate(tasks)]
        self.missing = len(self.waiting)
        self.all_there = trio.Event()

    async def withdrawn(self):
        return []

    async def lease(self, limit: int):
        if not self.waiting:
            await trio.sleep_forever()
        taken, self.waiting = self.waiting[:limit], self.waiting[limit:]
        return taken

    async def add(self, trajectories) -> None:
        self.missing -= len(trajectories)
        if not self.missing:
            self.all_there.set()

    async def drop_group(self, group_id: int, reason: str) -> None:
        raise AssertionError(reason)

    async def leave_out(self, group_id: int, member: int, reason: str) -> None:
        raise AssertionError(reason)


def test_training_and_validation_listen_on_the_same_port(stage, request):
    """A second gateway in the process would find the configured port taken."""

    async def program(endpoint, task) -> None:
        async with ByChat(endpoint, None, is_stream=False) as client:
            client.say("a")
            await client.ask()

    reserved = ReservedPort()
    request.addfinalizer(reserved.release)
    own = Validating(tools=(), reward=stage_rewards())
    agent = {"tools": (), "gateway": {"port": reserved.number}}
    world = stage.World(lambda *_: "#### 42", plugins=[guest(program)], validation=own, agent=agent)
    task = stage.task(agent="guest")
    rows, kept = Rows([task]), []

    async def main(manager):
        async with trio.open_nursery() as nursery:
            rows.add = lambda trajectories: _keep(kept, trajectories, nursery)
            nursery.start_soon(manager.run, rows, rows)
        return await manager.play(world.leases([task], 1), SAMPLING)

    played = [*world.run(main, real_time=True), *kept]
    assert [(t.outcome, t.failure) for t in played] == [(Outcome.COMPLETED, None)] * 2


async def _keep(kept: list, trajectories, nursery: trio.Nursery) -> None:
    kept += trajectories
    nursery.cancel_scope.cancel()
