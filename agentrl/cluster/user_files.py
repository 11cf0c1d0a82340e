"""Ships the user's files (plugins, templates) to all workers, by Ray's runtime environment."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentrl.chat.packaged import PACKAGED, find_template
from agentrl.config.agent import AgentConfig
from agentrl.config.model import ModelConfig
from agentrl.config.schema import Config
from agentrl.errors import ConfigError, concerning
from agentrl.plugins import Reference
from agentrl.plugins.sources import absence, pack_files
from agentrl.rollout.openai_door import check_certificate


def user_files(config: Config) -> list[str]:
    """Return the paths of all user files that a run's config names, without duplicates, as written there.

    Files that are named only in rows of the data are not included: list them in `agent.plugins` as well.
    """
    rewards = [
        *config.reward.sources.values(),
        *(term.reward for term in config.reward.terms.values() if term.reward),
    ]
    rewards += config.eval.rewards.values()
    targets = [str(settings.get("target", "")) for settings in config.agent.agent_config.values()]
    named = [
        *config.agent.tools,
        *(config.eval.tools or ()),
        config.agent.default,
        config.agent.environment or "",
        *targets,
        config.data.reader or "",
        *rewards,
    ]
    files = [source for source in config.agent.plugins if source.endswith(".py")]
    files += [*_plugin_files(named), *rank_files(config.models, policy_loss=config.algorithm.policy_loss)]
    files += [config.reward.custom_function.path] if config.reward.custom_function.path else []
    files += [path for _, path in _verl_files(config.agent)]
    return list(dict.fromkeys(files))


def rank_files(models: Mapping[str, ModelConfig], *, policy_loss: str = "") -> list[str]:
    """Return the user files that learner ranks read: code and templates of models, and the loss.

    This is enough for commands without rollouts.

    Args:
        models: by config key.
    """
    return list(dict.fromkeys([*_plugin_files([policy_loss]), *(path for _, path in _model_files(models))]))


def check_files(models: Mapping[str, ModelConfig], agent: AgentConfig) -> None:
    """Check, before any process starts, that the files and packaged templates in the config exist, and that
    the gateway's certificate can be used.

    Args:
        models: by config key.

    Raises:
        ConfigError: one does not exist, or cannot be used.
    """
    for key, model in models.items():
        if model.chat_template is not None:
            with concerning(f"{key}.chat_template"):
                find_template(model.chat_template)
    for key, path in (*_model_files(models), *_verl_files(agent)):
        if not Path(path).is_file():
            raise ConfigError(f"{key}: file {path!r} {absence(Path(path))}")
    with concerning("agent.gateway"):
        check_certificate(agent.gateway)


def _model_files(models: Mapping[str, ModelConfig]) -> Iterator[tuple[str, str]]:
    """Yield config key and path of each file with a model's code or chat template."""
    for key, model in models.items():
        if model.external_lib is not None and model.external_lib.endswith(".py"):
            yield f"{key}.external_lib", model.external_lib
        if model.chat_template is not None and model.chat_template not in PACKAGED:
            yield f"{key}.chat_template", model.chat_template


def _plugin_files(named: Iterable[str]) -> list[str]:
    references = [
        reference for text in named if (reference := Reference.parse(text)) is not None and reference.is_file
    ]
    return [reference.source for reference in references]


def _verl_files(agent: AgentConfig) -> Iterator[tuple[str, str]]:
    """Yield config key and path of each file in verl's formats."""
    for key in ("verl_tool_config", "verl_function_tools", "verl_interaction_config"):
        if (path := getattr(agent, key)) is not None:
            yield f"agent.{key}", path


@contextmanager
def shipped(paths: Sequence[str]) -> Iterator[dict[str, Any] | None]:
    """Yield the runtime environment that ships `paths`; None without paths.

    Ray reads it when it starts, so the block may end after `ray.init`.

    Raises:
        PluginError: a file does not exist.
    """
    with tempfile.TemporaryDirectory(prefix="agentrl-files-") as folder:
        package = pack_files(paths, Path(folder))
        yield None if package is None else {"py_modules": [str(package)]}
