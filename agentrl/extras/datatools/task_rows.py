"""Convert problems to rows of the schema that `agentrl.data.rows` reads, with a prompt and an agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from agentrl.errors import DataError
from agentrl.extras.datatools.instructions import PLACEHOLDER
from agentrl.extras.datatools.problems import Problem

_TEXT = pa.string()
PROMPT = pa.list_(pa.struct([("role", _TEXT), ("content", _TEXT)]))
_CREATE_KWARGS = pa.struct([("create_kwargs", pa.struct([("ground_truth", _TEXT)]))])
_INTERACTION_KWARGS = pa.struct([("name", _TEXT), ("query", _TEXT), ("ground_truth", _TEXT)])


def row_schema(*extra_info: tuple[str, pa.DataType]) -> pa.Schema:
    """Return the schema of rows with a prompt and an agent. extra_info: its fields."""
    return pa.schema(
        [
            ("data_source", _TEXT),
            ("prompt", PROMPT),
            ("ability", _TEXT),
            ("reward_model", pa.struct([("style", _TEXT), ("ground_truth", _TEXT)])),
            ("extra_info", pa.struct(list(extra_info))),
            ("agent_name", _TEXT),
        ]
    )


@dataclass(frozen=True, slots=True)
class RowStyle:
    """Prompt and agent of rows.

    Attributes:
        agent: a registered name.
        tools: tools that are started with the row's ground truth, in the order shown.
        interaction: name of the interaction; None: none.
        system: the system message; "": none.
        template: the user message, with `{question}` in place of the question.
    """

    agent: str = "single_turn_agent"
    tools: tuple[str, ...] = ()
    interaction: str | None = None
    system: str = ""
    template: str = PLACEHOLDER

    def __post_init__(self) -> None:
        if PLACEHOLDER not in self.template:
            raise DataError(
                f"the template {self.template[:80]!r} must contain {PLACEHOLDER} in the place of the question"
            )

    def prompt(self, question: str) -> list[dict[str, str]]:
        """Return the chat messages that ask a question."""
        # Not str.format: questions and templates often contain LaTeX braces.
        user = {"role": "user", "content": self.template.replace(PLACEHOLDER, question)}
        return [{"role": "system", "content": self.system}, user] if self.system else [user]


def task_row(problem: Problem, style: RowStyle, *, data_source: str, ability: str) -> dict[str, Any]:
    """Return the row of a problem."""
    truth = problem.ground_truth
    partner = {"name": style.interaction, "query": problem.question, "ground_truth": truth}
    return {
        "data_source": data_source,
        "prompt": style.prompt(problem.question),
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {
            "split": problem.split,
            "index": problem.index,
            "id": problem.id,
            "question": problem.question,
            "answer": problem.solution or None,
            "difficulty": problem.difficulty or None,
            "subject": problem.subject or None,
            "need_tools_kwargs": bool(style.tools),
            "tools_kwargs": {name: {"create_kwargs": {"ground_truth": truth}} for name in style.tools}
            or None,
            "interaction_kwargs": partner if style.interaction else None,
        },
        "agent_name": style.agent,
    }


def task_schema(styles: Sequence[RowStyle]) -> pa.Schema:
    """Return the schema of rows in these styles.

    `tools_kwargs` has one field per tool, and is absent without tools.
    """
    tools = dict.fromkeys(name for style in styles for name in style.tools)
    extra_info: Mapping[str, pa.DataType] = {
        **dict.fromkeys(("split", "id", "question", "answer", "difficulty", "subject"), _TEXT),
        "index": pa.int64(),
        "need_tools_kwargs": pa.bool_(),
        # Parquet has no structs without fields.
        **({"tools_kwargs": pa.struct([(name, _CREATE_KWARGS) for name in tools])} if tools else {}),
        **({"interaction_kwargs": _INTERACTION_KWARGS} if any(style.interaction for style in styles) else {}),
    }
    return row_schema(*extra_info.items())
