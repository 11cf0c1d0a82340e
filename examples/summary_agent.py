"""An agent whose conversation may be longer than the model's context: when it becomes long, the model sums it
up, and goes on from its own summary (docs/agents.md).

    agent:
      plugins: [examples/summary_agent.py]
      default: summary_agent
      agent_config: {summary_agent: {max_context_tokens: 3000}}
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from agentrl.plugins import AgentLoop, Session
from agentrl.types import Message, Task

ASK = "The conversation is too long. Write down what you found out and what is left to do; call no tool."
NOTES = "{question}\n\nYour notes so far:\n{notes}"


class SummaryAgent(AgentLoop):
    """Plays turns with tools. Beyond `max_context_tokens`, it restarts from the first prompt and notes.

    Notes are sampled turns: they are trained on, with the advantage of the attempt that they led to.
    """

    name: ClassVar[str] = "summary_agent"

    async def run(self, task: Task, session: Session) -> None:
        first = session.messages
        for _ in range(session.limits.turns):
            if session.num_context_tokens > self.config.get("max_context_tokens", 3000):
                session.add_user_message(ASK)
                notes = (await session.generate()).message.content
                session.restart(from_notes(first, notes))
            turn = await session.generate()
            if not turn.tool_calls:
                return
            await session.call_tools(turn)
            if session.is_finished:
                return
        session.stop_at_turn_limit()


def from_notes(first: tuple[Message, ...], notes: str) -> list[Message]:
    """Return the first prompt with the notes in its last message, as some templates refuse two of a user."""
    *others, question = first
    content = NOTES.format(question=question.content, notes=notes)
    return [*others, dataclasses.replace(question, content=content)]
