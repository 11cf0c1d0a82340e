"""Plays one dataset row as in a run, but in this process and without Ray."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentrl.adapters.catalog import named_plugins
from agentrl.chat.chat import Chat
from agentrl.chat.tiny import write_tiny_tokenizer
from agentrl.config.agent import AgentConfig
from agentrl.config.data import DataConfig
from agentrl.config.distillation import DistillationConfig
from agentrl.config.model import ModelConfig
from agentrl.config.schema import Config
from agentrl.data.checked_dataset import Playable
from agentrl.data.dataset import Dataset
from agentrl.data.image_files import FOLDER as IMAGES
from agentrl.data.input_files import check_prepared
from agentrl.data.model_source import resolve_model
from agentrl.data.rows import AgentChoice
from agentrl.errors import ConfigError, concerning
from agentrl.extras.testing.one_row.models import Read, Say, open_model
from agentrl.plugins import Plugins
from agentrl.rewards.select import RewardTable
from agentrl.rollout.asyncio_host import AsyncioHost
from agentrl.rollout.conversation_line import PromptLimits
from agentrl.rollout.frozen_models import resolve_opponents
from agentrl.rollout.limits import model_limits
from agentrl.rollout.loop_watch import watching_command
from agentrl.rollout.manager import AgentLoopManager
from agentrl.rollout.player_stack import PlayerParts
from agentrl.rollout.sampling import Sampling
from agentrl.rollout.shown_images import ShownImages
from agentrl.servers.frozen import start_frozen
from agentrl.servers.router import Router
from agentrl.servers.trio_run import in_trio
from agentrl.types import Failure, Lease, Task, Trajectory


@dataclass(frozen=True, slots=True)
class PlayedRow:
    """The task of a played row, its trajectory, and the chat that decodes its tokens.

    survived: failures that did not end the attempt.
    """

    task: Task
    trajectory: Trajectory
    chat: Chat
    survived: tuple[Failure, ...] = ()


def play_row(
    config: Config,
    *,
    row: int,
    model: str,
    is_validation: bool = False,
    starts_server: bool = False,
    read: Read,
    say: Say,
) -> PlayedRow:
    """Play row `row` (counted from 0 over all files in order) once, with the sampling of training or of
    validation.

    `model`: `person`, the URL of a server, or a YAML file of turns (see `open_model`).

    Raises:
        UserError: the config, the row, or something that they refer to is wrong.
        ServerError: no server answers, or one does not start: the policy's, or an opponent's.
    """
    key: Literal["train_files", "val_files"] = "val_files" if is_validation else "train_files"
    check_prepared(config, splits=[key])
    needs_model = starts_server or model.startswith(("http://", "https://"))
    plugins = named_plugins(config.agent, config.reward, config.eval)
    sampling: Sampling = config.eval if is_validation else config.rollout
    if is_validation:
        config = config.of_validation
    with tempfile.TemporaryDirectory(prefix="agentrl-play-") as scratch:
        weights = (
            resolve_model(config.model, with_weights=starts_server)
            if needs_model
            else model_or_tokenizer(config.model, Path(scratch, "tokenizer"), say)
        )
        chat = Chat.of(weights)
        playable = Playable(config.agent, plugins, chat, RewardTable(config.reward, plugins).check)
        images = Path(scratch, IMAGES)
        task = read_task(config.data, key, row, playable.agents, images=images)
        _say_agent(config.agent.default, task, plugins, say)
        with concerning(task.task_id):
            playable.check(task)
        config = _with_opponents(config, weights, playable.opponents(task))
        vocab_size, context_tokens = model_limits(weights, chat)
        with (
            start_frozen(config.frozen_plans, Path(scratch), say=say) as frozen,
            open_model(
                model, config.rollout, weights, chat, starts_server=starts_server, read=read, say=say
            ) as client,
        ):
            router = Router(lambda url: client, vocab_size=vocab_size, context_tokens=context_tokens)

            def open_manager(host: AsyncioHost) -> AgentLoopManager:
                shown = ShownImages(config.data.images, images)
                parts = PlayerParts(plugins, chat, host, PromptLimits.of(config.data), images=shown)
                manager = AgentLoopManager(config.agent, config.rollout, config.reward, router, parts)
                manager.set_frozen_servers(frozen.keys())
                return manager

            deadline_s = config.agent.trajectory_timeout_s
            trajectory, survived = in_trio(_play, open_manager, router, task, sampling, say, deadline_s)
    return PlayedRow(task, trajectory, chat, survived)


def model_or_tokenizer(model: ModelConfig, folder: Path, say: Say) -> ModelConfig:
    """Return the config with the model's local folder. If there is no such model, write the tokenizer and the
    template of `from_scratch` into `folder`, return that in its place, and say so.
    """
    try:
        return resolve_model(model, with_weights=False)
    except ConfigError as error:
        say(
            f"{error}; the row is played with the tokenizer and the template of from_scratch, whose tokens "
            "are single bytes: other models need fewer"
        )
    write_tiny_tokenizer(folder)
    return ModelConfig(path=str(folder))


def _say_agent(default: str, task: Task, plugins: Plugins, say: Say) -> None:
    """Say that `agent.default` plays no part, if the config chose it and the row is played by another."""
    if default != AgentConfig().default and plugins.agents.resolve(default) != task.agent_name:
        say(f"the row names {task.agent_name}; agent.default={default} is not used")


def _with_opponents(config: Config, policy: ModelConfig, names: Sequence[str]) -> Config:
    """Return the config with the opponents that a row needs, all checked, and without teacher."""
    needed = {name: config.agent.opponents[name] for name in names}
    agent = resolve_opponents(config.agent.model_copy(update={"opponents": needed}), policy)
    algorithm = config.algorithm.model_copy(update={"distillation": DistillationConfig()})
    return config.model_copy(update={"agent": agent, "algorithm": algorithm})


def read_task(
    config: DataConfig,
    key: Literal["train_files", "val_files"],
    row: int,
    agents: AgentChoice,
    *,
    images: Path | None = None,
) -> Task:
    """Return one dataset row as a task. Overlong prompts are not filtered, so that rows keep their numbers.

    images: folder in which its images are stored; None: they are only checked.

    Raises:
        ConfigError: there are no files, or the row does not exist.
        DataError: a row is malformed.
    """
    files = getattr(config, key)
    if not files:
        raise ConfigError(f"data.{key} is empty: there is no row to play")
    dataset = Dataset(files, config, agents=agents, seed=0, shuffle=False, max_rows=row + 1, images=images)
    if row >= len(dataset):
        raise ConfigError(f"row {row} does not exist: data.{key} have {len(dataset)} rows, counted from 0")
    return dataset.task(row)


async def _play(
    open_manager: Callable[[AsyncioHost], AgentLoopManager],
    router: Router,
    task: Task,
    sampling: Sampling,
    say: Say,
    deadline_s: float,
) -> tuple[Trajectory, tuple[Failure, ...]]:
    router.set_servers(["http://model"], version=0)
    with AsyncioHost() as host, watching_command(host, say=say, deadline_s=deadline_s):
        manager = open_manager(host)
        async with aclosing(router), aclosing(manager):
            [trajectory] = await manager.play([Lease(0, task, 1, 0)], sampling)
            survived = tuple(failed.failure for failed in manager.attempts.since(0).failed)
            return trajectory, survived
