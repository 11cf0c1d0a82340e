"""`TrainingBuffer`: the replay buffer of a run, with its training data and its journal."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
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
from agentrl.config.agent import AgentConfig
from agentrl.config.buffer import BufferConfig
from agentrl.config.data import DataConfig
from agentrl.config.model import ModelConfig
from agentrl.config.reward import RewardConfig
from agentrl.config.schema import Config
from agentrl.config.trainer import TrainerConfig
from agentrl.data.attempt_facts import AttemptFacts, ConversationCredit
from agentrl.data.attempt_files import FOLDER
from agentrl.data.checked_dataset import OfferedTools, Playable, build_dataset
from agentrl.data.dataset import Dataset, DatasetReport
from agentrl.data.image_files import FOLDER as IMAGES
from agentrl.errors import DataError
from agentrl.plugins import Plugins
from agentrl.registered import all_of
from agentrl.rewards.select import RewardTable
from agentrl.types import JsonObject, Task


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """Size of the training data: tasks per epoch, batches of the whole run, and a report on the dataset rows.

    template_note: a line for the user if the chat template edits its history.
    journal_note: a line for the user if the run folder's journal belonged to other data and was renamed.
    sandboxes: one line per kind of sandbox in which programs written by the model will run.
    """

    num_tasks: int
    total_steps: int
    report: DatasetReport
    template_note: str | None = None
    journal_note: str | None = None
    sandboxes: tuple[str, ...] = ()


class TaskCheck:
    """Checks each task's reward and records which features of the chat template the tasks need.

    has_user_turns: some conversation can have further user turns.
    tools: schemas that the chat template shows for some task, by name.
    has_system: some task has a system message.
    """

    def __init__(self, check_reward: Callable[[Task], None], offered: OfferedTools, plugins: Plugins) -> None:
        self._check_reward = check_reward
        self._offered = offered
        self._plugins = plugins
        self.has_user_turns = False
        self.tools: dict[str, JsonObject] = {}
        self.has_system = False

    def __call__(self, task: Task) -> None:
        agent = self._plugins.agents.get(task.agent_name)
        # An agent that describes its tools in the prompt returns tool results as user turns.
        self.has_user_turns |= task.interaction_kwargs is not None or not agent.template_shows_tools
        if agent.template_shows_tools:
            self.tools |= {schema["function"]["name"]: schema for schema in self._offered.schemas(task)}
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
            f"{num_tasks} tasks times trainer.total_epochs={trainer.total_epochs} do not fill one "
            f"batch of buffer.groups_per_step={groups_per_step}; lower groups_per_step, or set "
            "trainer.steps"
        )
    return steps


RELEASE_S = 10.0
"""Seconds between two returns of free memory; one takes a millisecond or two."""


@dataclass(frozen=True, slots=True)
class BufferSettings:
    """What the replay buffer needs of a run's config: its sections, and what follows from several of them.

    group_size: sampled attempts of a group; with `has_greedy` there is one more.
    conversation_credit: `algorithm.conversation_credit`.
    """

    buffer: BufferConfig
    data: DataConfig
    model: ModelConfig
    agent: AgentConfig
    reward: RewardConfig
    trainer: TrainerConfig
    group_size: int
    has_greedy: bool
    conversation_credit: ConversationCredit

    @classmethod
    def of(cls, config: Config) -> BufferSettings:
        sections = (config.buffer, config.data, config.model, config.agent, config.reward, config.trainer)
        return cls(
            *sections,
            group_size=config.rollout.group_size,
            has_greedy=config.has_greedy,
            conversation_credit=config.algorithm.conversation_credit,
        )


class TrainingBuffer(ReplayBuffer):
    """The replay buffer of a run."""

    def __init__(self, settings: BufferSettings, folder: Path | None = None, *, is_new: bool = False) -> None:
        """Read and check the training data, and open the journal.

        Args:
            folder: of the run, for the journal; None: the journal is kept in memory.
            is_new: the folder's journal belongs to an abandoned run and is renamed.

        Raises:
            UserError: the data, or something that a dataset row refers to, is wrong.
            CheckpointError: the journal is damaged.
            JournalError: the journal cannot be written.
        """
        plugins = open_plugins(settings.agent)
        chat = Chat.of(settings.model)
        offered = OfferedTools(settings.agent, plugins)
        check = TaskCheck(RewardTable(settings.reward, plugins).check, offered, plugins)
        dataset = build_dataset(
            settings.data,
            settings.data.train_files,
            Playable(settings.agent, plugins, chat, check),
            seed=settings.trainer.seed,
            shuffle=settings.data.shuffle
            and not settings.data.curriculum.is_used,  # a curriculum orders the rows
            max_rows=settings.data.max_train_rows,
            images=None if folder is None else folder.resolve() / IMAGES,
        )
        template = chat.check_template(
            list(check.tools.values()),
            has_user_turns=check.has_user_turns,
            has_system=check.has_system,
        )
        steps = planned_steps(
            settings.trainer, num_tasks=len(dataset), groups_per_step=settings.buffer.groups_per_step
        )
        journal, journal_note = (
            (None, None) if folder is None else open_journal(folder, settings, is_new=is_new)
        )
        self._plan = BufferPlan(
            num_tasks=len(dataset),
            total_steps=steps,
            report=dataset.report,
            template_note=template.summary,
            journal_note=journal_note,
            sandboxes=tuple(line for lines in all_of("agentrl.start_notes") for line in lines()),
        )
        self._freed = heap.SteadyRelease(RELEASE_S)
        super().__init__(
            dataset,
            LedgerRules.of(settings.buffer, group_size=settings.group_size, total_steps=steps),
            Path(FOLDER) if folder is None else folder / FOLDER,
            has_greedy=settings.has_greedy,
            drop_constant_groups=settings.buffer.drop_constant_groups,
            conversation_credit=settings.conversation_credit,
            lease_timeout_s=settings.buffer.lease_timeout_s,
            duplicate_after_s=settings.buffer.duplicate_after_s or math.inf,
            curriculum=_open_curriculum(settings.data, dataset, seed=settings.trainer.seed),
            journal=journal,
        )

    def plan(self) -> BufferPlan:
        """Return the size of the training data and of the run."""
        return self._plan

    def add(self, owner: str, attempts: Sequence[AttemptFacts]) -> None:
        super().add(owner, attempts)
        self._freed.consider()  # what requests and their facts left, also while no step ends

    def advance(self, version: int, step: int | None = None) -> Lineage:
        lineage = super().advance(version, step)
        heap.release_free_memory()  # the batch just published was freed
        return lineage


def _open_curriculum(data: DataConfig, dataset: Dataset, *, seed: int) -> Curriculum | None:
    return (
        Curriculum(dataset.sources(), data.curriculum, seed=seed, shuffle=data.shuffle)
        if data.curriculum.is_used
        else None
    )


def open_journal(folder: Path, settings: BufferSettings, *, is_new: bool) -> tuple[Journal, str | None]:
    """Open the journal in a run's folder; return a line for the user, too, if it is of other data.

    An existing journal is renamed, and a new one created, if it belongs to other data (see `_naming`) or if a
    new run starts (`is_new`).

    Raises:
        CheckpointError: the journal is damaged.
        JournalError: the journal cannot be written.
    """
    path, note = folder / FILE, None
    is_synced = settings.buffer.journal_sync == "machine"
    subject, naming = subject_of(settings), _naming(settings)
    if is_new:  # not read: damage does not matter in an abandoned run
        _put_aside(path)
    journal = Journal(path, is_synced=is_synced)
    if journal.facts.get("subject") not in (None, subject):
        journal.close()
        note = _why_aside(_put_aside(path), journal.facts.get("naming"), naming)
        journal = Journal(path, is_synced=is_synced)
    if journal.facts.get("subject") is None:
        journal.set_fact("subject", subject)
        journal.set_fact("max_staleness", str(settings.buffer.max_staleness))
    if journal.facts.get("naming") is None:
        journal.set_fact("naming", json.dumps(naming))
    return journal, note


def _put_aside(path: Path) -> str:
    """Rename the journal at `path`, if it exists, and all files that belong to it; return its new name."""
    number = len(list(path.parent.glob(f"{path.stem}_before_*{path.suffix}")))
    aside = f"{path.stem}_before_{number:03d}"
    for file in sorted(path.parent.glob(f"{path.name}*")):  # SQLite finds the log (-wal) by its name
        file.rename(path.with_name(f"{aside}{file.name.removeprefix(path.stem)}"))
    return f"{aside}{path.suffix}"


def _why_aside(aside: str, before: str | None, naming: JsonObject) -> str:
    """Return the line for the user. before: `_naming` of the renamed journal, None if it has none."""
    old = {} if before is None else json.loads(before)
    changed = [
        f"{key} was {old.get(key)!r} and is {value!r}"
        for key, value in naming.items()
        if old.get(key) != value
    ]
    cause = ", ".join(changed) if old else f"one of these changed: {', '.join(naming)}"
    return (
        f"the journal belongs to other data: {cause}; it was renamed to {aside}, and a new one begins; to "
        f"continue with it, set the old value again and rename {aside}* to {FILE}*"
    )


def _naming(settings: BufferSettings) -> JsonObject:
    """Return the settings that determine which task a group id means, by key of the config."""
    return {f"data.{name}": value for name, value in _data_of(settings).items()} | {
        "model.path": settings.model.path,
        "trainer.seed": settings.trainer.seed,
        "rollout.group_size": settings.group_size,
        "a greedy attempt per group": settings.has_greedy,
    }


def subject_of(settings: BufferSettings) -> str:
    """Return a hash of the settings that determine which task a group id means."""
    model, seed = settings.model.path, settings.trainer.seed
    what = [_data_of(settings), model, seed, settings.group_size, settings.has_greedy]
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()


def _data_of(settings: BufferSettings) -> JsonObject:
    """Return the data section without what concerns validation, and without images, which name no rows."""
    data = settings.data.model_dump(mode="json", exclude={"images"})
    return {name: value for name, value in data.items() if "val" not in name}
