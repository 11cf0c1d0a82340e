"""Testing of plugins: a scripted model in the real loop, pytest fixtures, and contracts that every plugin
must meet.

from agentrl.testing import call, play
trajectory = play(tools=[MyTool], turns=[call("my_tool", x=1), "done"])
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.extras.testing.script import Call, Raw, Says, Script, ScriptedModel, ScriptedTurn, call
    from agentrl.extras.testing.stage import Stage, play, tiny_chat

__all__ = [
    "Call",
    "Raw",
    "Says",
    "Script",
    "ScriptedModel",
    "ScriptedTurn",
    "Stage",
    "call",
    "play",
    "tiny_chat",
]
_OF_THE_STAGE = {"Stage", "play", "tiny_chat"}


def __getattr__(name: str) -> Any:
    # The command line looks into this room for its commands, and needs none of these.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "stage" if name in _OF_THE_STAGE else "script"
    return getattr(import_module(f"{__name__}.{module}"), name)
