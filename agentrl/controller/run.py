"""`Run`: the state of a training run, and the verbs of its loop (publish, take, validate, save, record)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import ray
from ray import ObjectRef

from agentrl.buffer.buffer import ReplayBuffer
from agentrl.buffer.lineage import Lineage
from agentrl.cluster.actors import Actor
from agentrl.cluster.colocated import Colocation
from agentrl.cluster.elastic import ElasticServers
from agentrl.cluster.frozen_servers import FrozenFleet
from agentrl.cluster.rollouts import RolloutFleet
from agentrl.cluster.servers import ServerFleet
from agentrl.config.schema import Config
from agentrl.config.trainer import TrainerConfig
from agentrl.controller.batch_scorer import RemoteBatchRewards
from agentrl.controller.batches import POLL_S, Batches
from agentrl.controller.checkpoint import Checkpoint, complete_checkpoints
from agentrl.controller.listeners import FinishedStep, Listeners
from agentrl.controller.observe import Observer
from agentrl.controller.publish import Publishing
from agentrl.controller.recover import Ranks
from agentrl.controller.roles import Roles
from agentrl.controller.run_dir import RunDir, run_root
from agentrl.controller.saving import CheckpointWriter, metric_of
from agentrl.controller.validation import Validation
from agentrl.data.attempt_facts import AttemptFacts
from agentrl.data.folder_index import index_folder
from agentrl.data.token_columns import column_folder
from agentrl.errors import CheckpointError
from agentrl.learner.learner import Learner
from agentrl.tracking.closing_table import STEP, TRAINED
from agentrl.types import BufferCounts, Group

CHECKPOINT = "checkpoint"


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a training run.

    model_path: folder of the exported policy. counts: groups by state.
    validation: name of a policy (a baseline, `initial`, `final`) -> its validation metrics.
    """

    run_dir: Path
    model_path: Path
    step: int
    version: int
    counts: BufferCounts
    validation: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def complete_result(trainer: TrainerConfig) -> RunResult | None:
    """Return the result of a run that has ended and has no step left, and say so; None if it has to be
    opened.
    """
    root = run_root(trainer)
    if trainer.resume_mode != "auto" or trainer.val_only or trainer.steps is None:
        return None
    try:
        found = json.loads((root / "result.json").read_text(encoding="utf-8"))
        ended = RunResult(
            root,
            root / "policy",
            int(found["step"]),
            int(found["version"]),
            BufferCounts(**found["counts"]),
            found["validation"],
        )
    except (OSError, ValueError, KeyError, TypeError):  # the run is opened, and ends with a result again
        return None
    newest = max((one.step for one in complete_checkpoints(root / "checkpoints")), default=-1)
    if not trainer.steps <= newest == ended.step or not (ended.model_path / "config.json").is_file():
        return None
    say_complete(ended.step, trainer.steps, f"its policy is in {ended.model_path}", print)
    return ended


