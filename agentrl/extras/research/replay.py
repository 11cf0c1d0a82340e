"""Replay: train the learner on a run's stored trajectories, deterministically, without servers or rollouts.

The steps are split into the same minibatches and microbatches in the same order. With the run's own config,
on a CPU, the weights equal the run's bit for bit. With another config, all differences come from the config.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentrl.cluster.cluster import ray_session
from agentrl.cluster.seats import reserve_seats
from agentrl.cluster.user_files import rank_files
from agentrl.cluster.workers import Workers
from agentrl.config.compose import dump_config, load_config
from agentrl.config.placement import Role
from agentrl.config.schema import Config
from agentrl.controller.checkpoint import find_checkpoint, put_aside, save_checkpoint
from agentrl.controller.listeners import FinishedStep, Listeners, Opened
from agentrl.controller.observe import Observer
from agentrl.controller.roles import Roles, open_local_roles, start_roles
from agentrl.controller.run_dir import RunDir
from agentrl.controller.specs import RoleSpecs
from agentrl.controller.train import learn
from agentrl.controller.verification import verify_by_ranks
from agentrl.data.atomic_files import write_atomically
from agentrl.data.model_source import resolve_model
from agentrl.errors import ConfigError
from agentrl.extras.research.compare_corrections import CorrectionsReport
from agentrl.extras.research.stored_steps import StoredSteps
from agentrl.interrupts import interruptible
from agentrl.learner.learner import Learner
from agentrl.tracking.seals import check_text

_ROLES: tuple[Role, ...] = ("actor", "critic")
"""The roles that a replay starts."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The result of a replay.

    weights: sha256 over the names and checksums of all published weights.
    report: the table of corrections, None if not requested.
    """

    run_dir: Path
    model_path: Path
    step: int
    weights: str
    report: Path | None = None


def load_replay_config(
    folder: Path, overrides: Sequence[str] = (), *, file: Path | None = None, out: Path | None = None
) -> Config:
    """Read the config of a run and adapt it for a replay.

    Args:
        folder: of the run or of its trajectories; its own config.yaml is read, else that of the folder above.
        file: read this config instead.
        out: folder of the replay; None: `replay` in `folder`.

    Raises:
        ConfigError: there is no config, or a key or value is wrong.
        CheckpointError: the run's config was changed after the run wrote it.
    """
    found = [place / "config.yaml" for place in (folder, folder.parent) if (place / "config.yaml").is_file()]
    source = file or (found[0] if found else None)
    if file is None and source is not None:
        check_text(source)
    if source is None:
        raise ConfigError(
            f"neither {str(folder)!r} nor its parent contains a config.yaml; give one with --config"
        )
    own = {
        "trainer.run_dir": json.dumps(str(out or folder / "replay")),
        "trainer.resume_mode": "auto",  # of the replay; the run's own resume_mode does not apply
        "trainer.logger": "[console]",
        "trainer.keep_trajectories": "false",
    }
    return load_config(str(source), [*(f"{key}={value}" for key, value in own.items()), *overrides])


def replay(
    folder: Path, config: Config, *, last_step: int | None = None, report: bool = False
) -> ReplayResult:
    """Train on the stored steps in `folder` as the run did.

    Resumes a stopped replay in the same `trainer.run_dir`.

    Args:
        last_step: stop after this step, with a checkpoint; None: after the last stored step.
        report: also compare corrections on every step, before training on it.

    Raises:
        UserError: config or trajectories are wrong.
        InfrastructureError: a learner rank was lost, or a file cannot be written.
    """
    with _open_replay(folder, config, has_report=report) as run:
        last = min(
            last_step or run.stored.num_steps,
            run.stored.num_steps,
            config.trainer.steps or run.stored.num_steps,
        )
        run.observer.set_total_steps(last)
        run.observer.begin_steps()
        while run.step < last:
            run.learn_step()
            if run.step == last or (
                config.trainer.save_freq > 0 and run.step % config.trainer.save_freq == 0
            ):
                run.save()
        return run.finish()


@dataclass(slots=True)
class _Replay:
    """A replay in progress; `step` counts the batches learned so far."""

    config: Config
    stored: StoredSteps
    roles: Roles
    observer: Observer
    dir: RunDir
    step: int
    report: CorrectionsReport | None = None

    def learn_step(self) -> None:
        with self.observer.timer("take"):
            batch = self.stored.read(self.step + 1)
        if self.report is not None:
            with self.observer.timer("compare"):
                self.report.observe(self.roles, batch)
        lags = batch.lineage.lags
        updates = learn(
            self.roles, batch.groups, self.config, step=self.step, lags=lags, timer=self.observer.timer
        )
        self.step = batch.step
        self.observer.step(
            FinishedStep(self.step, batch.learned_by, lags, batch.learned_by + 1, batch.groups, updates)
        )

    def save(self) -> None:
        with self.observer.timer("save"):
            save_checkpoint(
                self.dir.checkpoints,
                step=self.step,
                version=self.step,
                save_learner=self.roles.save,
                buffer_state=b"",  # the step alone is a replay's position in the data
                keep_last=self.config.trainer.keep_last,
            )

    def finish(self) -> ReplayResult:
        policy = self.dir.root / "policy"
        self.roles.learner.run(Learner.export, str(policy))
        weights = _digest(self.roles.learner)
        write_atomically(
            self.dir.root / "result.json",
            json.dumps({"step": self.step, "weights_sha256": weights}, indent=1),
        )
        self.observer.say(f"replayed {self.step} steps; weights sha256 {weights}")
        table = self.report.finish(self.observer.say) if self.report is not None else None
        return ReplayResult(self.dir.root, policy, self.step, weights, table)


@contextmanager
def _open_replay(folder: Path, config: Config, *, has_report: bool) -> Iterator[_Replay]:
    """Yield a replay that is ready to learn: its ranks run, in this process if there is one, with the newest
    checkpoint.
    """
    elsewhere = None if (folder / "trajectories").is_dir() else config.trainer.rollout_data_dir
    stored = StoredSteps.find(Path(elsewhere) if elsewhere else folder)
    with ExitStack() as stack:
        run_dir = RunDir.open(config.trainer, dump_config(config))
        stack.callback(run_dir.close)
        checkpoint = find_checkpoint(run_dir.checkpoints, config.trainer)
        resumed_at = checkpoint.step if checkpoint else None
        listeners = Listeners.of(config, run_dir, only=("alarms", "report"))
        observer = Observer(config, run_dir, resumed_at=resumed_at, listeners=listeners)
        stack.callback(observer.close)
        stack.push(lambda kind, error, trace: listeners.tell_close(error))
        listeners.tell_open(Opened(observer, resumed_at, listeners.needed))
        stack.enter_context(interruptible())
        located = config.model_copy(update={"model": resolve_model(config.model)})
        specs = RoleSpecs.of(
            located,
            num_steps=config.trainer.steps or stored.num_steps,
            dump_folder=str(run_dir.root / "non_finite"),
        )
        if config.learner.world_size > 1:
            stack.enter_context(
                ray_session(
                    config.cluster, rank_files(config.models, policy_loss=config.algorithm.policy_loss)
                )
            )
            seats = stack.enter_context(reserve_seats(located.placement, located.num_ranks, roles=_ROLES))
            roles = start_roles(specs, seats)
        else:
            roles = open_local_roles(specs)
        stack.callback(roles.stop)
        if checkpoint is not None:
            verify_by_ranks(
                checkpoint,
                roles.learner,
                config.trainer.verify,
                say=observer.say,
                parent=run_dir.checkpoints,
            )
            roles.load(checkpoint.learner)
            observer.say(f"resumed from {checkpoint.folder.name}")
        run = _Replay(config, stored, roles, observer, run_dir, step=checkpoint.step if checkpoint else 0)
        if has_report:
            run.report = CorrectionsReport(
                config.algorithm_in_use, config.rollout, config.learner, run_dir.root, resumed_at=run.step
            )
            if checkpoint is not None and config.trainer.resume_mode == "auto" and run.report.is_empty:
                raise ConfigError(
                    f"{run_dir.root} contains a replay up to step {run.step} without comparisons; "
                    "choose another folder with --out, or start over with "
                    "trainer.resume_mode=disable"
                )
        if (aside := put_aside(run_dir.checkpoints, checkpoint)) is not None:
            observer.say(aside)
        yield run


def _digest(learner: Workers[Learner]) -> str:
    return hashlib.sha256(json.dumps(sorted(learner.run(Learner.checksums).items())).encode()).hexdigest()
