"""An agent that writes twice."""

from typing import ClassVar

from agentrl.plugins import AgentLoop, Session
from agentrl.types import Task


class TwoDrafts(AgentLoop):
    """Asks for a better second draft."""

    name: ClassVar[str] = "two_drafts"

    async def run(self, task: Task, session: Session) -> None:
        first = await session.generate()
        if first.tool_calls:
            await session.call_tools(first)
            if session.is_finished:
                return
        session.add_user_message(self.config.get("request", "Write it better."))
        await session.generate()
