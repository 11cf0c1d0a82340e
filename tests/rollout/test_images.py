"""Images in attempts."""

from __future__ import annotations

import dataclasses

import pytest

from agentrl.chat.chat import Chat
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


def test_the_session_shows_the_image(stage, seeing, shown):
    world = stage.World(lambda turn, text: "42", chat=seeing, agent={"tools": ()})
    [trajectory] = world.play(shown("single_turn_agent"))
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.failure
    [placed] = trajectory.images
    where = slice(placed.position, placed.position + placed.num_tokens)
    assert set(trajectory.token_ids[where].tolist()) == {seeing.images.placeholder}
    assert not trajectory.action_mask[where].any()
