"""The dataset of a run, built from its config. What a row needs is checked before anything is played."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from agentrl.config.agent import AgentConfig
from agentrl.config.data import DataConfig
from agentrl.config.opponents import without_server
from agentrl.data.dataset import Dataset, check_source_weights
from agentrl.data.rows import AgentChoice
from agentrl.errors import AgentRLError, DataError, PluginError, concerning
from agentrl.plugins import AgentLoop, Environment, Interaction, Plugins, Tool, environment_tools
from agentrl.plugins.checks import check_start, place
from agentrl.types import JsonObject, Message, Task


class OpenedConversation(Protocol):
    def num_pending_tokens(self) -> int: ...


class PromptRenderer(Protocol):
    """The part of `agentrl.chat.chat.Chat` that is needed here."""

    def open(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> OpenedConversation: ...

    def check_tools(self, tools: Sequence[dict[str, Any]], messages: Sequence[Message]) -> None: ...

    def with_template_kwargs(self, given: Mapping[str, Any]) -> PromptRenderer: ...


def build_dataset(
    config: DataConfig,
    files: Sequence[str],
    playable: Playable,
    *,
    seed: int = 0,
    shuffle: bool = False,
    max_rows: int | None = None,
    change: Callable[[Task], Task] | None = None,
    images: Path | None = None,
) -> Dataset:
    """Open `files`, measure every prompt with the tools it offers, and check that every row can be played.

    Args:
        seed: of the order of the rows, if `shuffle`.
        change, images: see Dataset; a task is changed before it is measured and checked.

    Raises:
        DataError: a row is malformed, or cannot be scored.
        PluginError: a row needs an agent, tool, interaction or environment that is not registered.
    """
    return Dataset(
        files,
        config,
        agents=playable.agents,
        seed=seed,
        shuffle=shuffle,
        measure=playable.num_prompt_tokens,
        check=playable.check,
        max_rows=max_rows,
        change=change,
        images=images,
    )


def check_training_data(config: DataConfig, playable: Playable) -> int:
    """Check the first `data.check_rows` training rows of each file, before anything is started.

    Returns the number of rows. If `data.curriculum` weights sources, the sources of all rows are read too.
    The replay buffer checks every row when it opens the data.

    Raises:
        DataError, PluginError: as `build_dataset`; or a source has no weight, or a weight has no source.
    """
    rows = Dataset(
        config.train_files,
        config,
        agents=playable.agents,
        seed=0,
        shuffle=False,
        max_rows=config.max_train_rows,
    )
    rows.check_first(config.check_rows, measure=playable.num_prompt_tokens, check=playable.check)
    if config.curriculum.source_weights:
        check_source_weights(config.curriculum.source_weights, rows.sources())
    return len(rows)


class Playable:
    """Checks whether rows can be played: their agent, tools, interaction and environment, with the row's
    arguments for them.

    `check_reward`: raises if a task cannot be scored; None: nothing is scored.
    """

    def __init__(
        self,
        config: AgentConfig,
        plugins: Plugins,
        chat: PromptRenderer,
        check_reward: Callable[[Task], None] | None = None,
    ) -> None:
        self.agents = agent_choice(config, plugins)
        self._config = config
        self._plugins = plugins
        self._chat = chat
        self._check_reward = check_reward
        self._offered = OfferedTools(config, plugins)
        self._tools: dict[str, Tool] = {}
        self._partners: dict[str, Interaction] = {}
        self._environments: dict[str, Environment] = {}
        self._accepted: set[tuple[str, ...]] = set()

    def opponents(self, task: Task) -> Sequence[str]:
        """Return the names of the opponents that the task's agent plays against."""
        if self._plugins.agents.get(task.agent_name).opponents is AgentLoop.opponents:
            return ()
        return self._create_agent(task).opponents(task)

    def _check_opponents(self, task: Task) -> None:
        configured = self._config.opponents
        for name in self.opponents(task):
            if name not in configured:
                who = f"{task.task_id}: agent {task.agent_name}"
                raise DataError(f"{who}: {without_server(name, configured)}")

    def _create_agent(self, task: Task) -> AgentLoop:
        return self._plugins.agents.create(task.agent_name, self._config.agent_config)

    def num_prompt_tokens(self, task: Task) -> int:
        """Return the length of the task's prompt with the tools it offers, in tokens.

        Raises:
            PluginError: the agent cannot build the prompt.
        """
        agent = self._create_agent(task)
        schemas = self._offered.schemas(task)
        shown = schemas if agent.template_shows_tools else []
        return self._chat_of(task).open(_prompt(agent, task, schemas), shown).num_pending_tokens()

    def check(self, task: Task) -> None:
        """Check that the task can be played and scored.

        Raises:
            ConfigError: the task needs tools, but the chat template shows none, or calls cannot be read; or
                the template does not read the row's arguments for it.
            DataError: the task cannot be scored, or lacks what its agent needs.
            PluginError: an agent, tool, interaction or environment is not registered or not offered, or
                `start` does not accept the row's arguments.
        """
        agent = self._plugins.agents.get(task.agent_name)
        self._chat_of(task)
        for name in self._plugins.offered_tools(task, self._config.tools):
            self._check_tool(name, task)
        self._check_shown(task)
        if agent.uses_tools:
            self._check_names(task)
        if agent.needs_interaction and task.interaction_kwargs is None:
            raise DataError(
                f"{task.task_id}: agent {agent.name} needs extra_info.interaction_kwargs with a name"
            )
        self._check_opponents(task)
        if task.interaction_kwargs is not None:
            self._check_partner(task.interaction_kwargs)
        if task.environment_kwargs is not None:
            self._check_environment(agent, task, task.environment_kwargs)
        if self._check_reward is not None:
            self._check_reward(task)

    def _chat_of(self, task: Task) -> PromptRenderer:
        with concerning("extra_info.chat_template_kwargs"):
            return self._chat.with_template_kwargs(task.chat_template_kwargs)

    def _check_shown(self, task: Task) -> None:
        agent = self._plugins.agents.create(task.agent_name, self._config.agent_config)
        schemas = self._offered.schemas(task)
        if schemas and agent.template_shows_tools:
            offered = ", ".join(schema["function"]["name"] for schema in schemas)
            with concerning(f"{task.agent_name} offers {offered}"):
                self._chat_of(task).check_tools(schemas, _prompt(agent, task, schemas))

    def _check_tool(self, name: str, task: Task) -> None:
        if name not in self._tools:
            self._tools[name] = self._plugins.tools.create(name, self._config.tool_config)
        kwargs = task.tools_kwargs.get(name, {}).get("create_kwargs") or {}
        column = f"extra_info.tools_kwargs.{name}.create_kwargs"
        self._check_start("tool", self._tools[name], kwargs, column=column)

    def _check_names(self, task: Task) -> None:
        for name, kwargs in task.tools_kwargs.items():
            own = self._plugins.tools.own_name(name)
            if kwargs and own != name:
                raise PluginError(
                    f"extra_info.tools_kwargs: {name!r} has the name {own!r} and gets its arguments under "
                    f"that name: write {own}"
                )

    def _check_partner(self, interaction_kwargs: JsonObject) -> None:
        kwargs = dict(interaction_kwargs)
        name = kwargs.pop("name", None)
        if not isinstance(name, str):
            known = ", ".join(self._plugins.interactions.names())
            raise DataError(f"extra_info.interaction_kwargs names no interaction; registered: {known}")
        if name not in self._partners:
            self._partners[name] = self._plugins.interactions.create(name, self._config.interaction_config)
        column = "extra_info.interaction_kwargs"
        self._check_start("interaction", self._partners[name], kwargs, column=column)

    def _check_environment(self, agent: type[AgentLoop], task: Task, environment_kwargs: JsonObject) -> None:
        environment = self._plugins.environment_of(task)
        assert environment is not None, "the task has environment_kwargs"
        tools = environment_tools(environment)
        offers_none = task.extra_info.get("tool_selection") == []
        if tools and not agent.uses_tools and not offers_none:
            raise PluginError(
                f"{task.task_id}: agent {agent.name!r} uses no tools, but the environment "
                f"{environment.name!r} has {', '.join(tools)}; name an agent that does, such as "
                "agent.default=tool_agent, or, for an agent that acts without them, write "
                "extra_info.tool_selection: []"
            )
        kwargs = dict(environment_kwargs)
        name = kwargs.pop("name")
        if name not in self._environments:
            self._environments[name] = self._plugins.environments.create(
                name, self._config.environment_config
            )
        column = "extra_info.environment_kwargs"
        self._check_start("environment", self._environments[name], kwargs, column=column)

    def _check_start(
        self, kind: str, plugin: Tool | Interaction | Environment, kwargs: Mapping[str, Any], *, column: str
    ) -> None:
        """Check each set of argument names once: `start` accepts a row's arguments by their names alone."""
        names = (kind, plugin.name, *kwargs)
        if names not in self._accepted:
            check_start(kind, plugin, kwargs, column=column)
            self._accepted.add(names)