def say_complete(step: int, total_steps: int, left: str, say: Callable[[str], None]) -> None:
    """Say that a run has nothing to train, before anything starts. left: what there is, or is left to do."""
    say(
        f"this run is complete ({step} of {total_steps} steps): {left}; to continue, raise trainer.steps; "
        "for a new run, choose another trainer.run_dir or trainer.resume_mode=disable"
    )


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes of a run, all of them ready."""

    buffer: Actor[ReplayBuffer]
    ranks: Ranks
    servers: ServerFleet
    frozen: FrozenFleet
    rollouts: RolloutFleet


class Run:
    """A training run: its processes and its progress (`step` batches learned, `version` published)."""

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        processes: Processes,
        observer: Observer,
        checkpoints: CheckpointWriter,
        *,
        listeners: Listeners,
        validation: Validation | None,
        batch_rewards: RemoteBatchRewards,
        total_steps: int,
        newest_version: int,
    ) -> None:
        """Continue at the step of the checkpoint that `checkpoints` begins with, whose state is loaded
        already.

        newest_version: the newest one that was ever used in this run folder; -1: none.
        """
        self.config = config
        self.dir = run_dir
        self.buffer, self.ranks = processes.buffer, processes.ranks
        self.servers, self.frozen, self.rollouts = processes.servers, processes.frozen, processes.rollouts
        self.observer = observer
        self.listeners = listeners
        self.timer = observer.timer
        self.checkpoints = checkpoints
        self.validation = validation
        self.total_steps = total_steps
        self.is_resumed = checkpoints.newest is not None
        self.step = checkpoints.newest.step if checkpoints.newest else 0
        self.lineage = Lineage()  # the versions that the current weights descend from, up to `version`
        self.results: dict[str, Mapping[str, float]] = (
            dict(run_dir.read_validations()) if self.is_resumed else {}
        )
        self.has_learned = False
        """Whether the weights to publish were learned since the last resume or recovery."""
        self.owes_checkpoint = False
        """True if the last checkpoint could not be written. The next step retries."""
        self._validated: tuple[int, Mapping[str, float]] | None = None
        lone_adapter_of = config.model if config.rollout.weights.adapter == "alone" else None
        self._elastic = ElasticServers(
            self.servers,
            self.rollouts,
            self.frozen,
            lone_adapter_of=lone_adapter_of,
            replays_experts=config.rollout.replay_experts,
            run_dir=run_dir.root,
            say=observer.say,
        )
        self._colocation = (
            Colocation(self.servers, self.rollouts, say=observer.say) if config.rollout.colocated else None
        )
        self._publishing = Publishing(
            self.roles.learner,
            config.rollout,
            model_path=config.model.path,
            newest_version=newest_version,
            disk_patience_s=config.buffer.disk_patience_s,
            run_dir=run_dir,
            servers=self.servers,
            rollouts=self.rollouts,
            observer=observer,
        )
        self._batches = Batches(config.buffer, self.buffer, self.rollouts, batch_rewards, observer)

    @property
    def version(self) -> int:
        """The version of the weights that the servers have; -1 before the first publish."""
        return self._publishing.version

    @property
    def roles(self) -> Roles:
        """The current roles; a recovery replaces them."""
        return self.ranks.roles

    @property
    def proximal_folder(self) -> str | None:
        """Where the ranks store proximal log-probabilities; None without `tracking.token_ratios`."""
        return str(self.dir.proximal.resolve()) if self.config.tracking.token_ratios else None

    def column_folder(self) -> AbstractContextManager[str]:
        """Within the block, the ranks may keep numbers per token in this folder."""
        return column_folder(self.dir.columns)

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Trace the learner's part of the next step if it is one of `trainer.profile_steps`.

        Every rank writes a trace of torch's profiler; Ray's timeline of the whole run so far is written
        beside it.
        """
        step = self.step + 1
        if step not in self.config.trainer.profile_steps:
            yield
            return
        folder = self.dir.root / "traces" / f"step_{step:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        self.roles.learner.run(Learner.start_trace)
        yield
        self.roles.learner.run(Learner.write_trace, str(folder))
        ray.timeline(str(folder / "ray.json"))

    def memory_for_learner(self) -> AbstractContextManager[None]:
        """Free the memory of colocated servers within the block.

        `publish` must follow: only it lets the servers sample again.
        """
        if self._colocation is None:
            return nullcontext()
        return self._colocation.lend(version=self.version, give_back=self.roles.give_back_memory)

    def begin(self) -> None:
        """Let listeners act before the first publish of a training."""
        self.listeners.tell(lambda one: one.on_begin(self))

    # ------------------------------------------------------------------------------------------------ publish

    def publish(self) -> None:
        """Give the learner's weights a new version and bring every server to it."""
        # `take` heals only while it waits. A run whose batches are always ready must heal here.
        self.rollouts.heal(self.observer.say)
        self._elastic.attend(version=self.version)
        self._publishing.publish("policy", step=self.step)
        self.listeners.tell(lambda one: one.on_publish(self))
        self.has_learned = True
        self.lineage = self.buffer.run(ReplayBuffer.advance, self.version, self.step)

    # --------------------------------------------------------------------------------------------------- take

    def start_rollouts(self) -> None:
        """Start the rollout actors: they lease and play training tasks until the run ends."""
        self.rollouts.run()
        self.observer.begin_steps(self.rollouts.stats())

    def take(self) -> list[Group[AttemptFacts]]:
        """Wait for the next batch and score it with the rewards of scope `batch` (see `Batches.take`)."""
        self._settle_checkpoint(self.checkpoints.check)
        return self._batches.take(step=self.step + 1, version=self.version, heal=self.heal)

    def heal(self) -> None:
        """Replace dead rollout actors; bring restarted servers to the current version before they take
        traffic.
        """
        self.rollouts.heal(self.observer.say)
        self._elastic.attend(version=self.version)
        self.observer.set_servers(self.servers.states)
        self._look_at_attempts()
        self._publishing.catch_up()

    def _look_at_attempts(self) -> None:
        """Record attempts that failed since the last call. A listener may end the run."""
        counts, failed = self.rollouts.attempts(self.observer.say)
        self.observer.attempts(counts, failed, step=self.step)
        self.listeners.tell(lambda one: one.on_attempts(self, counts))

    def counts(self) -> BufferCounts:
        """Return the buffer's counts; they balance at any moment."""
        return self.buffer.run(ReplayBuffer.counts)

    def wait(self, refs: Sequence[ObjectRef], *, timeout_s: float) -> list[ObjectRef]:
        """Wait up to `timeout_s` for results of rollout actors; return those that are ready.

        Servers and actors are healed meanwhile.
        """
        deadline = time.monotonic() + timeout_s
        done: list[ObjectRef] = []
        pending = list(refs)
        while pending and time.monotonic() < deadline:
            done, pending = ray.wait(list(refs), num_returns=len(refs), timeout=POLL_S)
            if pending:
                self.heal()
        return done

    # ----------------------------------------------------------------------------------------------- validate

    def validate(self) -> None:
        """Play the validation rows with the current weights, on the same servers."""
        if self.validation is None:
            return
        name = "initial" if self.step == 0 else TRAINED
        with self.timer("validate"):
            self.results[name] = {
                **self.validation.run(self, step=self.step, version=self.version),
                STEP: self.step,
            }
        self._validated = (self.step, self.results[name])
        # raises at the first validation if the name is wrong
        metric_of(self.results[name], self.config.trainer)
        self.observer.unwritten.attempt("validations.json", partial(self.dir.write_validations, self.results))

    def validate_other(self, name: str, folder: str) -> None:
        """Play the validation rows with the weights in `folder` in place of the policy's, before training."""
        if self.validation is None:
            return
        with self._publishing.baseline(folder):
            self._publishing.publish(f"baseline {name}", step=self.step)
            self.results[name] = self.validation.run(self, step=0, version=self.version, baseline=name)

    # --------------------------------------------------------------------------------------------------- keep

    def save(self) -> None:
        """Start writing a checkpoint of this step: learner, ledger, ready groups and position in the dataset.

        If the write fails, it is reported and `owes_checkpoint` is set: the next step retries.

        Raises:
            CheckpointError: the run's last checkpoint could not be written.
        """
        self._settle_checkpoint(self.checkpoints.finish)
        self.owes_checkpoint = False
        validation = self._validated[1] if self._validated and self._validated[0] == self.step else None
        with self.timer("save"):
            state = self.buffer.run(ReplayBuffer.state)
            save = partial(
                self.checkpoints.save,
                self.roles,
                step=self.step,
                version=self.version,
                buffer_state=state,
                metric=metric_of(validation, self.config.trainer),
            )
            if self.step == self.total_steps:
                self._tell_of(save())
            else:
                self._settle_checkpoint(save)

    def _settle_checkpoint(self, settle: Callable[[], Checkpoint | None]) -> None:
        """Call `settle`, which returns a completed checkpoint or None. Report a checkpoint that failed.

        Until a checkpoint is complete, the buffer keeps what later steps consumed: a recovery takes it back.
        """
        try:
            checkpoint = settle()
            if checkpoint is not None:
                self.observer.unwritten.clear(CHECKPOINT)
                self.buffer.run(ReplayBuffer.settle, checkpoint.step)
                self._tell_of(checkpoint)
        except CheckpointError as error:
            self.owes_checkpoint = True
            self.observer.unwritten.count(CHECKPOINT, error)

    def _tell_of(self, checkpoint: Checkpoint | None) -> None:
        if checkpoint is not None:
            self.listeners.tell(lambda one: one.on_checkpoint(checkpoint.step))

    # ------------------------------------------------------------------------------------------------ recover

    def recovering(self) -> AbstractContextManager[None]:
        """Catch the loss of a learner rank within the block and restore the newest checkpoint."""
        return self.ranks.recovering(
            self.checkpoints, go_back=self.go_back, timer=self.timer, say=self.observer.say
        )

    def go_back(self, step: int) -> None:
        """Reset the run to `step`, whose weights the learner has already loaded.

        The buffer takes back the groups that later steps consumed. The weights get a new version.
        """
        self.step, self._validated, self.owes_checkpoint = step, None, False
        self.has_learned = False
        self.results = {name: values for name, values in self.results.items() if values.get(STEP, 0) <= step}
        self.observer.go_back(step)
        self.listeners.tell(lambda one: one.on_rollback(step))
        self.buffer.run(ReplayBuffer.roll_back, step)
        self._publishing.set_learner(self.roles.learner)
        self.publish()

    def record(
        self,
        groups: Sequence[Group[AttemptFacts]],
        updates: Sequence[Mapping[str, float]],
        *,
        learned_by: Lineage,
    ) -> None:
        """Record the batch and metrics of the step. `learned_by`: lineage of the weights before the step."""
        self._look_at_attempts()
        is_weighed = self.config.data.curriculum.is_used
        step = FinishedStep(
            self.step,
            learned_by=learned_by.version,
            lags=learned_by.lags,
            version=self.version,
            groups=groups,
            updates=[*updates, self.roles.usage()],
            rollout_stats=self.rollouts.stats(),
            buffer_stats=self.buffer.run(ReplayBuffer.stats),
            curriculum=self.buffer.run(ReplayBuffer.curriculum) if is_weighed else {},
        )
        self.observer.step(step)
        self._release_recorded()

    def _release_recorded(self) -> None:
        """Let the buffer remove the files of batches that have been recorded."""
        oldest = self.observer.recording.oldest_step
        self.buffer.run(ReplayBuffer.release_batches, self.step + 1 if oldest is None else oldest)

    def finish(self) -> RunResult:
        """Complete the last checkpoint, export the policy and print the closing table."""
        self._tell_of(self.checkpoints.finish())
        policy = self.dir.root / "policy"
        self.roles.learner.run(Learner.export, str(policy))
        if self.config.model.lora.roles:
            self.roles.learner.run(Learner.export_adapter, str(self.dir.root / "adapters"))
        self.observer.unwritten.attempt("policy", partial(index_folder, policy))
        counts = self.counts()
        self.observer.finish(self.results, step=self.step, version=self.version, counts=counts)
        self.listeners.tell(lambda one: one.on_finish())
        self._release_recorded()
        return RunResult(self.dir.root, policy, self.step, self.version, counts, self.results)
