"""Says which adapters of roles learn nothing, because no conversation of their names was spoken in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from agentrl.config.schema import Config
from agentrl.controller.listeners import FinishedStep, Opened, RunListener
from agentrl.controller.run_dir import RunDir
from agentrl.data.attempt_facts import AttemptFacts

PATIENCE_BATCHES = 3
"""A role that speaks only now and then is not reported after one batch."""


class SilentRoles:
    """Watches the first batches of a run. roles: adapter -> its conversations (`model.lora.roles`)."""

    def __init__(self, roles: Mapping[str, Sequence[str]], say: Callable[[str], None]) -> None:
        self._roles = roles
        self._say = say
        self._spoken: set[str] = set()
        self._batches_left = PATIENCE_BATCHES if roles else 0

    def look(self, batch: Iterable[AttemptFacts]) -> None:
        """Note who spoke in a batch; after the last one, report the roles that did not."""
        if not self._batches_left:
            return
        self._batches_left -= 1
        self._spoken.update(name for attempt in batch for name in attempt.segment_names)
        if self._batches_left:
            return
        for role, conversations in self._roles.items():
            if self._spoken.isdisjoint(conversations):
                self._say(
                    f"model.lora.roles.{role}={list(conversations)}: nothing was sampled in such a "
                    f"conversation in {PATIENCE_BATCHES} batches, so the adapter learns nothing; it was in: "
                    f"{', '.join(sorted(self._spoken))}"
                )


class SilentRolesListener(RunListener):
    """Watches the batches that a run learns from."""

    def __init__(self, config: Config, run_dir: RunDir) -> None:
        self._roles = config.model.lora.roles

    def on_open(self, opened: Opened) -> None:
        self._silent = SilentRoles(self._roles, opened.observer.say)

    def on_step(self, step: FinishedStep) -> None:
        self._silent.look(step.attempts)


def silent_roles(config: Config, run_dir: RunDir) -> RunListener | None:
    return SilentRolesListener(config, run_dir) if config.model.lora.roles else None
