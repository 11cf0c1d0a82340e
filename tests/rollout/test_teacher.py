"""A teacher on servers: what it says lies on action tokens, and what it did not say is never learned from."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
import trio
from pydantic import ValidationError
from trio.testing import MockClock

from agentrl.config.distillation import DistillationConfig
from agentrl.config.schema import Config
from agentrl.data.trajectories import decode, encode
from agentrl.errors import RequestRefused, ServerError
from agentrl.plugins import AgentLoop
from agentrl.rollout.frozen_servers import FrozenServers
from agentrl.rollout.player_stack import PlayerParts, open_stack
from agentrl.rollout.recorder import Attempt
from agentrl.rollout.sampling import GreedySampling
from agentrl.rollout.teacher import Teacher
from agentrl.types import Message, Outcome
from parts.trajectories import make_trajectory


class Scores:
    """A server that scores a token by itself and the number of tokens before it; `failures` come first."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.asked: list[tuple[list[int], int]] = []

    async def prompt_logprobs(self, input_ids, *, first, rid):
        self.asked.append((list(input_ids), first))
        if self.failures:
            raise self.failures.pop(0)
        return np.array([score(input_ids, place) for place in range(first, len(input_ids))], np.float32)

    async def aclose(self) -> None:
        return


def score(ids, place) -> float:
    return -(ids[place] + place / 100)


def servers_of(*clients):
    by_url = {f"http://{number}": client for number, client in enumerate(clients)}
    return FrozenServers(lambda url, key: by_url[url], dict.fromkeys(by_url))


def taught(trajectory, *servers, timeout_s=60.0):
    async def main():
        teacher = Teacher(servers_of(*servers), timeout_s=timeout_s)
        try:
            return await teacher.taught(trajectory, key="a")
        finally:
            await teacher.aclose()

    return trio.run(main, clock=MockClock(autojump_threshold=0))


def test_each_segment_is_scored_from_its_first_action_token_on():
    turns = [-1, 0, 2, -1, -1, -1, 1, 1, -1]
    trajectory = make_trajectory(turns, segment_starts=(0, 3, 4), token_ids=range(1, 10))
    server = Scores()
    found = taught(trajectory, server)
    assert server.asked == [([1, 2, 3], 1), ([5, 6, 7, 8, 9], 2)]
    expected = [score([1, 2, 3], 1), score([1, 2, 3], 2), *(score([5, 6, 7, 8, 9], i) for i in (2, 3))]
    np.testing.assert_allclose(found.teacher_logprobs, expected)
    (stored,) = decode(encode([found]))
    np.testing.assert_array_equal(stored.teacher_logprobs, found.teacher_logprobs)


def test_a_failing_server_is_left_for_the_next_and_a_refusal_is_final():
    trajectory = make_trajectory([-1, 0, 0])
    bad, good = Scores(*[ServerError("down")] * 9), Scores()
    assert len(taught(trajectory, bad, good).teacher_logprobs) == 2
    with pytest.raises(ServerError, match="3 failures in a row, the last: down"):
        taught(trajectory, Scores(*[ServerError("down")] * 9))
    refusing = Scores(RequestRefused("too long", status=400))
    with pytest.raises(RequestRefused):
        taught(trajectory, refusing)
    assert len(refusing.asked) == 1


class Silent(Scores):
    async def prompt_logprobs(self, input_ids, *, first, rid):
        await trio.sleep_forever()


def test_a_silent_teacher_has_a_deadline():
    with pytest.raises(ServerError, match="timeout_s=5"):
        taught(make_trajectory([-1, 0]), Silent(), timeout_s=5.0)


class Once(AgentLoop):
    name: ClassVar[str] = "once"
    uses_tools: ClassVar[bool] = False

    async def run(self, task, session) -> None:
        await session.generate()


@pytest.mark.parametrize("is_greedy", [False, True])
@pytest.mark.parametrize("failures", [0, 3])
def test_an_attempt_that_no_teacher_scored_is_a_failure_without_rewards(stage, failures, is_greedy):
    world = stage.World(lambda turn, _: "hello", plugins=[Once], agent={"tools": ()})
    server = Scores(*[ServerError("down")] * failures)

    async def main(_manager):
        from agentrl.rollout.asyncio_host import AsyncioHost

        with AsyncioHost() as host:
            parts = PlayerParts(world.plugins, world.chat, host, world.prompt)
            teacher = Teacher(servers_of(server), timeout_s=60)
            stack = open_stack(world.agent, world.reward, world.router, parts, teacher=teacher)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(world.router.watch)
                attempt = Attempt(0, 0, stage.task(agent="once"), is_greedy=is_greedy)
                played = await stack.player.play(attempt, GreedySampling())
                nursery.cancel_scope.cancel()
            await stack.aclose()
            return played

    played = world.run(main)
    if failures and not is_greedy:
        assert played.outcome is Outcome.MODEL_ERROR
        assert played.rewards == ()
        assert "down" in str(played.failure)
        return
    assert played.outcome is Outcome.COMPLETED
    assert len(played.teacher_logprobs) == (0 if is_greedy else played.num_action_tokens)
    assert played.messages[-1] == Message("assistant", "hello")


def test_what_cannot_be_is_one_line():
    url = "http://127.0.0.1:1"
    with pytest.raises(ValidationError, match="name two teachers"):
        DistillationConfig(teacher="t", servers={"urls": [url]})
    with pytest.raises(ValidationError, match="set api_key_env"):
        DistillationConfig(servers={"urls": ["http://10.1.1.1:1"]})
    with pytest.raises(ValidationError, match="score prompts at temperature 1"):
        Config.model_validate(
            {
                "algorithm": {"distillation": {"servers": {"urls": [url]}}},
                "rollout": {"temperature": 0.7},
            }
        )
    assert DistillationConfig(servers={"urls": [url]}, with_rewards=False).replaces_rewards
    assert Teacher.of(DistillationConfig()) is None
