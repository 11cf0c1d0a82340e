"""Plays one dataset row as in a run, but in this process and without Ray."""

from __future__ import annotations

from dataclasses import dataclass

import trio

from agentrl.adapters.catalog import named_plugins
from agentrl.chat.chat import Chat
from agentrl.config.schema import Config
from agentrl.data.build import Playable, agent_choice
from agentrl.data.dataset import Dataset
from agentrl.data.model_source import resolve_model
from agentrl.data.prepared import check_prepared
from agentrl.errors import ConfigError, concerning
from agentrl.plugins import Plugins
from agentrl.rewards.select import RewardTable
from agentrl.rollout.asyncio_host import AsyncioHost
from agentrl.rollout.limits import model_limits
from agentrl.rollout.manager import AgentLoopManager
from agentrl.rollout.router import Router
from agentrl.rollout.server import Client
from agentrl.rollout.session import PromptLimits
from agentrl.testing.one_row.models import Read, Say, open_model
from agentrl.types import Lease, Task, Trajectory


@dataclass(frozen=True, slots=True)
class PlayedRow:
    """The task of a played row, its trajectory, and the chat that decodes its tokens."""

    task: Task
    trajectory: Trajectory
    chat: Chat


def play_row(
    config: Config, *, row: int, model: str, is_validation: bool = False, starts_server: bool = False, read: Read, say: Say
) -> PlayedRow:
    """Play row `row` (counted from 0 over all files in order) once, with the sampling of training or of
    validation.

    `model`: `person`, the URL of a server, or a YAML file of turns (see `open_model`).

    Raises:
        UserError: the config, the row, or something that they refer to is wrong.
        ServerError: no server answers.
    """
    check_prepared(config, splits=["val_files" if is_validation else "train_files"])
    config = config.model_copy(update={"model": resolve_model(config.model, with_weights=starts_server)})
    folder = config.model.tokenizer_path or config.model.path
    chat = Chat.load(folder, template_file=config.model.chat_template, tool_format=config.model.tool_format)
    plugins = named_plugins(config)
    if is_validation:
        config = config.of_validation
    task = read_task(config, plugins, row, is_validation=is_validation)
    with concerning(task.task_id):
        Playable(config.agent, plugins, chat, RewardTable(config.reward, plugins).check).check(task)
    with open_model(config, chat, model, starts_server=starts_server, read=read, say=say) as client:
        trajectory = _play(config, chat, plugins, task, client, is_validation=is_validation)
    return PlayedRow(task, trajectory, chat)


def read_task(config: Config, plugins: Plugins, row: int, *, is_validation: bool) -> Task:
    """Return one dataset row as a task. Overlong prompts are not filtered, so that rows keep their numbers.

    Raises:
        ConfigError: there are no files, or the row does not exist.
        DataError: a row is malformed.
    """
    key, files = ("val_files", config.data.val_files) if is_validation else ("train_files", config.data.train_files)
    if not files:
        raise ConfigError(f"data.{key} is empty: there is no row to play")
    agents = agent_choice(config.agent, plugins)
    dataset = Dataset(files, config.data, agents=agents, seed=config.trainer.seed, shuffle=False, max_rows=row + 1)
    if row >= len(dataset):
        raise ConfigError(f"row {row} does not exist: data.{key} have {len(dataset)} rows, counted from 0")
    return dataset.task(row)


def _play(config: Config, chat: Chat, plugins: Plugins, task: Task, client: Client, *, is_validation: bool) -> Trajectory:
    vocab_size, context_tokens = model_limits(config.model, chat)
    router = Router(lambda url: client, vocab_size=vocab_size, context_tokens=context_tokens)
    prompt = PromptLimits(config.data.max_prompt_tokens, config.data.overlong_prompts)

    async def main() -> Trajectory:
        router.set_servers(["http://model"], version=0)
        with AsyncioHost() as host:
            manager = AgentLoopManager(
                config.agent, config.rollout, config.reward, plugins=plugins, chat=chat, router=router, host=host, prompt=prompt
            )
            try:
                sampling = config.eval if is_validation else config.rollout
                [trajectory] = await manager.play([Lease(0, task, 1, 0)], sampling)
                return trajectory
            finally:
                await manager.aclose()
                await router.aclose()

    return trio.run(main)
