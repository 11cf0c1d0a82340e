"""The user's files on their way to the workers: Ray's runtime environment carries a copy of each to every machine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentrl.config.agent import AgentConfig
from agentrl.config.schema import Config
from agentrl.plugins import Reference
from agentrl.plugins.sources import pack_files


def user_files(config: Config) -> list[str]:
    """Return the paths of all plugin files that the config names, each once, as they are written there.

    A file that only rows of the data name is not among them: list it in `agent.plugins` as well.
    """
    rewards = [*config.reward.sources.values(), *(term.reward for term in config.reward.terms.values() if term.reward)]
    targets = [str(settings.get("target", "")) for settings in config.agent.agent_config.values()]
    named = [*config.agent.tools, config.agent.default, *targets, config.data.reader or "", *rewards, config.algorithm.policy_loss]
    references = [reference for text in named if (reference := Reference.parse(text)) is not None and reference.is_file]
    files = [source for source in config.agent.plugins if source.endswith(".py")]
    files += [reference.source for reference in references]
    libraries = (config.model.external_lib, config.reward_model.model.external_lib)
    files += [library for library in libraries if library is not None and library.endswith(".py")]
    files += [path for path in (config.reward.custom_function.path, *_verl_files(config.agent)) if path]
    return list(dict.fromkeys(files))


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
