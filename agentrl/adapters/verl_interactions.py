"""verl's interactions as interactions of ours.

Of a class there is one instance in the process, which knows trajectories by an id, as in verl:
    start_interaction      at the first reply; the row's `interaction_kwargs`, `name` included
    generate_response      for each reply; the same. Its score is the turn's interaction reward, numbers among its further facts
                           are reported
    calculate_score        once, when the agent loop is done, if the class has one and no turn had a score other than 0: what
                           was scored turn by turn is not counted twice
    finalize_interaction   always, once start_interaction returned
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, ClassVar

from agentrl.adapters import verl_source
from agentrl.errors import PluginError, ToolError
from agentrl.plugins import Interaction, InteractionReply
from agentrl.types import Message

BASE = "verl.interactions.base:BaseInteraction"


def verl_interactions(path: str) -> list[type[Interaction]]:
    """Return the interactions of verl's YAML (`interaction: [{name, class_name, config}, ...]`).

    Raises:
        PluginError: the file or a class is missing or wrong, or two have one name.
    """
    where = f"agent.verl_interaction_config={path!r}"
    classes: dict[str, type[Interaction]] = {}
    for entry in verl_source.read_entries(path, "interaction", option="verl_interaction_config"):
        name = entry.get("name") or default_name(entry["class_name"])
        if name in classes:
            raise PluginError(f"{where}: two interactions are named {name!r}")
        config = {**(entry.get("config") or {}), "name": name}
        implementation = verl_source.create(entry["class_name"], where=where, config=config)
        attributes = {
            "__doc__": type(implementation).__doc__,
            "name": name,
            "implementation": implementation,
            "has_score": verl_source.overrides(implementation, "calculate_score", base=BASE),
        }
        classes[name] = type(f"VerlInteraction_{name}", (VerlInteraction,), attributes)
    return list(classes.values())


def default_name(class_name: str) -> str:
    """Return the name of an entry that has none: of its class, without `Interaction`."""
    simple = class_name.rpartition(".")[2]
    return simple.removesuffix("Interaction").lower()


class VerlInteraction(Interaction):
    """A class of verl's; `implementation` is its one instance."""

    runtime = "asyncio"
    implementation: ClassVar[Any]
    has_score: ClassVar[bool]
    """Whether `calculate_score` is the class's own."""
    _id: str | None = None
    _has_scored = False

    async def start(self, **interaction_kwargs: Any) -> None:
        self._kwargs = {**interaction_kwargs, "name": self.name}
        self._id = str(await self.implementation.start_interaction(uuid.uuid4().hex, **self._kwargs))

    async def respond(self, messages: Sequence[Message]) -> InteractionReply:
        shown = [{"role": message.role, "content": message.content} for message in messages]
        answer = await self.implementation.generate_response(self._id, shown, **self._kwargs)
        if not (isinstance(answer, tuple) and len(answer) == 4):
            raise ToolError(f"interaction {self.name!r} returned {type(answer).__name__}; verl's return (is_done, text, score, facts)")
        is_done, text, score, facts = answer
        reward = verl_source.number(score)
        self._has_scored = self._has_scored or bool(reward)
        return InteractionReply(str(text), bool(is_done), reward=reward, metrics=verl_source.metrics(facts))

    async def score(self) -> float | None:
        if self._id is None or self._has_scored or not self.has_score:
            return None
        method = self.implementation.calculate_score
        return verl_source.number(await method(*verl_source.with_id(method, self._id)))

    async def finalize(self) -> None:
        instance_id, self._id = self._id, None
        if instance_id is not None:
            method = self.implementation.finalize_interaction
            await method(*verl_source.with_id(method, instance_id))
