"""pytest fixtures, found through the entry point `pytest11`.

agentrl_chat     tokenizer and template of the scripted model; override it in your conftest.py
agentrl_model    creates a ScriptedModel from a script
play             plays one conversation and returns its trajectory; see `agentrl.testing.play`

Imports are inside the fixtures, because pytest loads this file in every project of the environment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from agentrl.chat.chat import Chat
    from agentrl.extras.testing import Script, ScriptedModel
    from agentrl.types import Trajectory

pytest.register_assert_rewrite("agentrl.extras.testing.contracts")


@pytest.fixture(scope="session")
def agentrl_chat() -> Chat:
    """Return the byte-level tokenizer of the quickstart."""
    from agentrl.extras.testing import tiny_chat

    return tiny_chat()


@pytest.fixture
def agentrl_model(agentrl_chat: Chat) -> Callable[..., ScriptedModel]:
    """Return a function that creates a ScriptedModel: `agentrl_model(["hello", call("search",
    query="x")])`.
    """
    from agentrl.extras.testing import ScriptedModel

    def model(script: Script, **options: Any) -> ScriptedModel:
        return ScriptedModel(agentrl_chat, script, **options)

    return model


@pytest.fixture
def play(agentrl_chat: Chat) -> Callable[..., Trajectory]:
    """Return `agentrl.testing.play` with the project's own `agentrl_chat`."""
    from agentrl.extras.testing import play as play_with

    def play_here(turns: Script, **options: Any) -> Trajectory:
        return play_with(turns, **{"chat": agentrl_chat, **options})

    return play_here
