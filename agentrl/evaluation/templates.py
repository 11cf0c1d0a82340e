"""Prompt templates: the instruction around a question, with name and version, so that results are comparable.

A published template never changes: a new wording is a new version. `none` leaves the prompts of the rows
unchanged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from agentrl.errors import ConfigError, DataError
from agentrl.types import Message, Task

NONE = "none"
QUESTION = "{question}"


@dataclass(frozen=True, slots=True)
class Template:
    """A user message with the question in place of `{question}`, after an optional system message."""

    name: str
    version: int
    user: str
    system: str | None = None

    @property
    def full_name(self) -> str:
        return f"{self.name}@{self.version}"

    def messages(self, question: str) -> tuple[Message, ...]:
        """Return the prompt of a question."""
        system = () if self.system is None else (Message("system", self.system),)
        return (*system, Message("user", self.user.replace(QUESTION, question)))


_BOXED = "Please reason step by step, and put your final answer within \\boxed{}."

TEMPLATES: Mapping[str, Template] = {
    template.full_name: template
    for template in (
        # verl's examples/data_preprocess/gsm8k.py
        Template(
            "gsm8k", 1, QUESTION + ' Let\'s think step by step and output the final answer after "####".'
        ),
        # model cards of Qwen2.5-Math and DeepSeek-R1: after the question, and as a system message
        Template("boxed", 1, f"{QUESTION}\n{_BOXED}"),
        Template("boxed_system", 1, QUESTION, system=_BOXED),
        Template(
            "aime_boxed",
            1,
            f"{QUESTION}\nThe answer is a whole number from 0 to 999. {_BOXED}",
        ),
        # verl's recipe/dapo
        Template(
            "dapo",
            1,
            "Solve the following math problem step by step. The last line of your response should be of the "
            "form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
            + QUESTION
            + '\n\nRemember to put your answer on its own line after "Answer:".',
        ),
        Template("question", 1, QUESTION),
    )
}


def find_template(name: str) -> Template | None:
    """Return the template `NAME@VERSION`. A bare name gives its latest version; `none` gives None.

    Raises:
        ConfigError: no template has this name.
    """
    if name == NONE:
        return None
    if name in TEMPLATES:
        return TEMPLATES[name]
    versions = [template for template in TEMPLATES.values() if template.name == name]
    if not versions:
        raise ConfigError(
            f"prompt template {name!r} does not exist; available: {NONE}, {', '.join(TEMPLATES)}"
        )
    return max(versions, key=lambda template: template.version)


def template_of(data_set: str, templates: Mapping[str, str]) -> Template | None:
    """Return the template of a data set: its own in `eval.templates`, else that of `*`, else None."""
    return find_template(templates.get(data_set, templates.get("*", NONE)))


def applied(task: Task, template: Template | None) -> Task:
    """Return the task with the template's prompt around its question.

    The question is `extra_info.question`, else the row's only user message.

    Raises:
        DataError: the row's prompt is a conversation, so no single message is the question.
    """
    if template is None:
        return task
    question = task.extra_info.get("question")
    if not isinstance(question, str) or not question:
        said = [message for message in task.messages if message.role != "system"]
        if [message.role for message in said] != ["user"]:
            raise DataError(
                f"{task.task_id}: prompt template {template.full_name} needs a question: "
                "extra_info.question, or a prompt of one user message; this prompt has "
                f"{', '.join(message.role for message in task.messages)}; use template {NONE}"
            )
        question = said[0].content
    return dataclasses.replace(task, messages=template.messages(question))
