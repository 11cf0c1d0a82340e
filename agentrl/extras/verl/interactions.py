"""verl's interactions as Interaction classes.

As in verl, a class has one instance per process, which distinguishes attempts by an id:
    start_interaction      at the first reply, with the task's `interaction_kwargs`, including `name`
    generate_response      for each reply, with the same arguments. Its score is the turn's interaction
                           reward; numeric entries of its metrics are reported
    calculate_score        once, after the agent loop, if the class overrides it and all scores of turns were
                           0: rewards given turn by turn must not count twice
    finalize_interaction   always, if start_interaction returned
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, ClassVar

from agentrl.errors import PluginError
from agentrl.extras.verl import loading
from agentrl.plugins import Interaction, InteractionReply
from agentrl.plugins.blame import wrong_return
from agentrl.types import Message

BASE = "verl.interactions.base:BaseInteraction"


def verl_interactions(path: str) -> list[type[Interaction]]:
    """Return the interactions of verl's YAML (`interaction: [{name, class_name, config}, ...]`).

    Raises:
        PluginError: the file or a class is missing or invalid, or two have the same name.
    """
    where = f"agent.verl_interaction_config={path!r}"
    classes: dict[str, type[Interaction]] = {}
    for entry in loading.read_entries(path, "interaction", option="verl_interaction_config"):
        name = entry.get("name") or default_name(entry["class_name"])
        if name in classes:
            raise PluginError(f"{where}: two interactions are named {name!r}")
        config = {**(entry.get("config") or {}), "name": name}
        implementation = loading.create(entry["class_name"], where=where, config=config)
        attributes = {
            "__doc__": type(implementation).__doc__,
            "name": name,
            "implementation": implementation,
            "has_score": loading.overrides(implementation, "calculate_score", base=BASE),
        }
        classes[name] = type(f"VerlInteraction_{name}", (VerlInteraction,), attributes)
    return list(classes.values())


def default_name(class_name: str) -> str:
    """Return the name of an entry without one: its class name without `Interaction`."""
    simple = class_name.rpartition(".")[2]
    return simple.removesuffix("Interaction").lower()


class VerlInteraction(Interaction):
    """An interaction class of verl's. `implementation` is its one instance."""

    runtime = "asyncio"
    implementation: ClassVar[Any]
    has_score: ClassVar[bool]
    """Whether the class overrides `calculate_score`."""
    _id: str | None = None
    _has_scored = False

    async def start(self, **interaction_kwargs: Any) -> None:
        self._kwargs = {**interaction_kwargs, "name": self.name}
        self._id = str(await self.implementation.start_interaction(uuid.uuid4().hex, **self._kwargs))

    async def respond(self, messages: Sequence[Message]) -> InteractionReply:
        shown = [{"role": message.role, "content": message.content} for message in messages]
        method = self.implementation.generate_response
        answer = await method(self._id, shown, **self._kwargs)
        if not (isinstance(answer, tuple) and len(answer) == 4):
            who = f"interaction {self.name!r}"
            raise wrong_return(who, method, answer, "verl's return (is_done, text, score, facts)")
        is_done, text, score, facts = answer
        reward = loading.number(score)
        self._has_scored = self._has_scored or bool(reward)
        return InteractionReply(str(text), bool(is_done), reward=reward, metrics=loading.metrics(facts))

    async def score(self) -> float | None:
        if self._id is None or self._has_scored or not self.has_score:
            return None
        method = self.implementation.calculate_score
        return loading.number(await method(*loading.with_id(method, self._id)))

    async def finalize(self) -> None:
        instance_id, self._id = self._id, None
        if instance_id is not None:
            method = self.implementation.finalize_interaction
            await method(*loading.with_id(method, instance_id))
