"""An example of a custom agent loop: copy this file and name the copy in `agent.plugins`.

The model writes an arithmetic expression, the agent evaluates it, and the model gives its answer:

    user       12 boxes of 34 eggs, 5 broken. How many are whole? Write one arithmetic expression ...
    assistant  12 * 34 - 5
    user       It is 403. Give your answer in the form `#### number`.
    assistant  #### 403

If the expression cannot be evaluated, the model gets one more try. An agent loop is a coroutine that decides
what happens next. The session records every token, enforces the budgets, and ends `run` when one is
exhausted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from agentrl.plugins import AgentLoop, Session, ToolResult
from agentrl.plugins.options import Options, read_options
from agentrl.types import JsonObject, Message, Task, ToolCall

INSTRUCTION = "Write one arithmetic expression for the answer, in a line of its own, and nothing else."
REPEAT = "That could not be evaluated ({problem}). Write the expression again."
CONCLUDE = "It is {value}. Give your answer in the form `#### number`."


class MathExpressionOptions(Options):
    """Options in `agent.agent_config.math_expression`."""

    evaluated_reward: float = 0.0  # reward for an expression that can be evaluated


class MathExpression(AgentLoop):
    """Lets the model write an expression, evaluates it with the calculator, and asks for the answer."""

    name: ClassVar[str] = (
        "math_expression"  # rows select the agent by this name, in their column `agent_name`
    )
    template_shows_tools: ClassVar[bool] = False  # the agent calls the calculator, not the model
    required_tools: ClassVar[tuple[str, ...]] = (
        "calculator",
    )  # a run without it in agent.tools does not start

    def __init__(self, config: JsonObject | None = None) -> None:
        super().__init__(config)
        self._options = read_options(MathExpressionOptions, self.config, plugin="agent 'math_expression'")

    def prompt(self, task: Task, tools: Sequence[JsonObject]) -> Sequence[Message]:
        """Append the instruction to the question.

        Prompt lengths are measured before the run, so it must be deterministic.
        """
        *context, question = task.messages
        return [*context, dataclasses.replace(question, content=f"{question.content}\n{INSTRUCTION}")]

    async def run(self, task: Task, session: Session) -> None:
        result = await self._evaluate(session)
        if result.is_error:
            session.add_user_message(REPEAT.format(problem=result.text))
            result = await self._evaluate(session)
        if result.is_error:
            return  # the reward finds no answer
        session.add_reward("evaluated", self._options.evaluated_reward)
        session.add_user_message(CONCLUDE.format(value=result.text))
        await session.generate()

    async def _evaluate(self, session: Session) -> ToolResult:
        """Sample a turn and pass its last line to the calculator."""
        turn = await session.generate()
        expression = turn.message.content.strip().rpartition("\n")[2]
        [result] = await session.run_tools([ToolCall("expression", "calculator", {"expression": expression})])
        return result
