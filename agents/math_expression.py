"""The worked example of an agent loop of your own: copy this file, and name the copy in `agent.plugins`.

The model writes a sum as one expression, the agent evaluates it, and the model gives its answer:

    user       12 boxes of 34 eggs, 5 broken. How many are whole? Write one arithmetic expression ...
    assistant  12 * 34 - 5
    user       It is 403. Give your answer in the form `#### number`.
    assistant  #### 403

An expression that cannot be evaluated is sent back once. An agent loop is a coroutine that decides what happens next; the
session writes every token, keeps the budgets, and ends `run` by itself when one is exhausted.
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
    """What a config may say in `agent.agent_config.math_expression`."""

    evaluated_reward: float = 0.0  # for an expression that could be evaluated


class MathExpression(AgentLoop):
    """Lets the model write an expression, evaluates it with the calculator, and asks for the answer."""

    name: ClassVar[str] = "math_expression"  # rows choose the agent by this name, in their column `agent_name`
    template_shows_tools: ClassVar[bool] = False  # the agent calls the calculator; the model need not know how
    required_tools: ClassVar[tuple[str, ...]] = ("calculator",)  # without it in agent.tools, nothing is started

    def __init__(self, config: JsonObject | None = None) -> None:
        super().__init__(config)
        self._options = read_options(MathExpressionOptions, self.config, plugin="agent 'math_expression'")

    def prompt(self, task: Task, tools: Sequence[JsonObject]) -> Sequence[Message]:
        """Append the instruction to the question. Rows are measured by this prompt before the run, so nothing in it may vary."""
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
        """Sample a turn, and give the last line of it to the calculator."""
        turn = await session.generate()
        expression = turn.message.content.strip().rpartition("\n")[2]
        [result] = await session.run_tools([ToolCall("expression", "calculator", {"expression": expression})])
        return result
