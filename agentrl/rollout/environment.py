"""The environment of one attempt: started before the agent loop, closed after the rewards."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from agentrl.config.agent import AgentConfig
from agentrl.errors import EnvironmentFailed, ToolError
from agentrl.plugins import Environment, Plugins
from agentrl.plugins.blame import blaming, failure_of, wrong_return
from agentrl.plugins.fields import not_plain
from agentrl.rollout.asyncio_host import AsyncioHost
from agentrl.rollout.guests import Guest, is_inherited
from agentrl.rollout.recorder import Attempt
from agentrl.types import JsonObject, PluginId

ENVIRONMENT_FACTS = "environment_facts"
"""Key of an environment's facts in the `extra_info` of a trajectory."""


class AttemptEnvironment:
    """One instance of the row's environment. `plugin` is what tools, partner, agent and rewards get."""

    def __init__(self, plugin: Environment, guest: Guest, attempt: Attempt) -> None:
        self.plugin = plugin
        self._guest = guest
        self._attempt = attempt

    @classmethod
    def of(
        cls, attempt: Attempt, plugins: Plugins, config: AgentConfig, *, host: AsyncioHost
    ) -> AttemptEnvironment | None:
        """Return the environment that the row or the config names, not yet started; None if neither does.

        Raises:
            PluginError: the name is unknown, or the constructor raised.
        """
        environment_class = plugins.environment_of(attempt.task)
        if environment_class is None:
            return None
        kwargs = dict(attempt.task.environment_kwargs or {})
        with blaming("environment", environment_class.name):
            plugin = plugins.environments.create(kwargs.pop("name"), config.environment_config)
        guest = Guest(
            plugin,
            f"environment {plugin.name!r}",
            kwargs,
            host=host,
            timeout_s=config.environment_timeout_s,
            close_timeout_s=config.environment_close_timeout_s,
        )
        return cls(plugin, guest, attempt)

    async def start(self) -> None:
        """Start the environment.

        Raises:
            EnvironmentFailed: it raised, or its deadline passed.
            UserError: it refused the row's arguments.
        """
        with self._at_work("start"):
            await self._guest.start()

    async def facts(self) -> JsonObject:
        """Return the environment's facts, as they will be read from the stored trajectory.

        Raises:
            EnvironmentFailed: it raised, its deadline passed, or they are not plain JSON data.
        """
        if is_inherited(self.plugin.facts):
            return {}
        with self._at_work("facts"):
            facts = await self._guest.use(self.plugin.facts)
            who = f"environment {self.plugin.name!r}: `facts`"
            if not isinstance(facts, Mapping):
                raise wrong_return(who, self.plugin.facts, facts, "return a dictionary")
            try:
                return dict(json.loads(json.dumps(dict(facts), allow_nan=False)))
            except (TypeError, ValueError) as error:
                cure = f"return plain JSON data: {not_plain(facts, 'facts') or error}"
            raise wrong_return(who, self.plugin.facts, facts, cure)

    async def close(self) -> None:
        """Close the environment if it was started, whatever happened. Never raises, and is shielded.

        A failure no longer concerns the attempt, which is over; it is reported as one that was survived.
        """
        with self._attempt.scope.open(f"close environment {self.plugin.name}"):
            failed = await self._guest.close()
        if failed is not None:
            blamed = PluginId("environment", self.plugin.name)
            self._attempt.survived.append(failure_of(failed, otherwise=blamed))

    @contextmanager
    def _at_work(self, what: str) -> Iterator[None]:
        name = self.plugin.name
        with self._attempt.scope.open(f"environment {name}", doing=f"its {what}"):
            with blaming("environment", name):
                try:
                    yield
                except ToolError as error:
                    raise EnvironmentFailed(str(error)) from error
