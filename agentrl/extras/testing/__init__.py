"""Testing of plugins: a scripted model in the real loop, pytest fixtures, and contracts that every plugin
must meet.

from agentrl.extras.testing import call
from agentrl.extras.testing import play
trajectory = play(tools=[MyTool], turns=[call("my_tool", x=1), "done"])
"""

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
