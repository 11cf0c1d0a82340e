"""The agent of tool use: generate, run the calls, repeat until a turn calls nothing."""

from __future__ import annotations

from typing import ClassVar

from agentrl.plugins import AgentLoop, Session
from agentrl.types import Task


class ToolAgent(AgentLoop):
    """Plays turns until one asks for no tool; where the row has an interaction partner, that turn goes to the partner."""

    name: ClassVar[str] = "tool_agent"

    async def run(self, task: Task, session: Session) -> None:
        for turns_left in reversed(range(session.limits.turns)):
            turn = await session.generate()
            if turn.tool_calls:
                if turns_left:  # nobody would read what the last turn's calls answer
                    await session.call_tools(turn)
                if session.is_finished:
                    return
            elif not session.has_interaction or (await session.interact()).is_done:
                return
        session.stop_at_turn_limit()
