r"""Instructions about the form of the answer. Each asks for the form that the data set's reward expects."""

from __future__ import annotations

from collections.abc import Sequence

GSM8K_INSTRUCTION = (
    "Solve the problem step by step. End with a last line of the form `#### answer`, where answer is one "
    "number."
)
AIME_INSTRUCTION = (
    "Solve the problem step by step. The answer is a whole number from 0 to 999; put it into \\boxed{}."
)
MATH_INSTRUCTION = "Solve the problem step by step. Put the final answer into \\boxed{}."
CODE_INSTRUCTION = (
    "Solve the problem with a Python program. End with the whole program in one code block, between "
    "```python and ```."
)

PLACEHOLDER = "{question}"
"""Placeholder for the question in the template of a user message."""

CALCULATOR_INSTRUCTION = "Use the calculator for every computation."
TOOLS_INSTRUCTION = "Use the tools where they help."


def with_tools(instruction: str, tools: Sequence[str]) -> str:
    """Return the instruction, with a sentence about the tools if there are any."""
    if not instruction or not tools:
        return instruction
    return f"{instruction} {CALCULATOR_INSTRUCTION if tuple(tools) == ('calculator',) else TOOLS_INSTRUCTION}"
