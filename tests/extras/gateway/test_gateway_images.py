"""Images in attempts of programs: what they would not get is refused."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import pytest

from agentrl.chat.chat import Chat
from agentrl.errors import DataError
from agentrl.extras.gateway.openai_agent import OpenAIAgent
from agentrl.plugins import AgentLoop
from agentrl.types import Message, Outcome
from parts.vision import stored, write_seeing_model


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    return Chat.load(str(write_seeing_model(tmp_path_factory.mktemp("model") / "seeing")))


@pytest.fixture
def shown(stage, tmp_path):
    """Return a task that shows an image to an agent."""
    [image] = stored(tmp_path, (56, 56))

    def task(agent):
        message = Message("user", "<image>What is 6 * 7?", images=(image,))
        return dataclasses.replace(stage.task(agent=agent), messages=(message,))

    return task


class Guest(AgentLoop):
    """Opens the gateway for a program."""

    name: ClassVar[str] = "guest"
    uses_tools: ClassVar[bool] = False

    async def run(self, task, session) -> None:
        async with session.serve_openai():
            pytest.fail("the program runs")


def test_an_attempt_whose_images_would_not_reach_the_program_fails(stage, seeing, shown):
    world = stage.World(lambda turn, text: "42", chat=seeing, plugins=[Guest], agent={"tools": ()})
    [trajectory] = world.play(shown("guest"), real_time=True)
    assert trajectory.outcome is not Outcome.COMPLETED
    assert "programs behind the gateway do not get" in trajectory.failure.text


def test_rows_with_images_are_refused_for_programs(shown):
    with pytest.raises(
        DataError, match=r"t:0: messages contain images, which programs of openai_agent do not"
    ):
        OpenAIAgent({"command": ["true"]}).prompt(shown("openai_agent"), [])
