"""The agent of tool use: generate, run the calls, repeat until a turn calls nothing."""

from __future__ import annotations

from typing import ClassVar

from agentrl.plugins import AgentLoop, Session
from agentrl.types import Task


class ToolAgent(AgentLoop):
    """Plays turns until one asks for no tool; where the row has an interaction partner, that turn goes to the partner.

    The partner hears the last turn too, for its verdict and its reward, even if no turn is left to read its answer.
    """

    name: ClassVar[str] = "tool_agent"

    async def run(self, task: Task, session: Session) -> None:
        num_user_turns = 0
        for _ in range(session.limits.turns):
            turn = await session.generate()
            if turn.tool_calls:
                await session.call_tools(turn)  # also in the last turn: one may be `finish`, or give a reward
                if session.is_finished:
                    return
                continue
            if not session.has_interaction or (await session.interact()).is_done:
                return
            if num_user_turns == session.limits.user_turns:
                break
            num_user_turns += 1
        session.stop_at_turn_limit()
