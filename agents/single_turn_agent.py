"""The single-turn agent: one answer, no tools."""

from __future__ import annotations

from typing import ClassVar

from agentrl.plugins import AgentLoop, Session
from agentrl.types import Task


class SingleTurnAgent(AgentLoop):
    """Samples one assistant turn."""

    name: ClassVar[str] = "single_turn_agent"
    uses_tools: ClassVar[bool] = False

    async def run(self, task: Task, session: Session) -> None:
        await session.generate()
