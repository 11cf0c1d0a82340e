"""`TrainingBuffer`: the replay buffer of a run, with its training data and its journal."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agentrl import heap
from agentrl.adapters.catalog import open_plugins
from agentrl.buffer.buffer import ReplayBuffer
from agentrl.buffer.curriculum import Curriculum
from agentrl.buffer.journal import FILE, Journal
from agentrl.buffer.ledger import LedgerRules
from agentrl.buffer.lineage import Lineage
from agentrl.chat.chat import Chat
from agentrl.config.buffer import BufferConfig
from agentrl.config.data import DataConfig
from agentrl.config.schema import Config
from agentrl.config.trainer import TrainerConfig
from agentrl.data.checked_dataset import Playable, build_dataset
from agentrl.data.dataset import Dataset, DatasetReport
from agentrl.errors import DataError
from agentrl.plugins import Plugins
from agentrl.rewards.select import RewardTable
from agentrl.sandbox import sandbox_reports
from agentrl.types import Task


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """Size of the training data: tasks per epoch, batches of the whole run, and a report on the dataset rows.

    template_note: a line for the user if the chat template edits its history.
    sandboxes: one line per kind of sandbox in which programs written by the model will run.
    """

    num_tasks: int
    total_steps: int
    report: DatasetReport
    template_note: str | None = None
    sandboxes: tuple[str, ...] = ()


class TaskCheck:
    """Checks each task's reward and records which features of the chat template the tasks need.

    has_user_turns: some conversation can have further user turns.
    shows_tools: some agent lets the chat template show its tools.
    has_system: some task has a system message.
    """

    def __init__(self, check_reward: Callable[[Task], None], plugins: Plugins) -> None:
        self._check_reward = check_reward
        self._plugins = plugins
        self.has_user_turns = False
        self.shows_tools = False
        self.has_system = False

    def __call__(self, task: Task) -> None:
        agent = self._plugins.agents.get(task.agent_name)
        # An agent that describes its tools in the prompt returns tool results as user turns.
        self.has_user_turns |= task.interaction_kwargs is not None or not agent.template_shows_tools
        self.shows_tools |= agent.uses_tools and agent.template_shows_tools
        self.has_system |= any(message.role == "system" for message in task.messages)
        self._check_reward(task)


def planned_steps(trainer: TrainerConfig, *, num_tasks: int, groups_per_step: int) -> int:
    """Return the number of batches of a run: `trainer.steps`, or the whole batches in `trainer.total_epochs`.

    Raises:
        DataError: the data do not fill one batch.
    """
    if trainer.steps is not None:
        return trainer.steps
    steps = trainer.total_epochs * num_tasks // groups_per_step
    if steps == 0:
        raise DataError(
            f"{num_tasks} tasks times trainer.total_epochs={trainer.total_epochs} fill no batch of "
            f"buffer.groups_per_step={groups_per_step}; lower it, or set trainer.steps"
        )
    return steps


class TrainingBuffer(ReplayBuffer):
    """The replay buffer of a run."""

    def __init__(self, config: Config, folder: Path | None = None, *, is_new: bool = False) -> None:
        """Read and check the training data, and open the journal.

        Args:
            folder: of the run, for the journal; None: the journal is kept in memory.
            is_new: the folder's journal belongs to an abandoned run and is renamed.

        Raises:
            UserError: the data, or something that a dataset row refers to, is wrong.
            CheckpointError: the journal is damaged.
            JournalError: the journal cannot be written.
        """
        plugins = open_plugins(config.agent)
        chat = Chat.of(config.model)
        check = TaskCheck(RewardTable(config.reward, plugins).check, plugins)
        dataset = build_dataset(
            config.data,
            config.data.train_files,
            Playable(config.agent, plugins, chat, check),
            seed=config.trainer.seed,
            shuffle=config.data.shuffle and not config.data.curriculum.is_used,  # a curriculum orders the rows
            max_rows=config.data.max_train_rows,
        )
        schemas = [plugins.tools.create(name, config.agent.tool_config).schema() for name in (*config.agent.tools, *plugins.served_tools)]
        template = chat.check_template(
            schemas if check.shows_tools else [], has_user_turns=check.has_user_turns, has_system=check.has_system
        )
        steps = planned_steps(config.trainer, num_tasks=len(dataset), groups_per_step=config.buffer.groups_per_step)
        self._plan = BufferPlan(
            num_tasks=len(dataset),
            total_steps=steps,
            report=dataset.report,
            template_note=template.summary,
            sandboxes=sandbox_reports(),
        )
        super().__init__(
            dataset,
            LedgerRules(
                groups_per_step=config.buffer.groups_per_step,
                max_staleness=config.buffer.max_staleness,
                group_size=config.rollout.group_size,
                total_groups=steps * config.buffer.groups_per_step,
                waits_for_stragglers=config.buffer.stragglers == "wait",
                sampler=config.buffer.sampler,
                oversample=config.buffer.oversample,
            ),
            has_greedy=config.has_greedy,
            drop_constant_groups=config.buffer.drop_constant_groups,
            lease_timeout_s=config.buffer.lease_timeout_s,
            duplicate_after_s=config.buffer.duplicate_after_s or math.inf,
            curriculum=_open_curriculum(config.data, dataset, seed=config.trainer.seed),
            journal=None if folder is None else open_journal(folder, config.buffer, subject=subject_of(config), is_new=is_new),
        )

    def plan(self) -> BufferPlan:
        """Return the size of the training data and of the run."""
        return self._plan

    def advance(self, version: int, step: int | None = None) -> Lineage:
        lineage = super().advance(version, step)
        heap.release_free_memory()  # the batch just published was freed
        return lineage


def _open_curriculum(data: DataConfig, dataset: Dataset, *, seed: int) -> Curriculum | None:
    return Curriculum(dataset.sources(), data.curriculum, seed=seed, shuffle=data.shuffle) if data.curriculum.is_used else None


def open_journal(folder: Path, buffer: BufferConfig, *, subject: str, is_new: bool) -> Journal:
    """Open the journal in a run's folder.

    An existing journal is renamed, and a new one created, if it belongs to other data (`subject`, see
    `subject_of`) or if a new run starts (`is_new`).

    Raises:
        CheckpointError: the journal is damaged.
        JournalError: the journal cannot be written.
    """
    path = folder / FILE
    is_synced = buffer.journal_sync == "machine"
    if is_new:  # not read: damage does not matter in an abandoned run
        _put_aside(path)
    journal = Journal(path, is_synced=is_synced)
    if journal.fact("subject") not in (None, subject):
        journal.close()
        _put_aside(path)
        journal = Journal(path, is_synced=is_synced)
    if journal.fact("subject") is None:
        journal.set_fact("subject", subject)
        journal.set_fact("max_staleness", str(buffer.max_staleness))
    return journal


def _put_aside(path: Path) -> None:
    """Rename the journal at `path`, if it exists, and all files that belong to it."""
    number = len(list(path.parent.glob(f"{path.stem}_before_*{path.suffix}")))
    for file in sorted(path.parent.glob(f"{path.name}*")):  # SQLite finds the log (-wal) by its name
        file.rename(path.with_name(f"{path.stem}_before_{number:03d}{file.name.removeprefix(path.stem)}"))


def subject_of(config: Config) -> str:
    """Return a hash of the settings that determine which task a group id means."""
    data = {name: value for name, value in config.data.model_dump(mode="json").items() if "val" not in name}
    what = [data, config.model.path, config.trainer.seed, config.rollout.group_size, config.has_greedy]
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()
