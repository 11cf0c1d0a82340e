"""The agent of conversations: answer, listen to the partner, answer again."""

from __future__ import annotations

from typing import ClassVar

from agentrl.plugins import AgentLoop, Session
from agentrl.types import Task


class InteractionAgent(AgentLoop):
    """Talks with the row's interaction partner until the partner is done."""

    name: ClassVar[str] = "interaction_agent"
    uses_tools: ClassVar[bool] = False

    async def run(self, task: Task, session: Session) -> None:
        for _ in range(session.limits.turns):
            await session.generate()
            if (await session.interact()).is_done:
                return
        session.stop_at_turn_limit()