def _prompt(agent: AgentLoop, task: Task, schemas: Sequence[JsonObject]) -> Sequence[Message]:
    try:
        messages = list(agent.prompt(task, schemas))
    except AgentRLError:
        raise
    except Exception as error:  # user code: any exception concerns this row
        raise PluginError(
            f"agent {agent.name!r} ({place(type(agent).prompt)}) raised in `prompt`: {type(error).__name__}: "
            f"{error}"
        ) from error
    if not messages or not all(isinstance(message, Message) for message in messages):
        raise PluginError(
            f"agent {agent.name!r} ({place(type(agent).prompt)}): `prompt` returned {str(messages)[:80]}; "
            "return a list of agentrl.types.Message, at least one"
        )
    return messages


def agent_choice(config: AgentConfig, plugins: Plugins) -> AgentChoice:
    """Return the `AgentChoice` for the rows of a config."""
    has_partners = config.verl_interaction_config is not None or bool(config.interaction_config)
    return AgentChoice(plugins.agents.resolve, config.default, has_partners, config.environment)


class OfferedTools:
    """The tool schemas that a task's agent is shown. Each tool is asked for its schema once."""

    def __init__(self, config: AgentConfig, plugins: Plugins) -> None:
        self._configured = config.tools
        self._tool_config: Mapping[str, Mapping[str, Any]] = config.tool_config
        self._plugins = plugins
        self._schemas: dict[str, dict[str, Any]] = {}

    def schemas(self, task: Task) -> list[dict[str, Any]]:
        """Return the schemas of the tools that the task offers, in order.

        Raises:
            PluginError: the agent or a tool is not registered.
        """
        return [self._schema(name) for name in self._plugins.offered_tools(task, self._configured)]

    def _schema(self, name: str) -> dict[str, Any]:
        if name not in self._schemas:
            self._schemas[name] = self._plugins.tools.create(name, self._tool_config).schema()
        return self._schemas[name]
