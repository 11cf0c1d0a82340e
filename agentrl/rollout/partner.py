"""The interaction partner of one attempt."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.config.agent import AgentConfig
from agentrl.errors import PluginError, ToolError
from agentrl.plugins import Environment, Interaction, InteractionReply, Registry
from agentrl.plugins.blame import blaming, wrong_return
from agentrl.rollout.asyncio_host import AsyncioHost
from agentrl.rollout.guests import Guest, is_inherited
from agentrl.types import Message, Task

VERLS_INTERACTION = (
    "(text, is_done, reward): a tuple is verl's form, for files in agent.verl_interaction_config"
)


class Partner:
    """One instance of the row's interaction. It is started before its first reply."""

    def __init__(self, name: str, interaction: Interaction, guest: Guest) -> None:
        self.name = name
        self._interaction = interaction
        self._guest = guest
        self._has_replied = False

    @classmethod
    def of(
        cls,
        task: Task,
        registry: Registry[Interaction],
        config: AgentConfig,
        *,
        host: AsyncioHost,
        environment: Environment | None = None,
    ) -> Partner | None:
        """Return the partner that the row names; None if the row has no interaction_kwargs.

        `environment`: given to the partner.

        Raises:
            PluginError: the name is missing or unknown.
        """
        if task.interaction_kwargs is None:
            return None
        kwargs = dict(task.interaction_kwargs)
        name = kwargs.pop("name", None)
        if not isinstance(name, str):
            raise PluginError(
                f"task {task.task_id}: interaction_kwargs.name is missing; registered: "
                f"{', '.join(registry.names())}"
            )
        with blaming("interaction", name):
            interaction = registry.create(name, config.interaction_config)
        interaction.environment = environment
        guest = Guest(
            interaction, f"interaction {name!r}", kwargs, host=host, timeout_s=config.interaction_timeout_s
        )
        return cls(interaction.name, interaction, guest)

    async def respond(self, messages: Sequence[Message]) -> InteractionReply:
        """Return the partner's reply to the conversation so far.

        Raises:
            ToolError: the partner broke or timed out.
        """
        with blaming("interaction", self.name):
            reply = await self._guest.use(self._interaction.respond, messages)
            if not isinstance(reply, InteractionReply):
                verls = isinstance(reply, tuple)
                cure = f"return agentrl.plugins.InteractionReply{VERLS_INTERACTION if verls else ''}"
                raise wrong_return(f"interaction {self.name!r}", self._interaction.respond, reply, cure)
        self._has_replied = True
        return reply

    async def score(self) -> float | None:
        """Return the final score of the conversation; None if the partner gives none or never replied.

        Raises:
            ToolError: the partner broke, timed out, or returned something other than a finite number.
        """
        if not self._has_replied or is_inherited(self._interaction.score):
            return None
        with blaming("interaction", self.name):
            return await self._guest.score()

    async def close(self) -> ToolError | None:
        """Close the partner if it was started; return why that failed, or None. Never raises."""
        return await self._guest.close()
