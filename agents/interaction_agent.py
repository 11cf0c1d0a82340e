"""The interaction agent: alternates turns (with tools, if offered) with replies of the interaction
partner.
"""

from __future__ import annotations

from typing import ClassVar

from agentrl.agents.tool_agent import ToolAgent

from agentrl.errors import PluginError
from agentrl.plugins import Session
from agentrl.types import Task


class InteractionAgent(ToolAgent):
    """Talks with the row's interaction partner until the partner is done. Tool calls run before the partner
    replies.

    tool_agent also talks with a partner if the row has one; this agent rejects rows without one.
    """

    name: ClassVar[str] = "interaction_agent"
    needs_interaction: ClassVar[bool] = True

    async def run(self, task: Task, session: Session) -> None:
        if not session.has_interaction:
            raise PluginError(
                f"task {task.task_id}: interaction_agent needs interaction_kwargs in the row; use tool_agent "
                "without a partner"
            )
        await super().run(task, session)
