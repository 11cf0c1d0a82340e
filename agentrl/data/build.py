"""The dataset of a run, from its config: what a row needs is checked before anything is played."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from agentrl.config.agent import AgentConfig
from agentrl.config.schema import Config
from agentrl.data.dataset import Dataset
from agentrl.data.rows import AgentChoice
from agentrl.data.sources import check_source_weights
from agentrl.errors import DataError
from agentrl.plugins import Plugins
from agentrl.types import Message, Task


class OpenedConversation(Protocol):
    def num_pending_tokens(self) -> int: ...


class PromptRenderer(Protocol):
    """What is needed of `agentrl.chat.chat.Chat`."""

    def open(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> OpenedConversation: ...


def build_dataset(
    config: Config,
    files: Sequence[str],
    *,
    plugins: Plugins,
    chat: PromptRenderer,
    shuffle: bool,
    max_rows: int | None = None,
    check_reward: Callable[[Task], None] | None = None,
    change: Callable[[Task], Task] | None = None,
) -> Dataset:
    """Open `files`, measuring every prompt with the tools it offers and checking that every row can be played.

    `change`: what becomes of each task before that, see Dataset.

    Raises:
        DataError: a malformed row, or one that `check_reward` refuses.
        PluginError: a row needs an agent, tool or interaction that is not registered.
    """
    offered = OfferedTools(config.agent, plugins)

    def measure(task: Task) -> int:
        agent = plugins.agents.create(task.agent_name, config.agent.agent_config)
        schemas = offered.schemas(task)
        return chat.open(agent.prompt(task, schemas), schemas if agent.template_shows_tools else []).num_pending_tokens()

    def check(task: Task) -> None:
        offered.schemas(task)
        if task.interaction_kwargs is None and task.agent_name == "interaction_agent":
            raise DataError(f"{task.task_id}: agent interaction_agent needs extra_info.interaction_kwargs with a name")
        if task.interaction_kwargs is not None:
            plugins.interactions.resolve(task.interaction_kwargs["name"])
        if check_reward is not None:
            check_reward(task)

    return Dataset(
        files,
        config.data,
        agents=agent_choice(config.agent, plugins),
        seed=config.trainer.seed,
        shuffle=shuffle,
        measure=measure,
        check=check,
        max_rows=max_rows,
        change=change,
    )


def check_training_sources(config: Config, *, plugins: Plugins) -> None:
    """Read the training rows for their sources alone, where `data.curriculum` weighs those: seconds, before anything is started.

    Raises:
        DataError: a source has no weight, or a weight no source; a malformed row.
    """
    if config.data.curriculum.source_weights:
        agents = agent_choice(config.agent, plugins)
        limit = config.data.max_train_rows
        rows = Dataset(config.data.train_files, config.data, agents=agents, seed=0, shuffle=False, max_rows=limit)
        check_source_weights(config.data.curriculum.source_weights, rows.sources())


def agent_choice(config: AgentConfig, plugins: Plugins) -> AgentChoice:
    """Return the choice of agents for the rows of a config."""
    has_partners = config.verl_interaction_config is not None or bool(config.interaction_config)
    return AgentChoice(plugins.agents.resolve, config.default, has_partners)


class OfferedTools:
    """The tool schemas that a task's agent is shown; each tool is asked for its schema once."""

    def __init__(self, config: AgentConfig, plugins: Plugins) -> None:
        self._configured = config.tools
        self._tool_config: Mapping[str, Mapping[str, Any]] = config.tool_config
        self._plugins = plugins
        self._schemas: dict[str, dict[str, Any]] = {}

    def schemas(self, task: Task) -> list[dict[str, Any]]:
        """Return the schemas in the order of `tools_for`.

        Raises:
            PluginError: the agent or a tool is not registered.
        """
        return [self._schema(name) for name in self._plugins.offered_tools(task, self._configured)]

    def _schema(self, name: str) -> dict[str, Any]:
        if name not in self._schemas:
            self._schemas[name] = self._plugins.tools.create(name, self._tool_config).schema()
        return self._schemas[name]
