"""The tool agent: generates a turn, runs its tool calls, and repeats until a turn has none."""

from __future__ import annotations

from typing import ClassVar

from agentrl.plugins import AgentLoop, Session
from agentrl.types import Task


class ToolAgent(AgentLoop):
    """Plays turns until one has no tool calls. If the row has an interaction partner, the partner replies to
    that turn.

    The partner also replies to the last turn allowed, because its reply can carry a reward.
    """

    name: ClassVar[str] = "tool_agent"

    async def run(self, task: Task, session: Session) -> None:
        num_user_turns = 0
        for _ in range(session.limits.turns):
            turn = await session.generate()
            if turn.tool_calls:
                await session.call_tools(
                    turn
                )  # even in the last turn: a call may be `finish` or give a reward
                if session.is_finished:
                    return
                continue
            if not session.has_interaction or (await session.interact()).is_done:
                return
            if num_user_turns == session.limits.user_turns:
                break
            num_user_turns += 1
        session.stop_at_turn_limit()
