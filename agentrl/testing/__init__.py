"""Testing of plugins: the public address of what a room registers as `play` of `agentrl.testing`.

from agentrl.testing import call, play
trajectory = play(tools=[MyTool], turns=[call("my_tool", x=1), "done"])
"""

from __future__ import annotations

from typing import Any

from agentrl.registered import required

GROUP = "agentrl.testing"


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    return getattr(required(GROUP, "play", by="agentrl.testing"), name)
