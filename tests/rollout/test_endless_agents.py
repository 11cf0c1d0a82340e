"""Agent loops that catch everything, their own end included: the attempt ends all the same."""

import asyncio
import time
from contextlib import suppress
from typing import ClassVar

import pytest
import trio

from agentrl.plugins import AgentLoop
from agentrl.types import Outcome, PluginId
from parts.scripted import play

SOON_S = 30.0
"""The deadline of an attempt here is ten minutes, unless a test sets another."""


class CatchesExceptions(AgentLoop):
    name = "catches_exceptions"

    async def run(self, task, session):
        while True:
            with suppress(Exception):
                await session.generate()


class CatchesEverything(AgentLoop):
    name = "catches_everything"

    async def run(self, task, session):
        while True:
            with suppress(BaseException):
                await session.generate()


class CatchesWithinAScope(AgentLoop):
    name = "catches_within_a_scope"

    async def run(self, task, session):
        with trio.move_on_after(1000):
            while True:
                with suppress(BaseException):
                    await session.generate()


class SpeaksOn(AgentLoop):
    name = "speaks_on"

    async def run(self, task, session):
        while True:
            try:
                await session.generate()
            except Exception:  # noqa: BLE001 - as users write it
                session.add_user_message("go on")


class SpeaksOnInAConversation(AgentLoop):
    name = "speaks_on_in_a_conversation"

    async def run(self, task, session):
        other = session.conversation("other", session.messages)
        while True:
            with suppress(BaseException):
                await other.generate()


@pytest.mark.parametrize(
    "agent", [CatchesExceptions, CatchesEverything, CatchesWithinAScope, SpeaksOnInAConversation]
)
def test_an_agent_that_catches_its_end_is_stopped_and_its_attempt_counts(agent):
    began = time.monotonic()
    trajectory = play(["one", "two", "three"], agent=agent, max_turns=2)
    assert trajectory.outcome is Outcome.TURN_LIMIT
    assert trajectory.num_action_tokens > 0
    assert time.monotonic() - began < SOON_S


def test_a_call_that_raises_within_the_except_block_ends_the_agent_as_before():
    assert play(["one", "two"], agent=SpeaksOn, max_turns=1).outcome is Outcome.TURN_LIMIT


class CatchesItsDeadline(AgentLoop):
    name = "deaf"

    async def run(self, task, session):
        await session.generate()
        while True:
            with suppress(BaseException):
                await trio.sleep(1000)


def test_an_agent_that_catches_its_deadline_is_left_behind_and_blamed():
    trajectory = play(["one"], agent=CatchesItsDeadline, trajectory_timeout_s=0.3)
    assert trajectory.outcome is Outcome.TIMEOUT
    assert trajectory.failure.plugin == PluginId("agent", "deaf")
    assert trajectory.failure.text == "agent.trajectory_timeout_s=0.3 passed, which 'deaf' ignores"


class CleansUp(AgentLoop):
    name = "cleans_up"
    cleaned: ClassVar[list[int]] = []

    async def run(self, task, session):
        await session.generate()
        try:
            await trio.sleep(1000)
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(0.2)
            self.cleaned.append(1)


def test_an_agent_may_clean_up_after_its_deadline():
    trajectory = play(["one"], agent=CleansUp, trajectory_timeout_s=0.3)
    assert trajectory.outcome is Outcome.TIMEOUT
    assert trajectory.failure.plugin is None
    assert CleansUp.cleaned == [1]


class GuestCatchesEverything(AgentLoop):
    name = "guest_catches_everything"
    left: ClassVar[list[int]] = []

    async def run(self, task, session):
        await session.generate()
        await session.run_asyncio(self.wait)

    async def wait(self):
        while True:
            with suppress(BaseException):
                await asyncio.sleep(0.2)
                self.left.append(1)


def test_an_asyncio_function_that_catches_its_cancellation_does_not_go_on():
    trajectory = play(["one"], agent=GuestCatchesEverything, trajectory_timeout_s=0.3)
    assert trajectory.outcome is Outcome.TIMEOUT
    num = len(GuestCatchesEverything.left)
    time.sleep(1.0)
    assert len(GuestCatchesEverything.left) <= num + 1
