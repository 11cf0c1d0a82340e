"""The buffer's Ray shell: real processes, one of them killed, and counts that still balance."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import ray
import trio

from agentrl.buffer.training_buffer import (
    BufferPlan,
    BufferSettings,
    TaskCheck,
    TrainingBuffer,
    open_journal,
    planned_steps,
)
from agentrl.chat.tiny import write_tiny_tokenizer
from agentrl.cluster.actors import Actor
from agentrl.cluster.buffer import FileStore, launch_buffer
from agentrl.cluster.remote_buffer import RemoteBuffer
from agentrl.config.agent import AgentConfig
from agentrl.config.buffer import BufferConfig
from agentrl.config.curriculum import CurriculumConfig
from agentrl.config.data import DataConfig
from agentrl.config.model import ModelConfig
from agentrl.config.reward import RewardConfig
from agentrl.config.rollout import RolloutConfig
from agentrl.config.schema import Config
from agentrl.config.trainer import TrainerConfig
from agentrl.data.attempt_facts import AttemptFacts
from agentrl.data.attempt_files import FOLDER, AttemptFiles
from agentrl.data.dataset import DatasetReport
from agentrl.errors import ConfigError, DataError
from agentrl.types import BufferCounts, Lease, Message, Outcome, Task, Trajectory
from parts.local_ray import local_ray

# By its place: Ray imports this file where `parts` cannot be imported.
PLUGINS = Path(__file__).parents[1] / "parts" / "rewards.py"
SOURCE = "sums"

DEADLINE_S = 60.0
LONG_POLL_S = 50.0  # a test that waits so long has failed


def trajectory(lease: Lease, member: int) -> Trajectory:
    return Trajectory(
        group_id=lease.group_id,
        member=member,
        task_id=lease.task.task_id,
        data_source=lease.task.data_source,
        agent_name=lease.task.agent_name,
        token_ids=np.array([1, 2], np.int32),
        action_mask=np.array([False, True]),
        behavior_logprobs=np.zeros(2, np.float32),
        versions=np.array([-1, lease.version], np.int32),
        turn_ids=np.array([-1, 0], np.int16),
        messages=(*lease.task.messages, Message("assistant", "ok")),
        rewards=(),
        outcome=Outcome.COMPLETED,
    )


ATTEMPTS = Path(tempfile.mkdtemp(prefix="agentrl-run-")) / FOLDER


def stored(played: list[Trajectory], folder: Path = ATTEMPTS) -> list[AttemptFacts]:
    """Write trajectories to a file of the run, as a rollout actor does; return their facts."""
    refs = AttemptFiles(folder, is_synced=False).write(played)
    return [AttemptFacts.of(t, ref) for t, ref in zip(played, refs, strict=True)]


@ray.remote(num_cpus=0)
class Player:
    """Leases groups and plays some of their members."""

    def __init__(self, owner: str, buffer) -> None:
        self.owner, self.buffer = owner, buffer

    def pid(self) -> int:
        return os.getpid()

    def play(self, limit: int, members: int, timeout_s: float) -> list[int]:
        leases = ray.get(self.buffer.begin(TrainingBuffer.lease, self.owner, limit, timeout_s))
        for lease in leases:
            played = [trajectory(lease, member) for member in range(members)]
            self.buffer.run(TrainingBuffer.add, self.owner, stored(played))
        return [lease.group_id for lease in leases]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("buffer_actor")
    write_tiny_tokenizer(path / "tokenizer")
    return path


@pytest.fixture(scope="module")
def cluster():
    with local_ray(__name__):
        yield


def config(
    folder: Path, *, rows: int = 6, ground_truth: str | None = "2", interacts: bool = False, **model
) -> Config:
    path = folder / f"{rows}_{ground_truth}{'_interacts' if interacts else ''}.jsonl"
    row = {
        "data_source": SOURCE,
        "prompt": [{"role": "user", "content": "1+1?"}],
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"interaction_kwargs": {"name": "tutor"}} if interacts else {},
    }
    path.write_text((json.dumps(row) + "\n") * rows)
    return Config(
        data=DataConfig(train_files=(str(path),)),
        model=ModelConfig(path=str(folder), tokenizer_path=str(folder / "tokenizer"), **model),
        agent=AgentConfig(default="single_turn_agent", plugins=(str(PLUGINS),)),
        reward=RewardConfig(sources={SOURCE: "number"}),
        rollout=RolloutConfig(group_size=2),
        buffer=BufferConfig(groups_per_step=2, max_staleness=0),
        trainer=TrainerConfig(total_epochs=2),
    )


def launched(config: Config, run: Path | None = None) -> Actor[TrainingBuffer]:
    folder = None if run is None else str(run)
    return launch_buffer(BufferSettings.of(config), folder, is_new=False, say=print).within(DEADLINE_S)


def call(method, *args):
    return ray.get(method.remote(*args), timeout=DEADLINE_S)


def test_a_killed_owners_groups_are_played_by_another_while_long_polls_wait(cluster, folder):
    buffer = launched(config(folder))
    assert buffer.run(TrainingBuffer.plan) == BufferPlan(
        num_tasks=6, total_steps=6, report=DatasetReport(rows=6, filtered=0, truncated=0, repeated=5)
    )
    buffer.run(TrainingBuffer.advance, 0)
    first, second = Player.remote("first", buffer), Player.remote("second", buffer)
    assert call(first.play, 2, 1, 0.0) == [0, 1]

    # More long polls than the default pool has threads: they must not hold up what they wait for.
    polls = [buffer.begin(TrainingBuffer.lease, "first", 1, LONG_POLL_S) for _ in range(12)]
    taken = buffer.begin(TrainingBuffer.take, 2, LONG_POLL_S)
    playing = second.play.remote(2, 2, LONG_POLL_S)
    os.kill(call(first.pid), signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        call(first.pid)
    assert (
        buffer.run(TrainingBuffer.counts).leased == 2
    )  # nobody but the controller may say that an owner is dead
    assert buffer.run(TrainingBuffer.release, "first") == 2

    assert ray.get(playing, timeout=DEADLINE_S) == [0, 1]
    batch = ray.get(taken, timeout=DEADLINE_S)
    assert [(t.group_id, t.member) for t in batch] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    buffer.run(TrainingBuffer.advance, 1)
    buffer.run(TrainingBuffer.add, "first", batch[:1])  # still in flight when its sender died
    assert buffer.run(TrainingBuffer.counts) == BufferCounts(2, 0, 0, 0, 2, {}, {"owner_lost": 2, "late": 1})

    saved = buffer.run(TrainingBuffer.state)
    buffer.run(TrainingBuffer.close)
    assert ray.get(polls, timeout=DEADLINE_S) == [[]] * 12
    resumed = launched(config(folder))
    resumed.run(TrainingBuffer.resume, 1, saved)
    resumed.run(TrainingBuffer.advance, 2)
    assert [lease.group_id for lease in resumed.run(TrainingBuffer.lease, "third", 9, 0.0)] == [2, 3]
    resumed.run(TrainingBuffer.close)
    assert resumed.run(TrainingBuffer.take, 2, LONG_POLL_S) is None
    assert resumed.run(TrainingBuffer.stats)["leased"] == 2


def test_a_killed_buffer_reads_its_journal_and_does_not_begin_a_new_one(cluster, folder, tmp_path):
    buffer = launch_buffer(BufferSettings.of(config(folder)), str(tmp_path), is_new=True, say=print).within(
        DEADLINE_S
    )
    buffer.run(TrainingBuffer.advance, 0)
    assert [lease.group_id for lease in buffer.run(TrainingBuffer.lease, "a", 9, 0.0)] == [0, 1]
    workers = psutil.Process().children(recursive=True)
    (process,) = (p for p in workers if p.cmdline()[:1] == ["ray::BufferActor"] and holds(p, tmp_path))
    process.kill()
    assert buffer.run(TrainingBuffer.counts) == BufferCounts(2, 0, 2, 0, 0, {}, {})
    assert [file.name for file in tmp_path.glob("*.sqlite")] == ["ledger.sqlite"]
    buffer.run(TrainingBuffer.close)


def holds(process: psutil.Process, folder: Path) -> bool:
    return any(Path(file.path).parent == folder for file in process.open_files())


def test_a_rollout_actor_hears_which_of_its_groups_are_not_its_own_any_more(cluster, folder):
    """One that it has shipped whole is no news, and one that it leased again meanwhile is its own."""
    buffer = launched(config(folder))
    buffer.run(TrainingBuffer.advance, 0)

    async def main() -> list[list[int]]:
        mine, told = (
            RemoteBuffer("mine", buffer, FileStore(AttemptFiles(ATTEMPTS, is_synced=False), buffer.retry)),
            [],
        )
        leases = await mine.lease(2)
        assert [lease.group_id for lease in leases] == [0, 1]
        told.append([*await mine.withdrawn()])
        await mine.add([trajectory(leases[0], member) for member in range(2)])
        told.append([*await mine.withdrawn()])
        buffer.run(TrainingBuffer.drop_group, "mine", 1, "somebody says so")
        told.append([*await mine.withdrawn()])
        told.append([*await mine.withdrawn()])
        assert [lease.group_id for lease in await mine.lease(2)] == [2]
        told.append([*await mine.withdrawn()])
        return told

    assert trio.run(main) == [[], [], [1], [], []]
    buffer.run(TrainingBuffer.close)


def test_a_curriculum_draws_rows_by_the_seed_and_travels_with_the_state(cluster, folder, tmp_path):
    plain = config(folder)
    weighed = plain.model_copy(
        update={"data": plain.data.model_copy(update={"curriculum": CurriculumConfig(by_pass_rate=True)})}
    )
    order = np.random.default_rng([plain.trainer.seed, 0]).permutation(6).tolist()
    runs = [tmp_path / "first", tmp_path / "second"]
    for run in runs:
        run.mkdir()
    buffer, resumed = (launched(weighed, run) for run in runs)
    buffer.run(TrainingBuffer.advance, 0)
    leases = buffer.run(TrainingBuffer.lease, "a", 9, 0.0)
    assert [(lease.group_id, lease.task.task_id.partition(":")[2]) for lease in leases] == [
        (row, str(row)) for row in order[:2]
    ]
    for lease in leases:
        played = [trajectory(lease, member) for member in range(2)]
        buffer.run(TrainingBuffer.add, "a", stored(played, runs[0] / FOLDER))
    resumed.run(TrainingBuffer.resume, 0, buffer.run(TrainingBuffer.state))
    resumed.run(TrainingBuffer.advance, 0)
    lineages = []
    for actor in (buffer, resumed):
        assert actor.run(TrainingBuffer.take, 2, 0.0) is not None
        lineages.append(actor.run(TrainingBuffer.advance, 1))
        assert [lease.group_id for lease in actor.run(TrainingBuffer.lease, "b", 9, 0.0)] == order[2:4]
    assert buffer.run(TrainingBuffer.curriculum)["never_passed"] == 1.0
    assert [(lineage.version, lineage.lag(0)) for lineage in lineages] == [(1, 1), (1, 0)], (
        "the resumed one published what it restored"
    )


THINKING = {"chat_template": str(Path(__file__).parents[1] / "chat" / "templates" / "thinking.jinja")}


def test_a_template_that_edits_the_history_is_told_at_the_start_or_refused(cluster, folder):
    assert (
        launched(config(folder, **THINKING)).run(TrainingBuffer.plan).template_note is None
    )  # no user speaks again
    note = launched(config(folder, interacts=True, **THINKING)).run(TrainingBuffer.plan).template_note
    assert "forks when a user speaks again: drops thinking" in note
    with pytest.raises(
        ConfigError, match=r"drops .*thinking; set model\.chat_template .* model\.template_edits=fork"
    ):
        launched(config(folder, interacts=True, template_edits="refuse", **THINKING)).run(TrainingBuffer.plan)


def test_bad_data_is_the_users_error_with_its_type(cluster, folder):
    buffer = launched(config(folder, rows=1, ground_truth=None))
    with pytest.raises(DataError, match=r"1_None\.jsonl: row 0 \(line 1\): .*ground.truth"):
        buffer.run(TrainingBuffer.plan)


def test_a_check_of_tasks_remembers_what_any_conversation_will_hold():
    agents = {
        "plain": SimpleNamespace(uses_tools=False, template_shows_tools=True),
        "tools": SimpleNamespace(uses_tools=True, template_shows_tools=True),
        "own": SimpleNamespace(uses_tools=True, template_shows_tools=False),
    }
    checked = []
    schema = {"type": "function", "function": {"name": "f"}}
    offered = SimpleNamespace(schemas=lambda task: [schema] if agents[task.agent_name].uses_tools else [])
    check = TaskCheck(checked.append, offered, SimpleNamespace(agents=agents))

    def seen(agent, *roles, interaction=None):
        check(
            Task("t", "s", tuple(Message(role, "x") for role in roles), agent, interaction_kwargs=interaction)
        )
        return check.has_user_turns, list(check.tools), check.has_system

    assert seen("plain", "user") == (False, [], False)
    assert seen("plain", "system", "user") == (False, [], True)
    assert seen("tools", "user") == (False, ["f"], True)
    assert seen("plain", "user", interaction={"name": "a"}) == (True, ["f"], True)
    assert seen("plain", "user") == (True, ["f"], True), "what was seen once"
    assert len(checked) == 5
    check = TaskCheck(checked.append, offered, SimpleNamespace(agents=agents))
    assert seen("own", "user") == (True, [], False)


def test_tools_that_only_rows_name_are_checked_with_the_template(folder):
    options = config(folder)
    row = {
        "data_source": SOURCE,
        "prompt": [{"role": "user", "content": "1+1?"}],
        "reward_model": {"ground_truth": "2"},
        "agent_name": "tool_agent",
        "extra_info": {"tools_kwargs": {"calculator": {}}},
    }
    path, template = folder / "tools.jsonl", folder / "odd.jinja"
    path.write_text((json.dumps(row) + "\n") * 6)
    source = (folder / "tokenizer" / "chat_template.jinja").read_text()
    template.write_text(source.replace("call.function.arguments", "call.function.arguments | length"))
    data = DataConfig(train_files=(str(path),))
    settings = BufferSettings.of(options.model_copy(update={"data": data}))
    assert TrainingBuffer(settings).plan().num_tasks == 6
    odd = settings.model.model_copy(update={"chat_template": str(template)})
    with pytest.raises(ConfigError, match="its calls are not read back"):
        TrainingBuffer(dataclasses.replace(settings, model=odd))


@pytest.mark.parametrize(("promise", "level"), [("machine", 2), ("process", 1)])
def test_a_journal_is_synced_to_the_disk_as_the_config_says(folder, tmp_path, promise, level):
    """SQLite's levels: 2 waits for the disk at each transaction, 1 at its checkpoints."""
    options = config(folder)
    options = options.model_copy(
        update={"buffer": options.buffer.model_copy(update={"journal_sync": promise})}
    )
    for is_new in (True, False):
        journal = open_journal(tmp_path, BufferSettings.of(options), is_new=is_new)[0]
        assert journal._database.execute("PRAGMA synchronous").fetchone() == (level,)
        journal.close()
    other = options.model_copy(update={"trainer": TrainerConfig(seed=options.trainer.seed + 1)})
    # of other data: put aside, and begun again
    journal = open_journal(tmp_path, BufferSettings.of(other), is_new=False)[0]
    assert journal._database.execute("PRAGMA synchronous").fetchone() == (level,)
    journal.close()


@pytest.mark.parametrize(("steps", "epochs", "planned"), [(None, 1, 3), (None, 3, 9), (7, 1, 7)])
def test_planned_steps(steps, epochs, planned):
    assert (
        planned_steps(TrainerConfig(steps=steps, total_epochs=epochs), num_tasks=13, groups_per_step=4)
        == planned
    )


def test_too_few_tasks_for_one_batch():
    with pytest.raises(
        DataError,
        match=r"3 tasks times trainer\.total_epochs=1 do not fill one batch of buffer\.groups_per_step=4",
    ):
        planned_steps(TrainerConfig(), num_tasks=3, groups_per_step=4)
