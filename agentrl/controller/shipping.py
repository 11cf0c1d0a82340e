"""The user's files on their way to the workers: Ray's runtime environment carries a copy of each to every machine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentrl.config.agent import AgentConfig
from agentrl.config.schema import Config
from agentrl.config.supervised import RMConfig, SFTConfig
from agentrl.plugins import Reference
from agentrl.plugins.sources import pack_files


def user_files(config: Config) -> list[str]:
    """Return the paths of all files of the user's own that a run's config names, each once, as they are written there.

    A file that only rows of the data name is not among them: list it in `agent.plugins` as well.
    """
    rewards = [*config.reward.sources.values(), *(term.reward for term in config.reward.terms.values() if term.reward)]
    rewards += config.eval.rewards.values()
    targets = [str(settings.get("target", "")) for settings in config.agent.agent_config.values()]
    named = [*config.agent.tools, *(config.eval.tools or ()), config.agent.default, *targets, config.data.reader or "", *rewards]
    files = [source for source in config.agent.plugins if source.endswith(".py")]
    files += [*_plugin_files(named), *rank_files(config)]
    files += [path for path in (config.reward.custom_function.path, *_verl_files(config.agent)) if path]
    return list(dict.fromkeys(files))


def rank_files(config: Config | SFTConfig | RMConfig) -> list[str]:
    """Return those of them that ranks of the learner read, for a command that runs nothing else: code and templates of models, the loss."""
    models, files = [config.model], []
    if isinstance(config, Config):
        models.append(config.reward_model.model)
        files += _plugin_files([config.algorithm.policy_loss])
    for model in models:
        if model.external_lib is not None and model.external_lib.endswith(".py"):
            files.append(model.external_lib)
        if model.chat_template is not None:
            files.append(model.chat_template)
    return list(dict.fromkeys(files))


def _plugin_files(named: Iterable[str]) -> list[str]:
    references = [reference for text in named if (reference := Reference.parse(text)) is not None and reference.is_file]
    return [reference.source for reference in references]


def _verl_files(agent: AgentConfig) -> tuple[str | None, ...]:
    return agent.verl_tool_config, agent.verl_function_tools, agent.verl_interaction_config


@contextmanager
def shipped(paths: Sequence[str]) -> Iterator[dict[str, Any] | None]:
    """Yield the runtime environment that carries `paths`, None without any. Ray reads it when it starts; then it may go.

    Raises:
        PluginError: a file does not exist.
    """
    with tempfile.TemporaryDirectory(prefix="agentrl-files-") as folder:
        package = pack_files(paths, Path(folder))
        yield None if package is None else {"py_modules": [str(package)]}
