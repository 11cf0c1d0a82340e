"""The start of each kind of process of a run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import ray

from agentrl.buffer.training_buffer import BufferPlan, TrainingBuffer
from agentrl.cluster.actors import Actor
from agentrl.cluster.cluster import ray_session
from agentrl.cluster.frozen_servers import FrozenFleet
from agentrl.cluster.pools import Seat
from agentrl.cluster.recorder import launch_recorder
from agentrl.cluster.rollouts import RolloutFleet
from agentrl.cluster.seats import recorded, reserve_seats
from agentrl.cluster.servers import ServerFleet
from agentrl.cluster.user_files import user_files
from agentrl.config.placement import Role
from agentrl.config.schema import Config
from agentrl.controller.checkpoint import Checkpoint
from agentrl.controller.observe import Observer
from agentrl.controller.recording import RemoteRecording
from agentrl.controller.recover import Ranks
from agentrl.controller.roles import launch_roles
from agentrl.controller.run_dir import RunDir
from agentrl.controller.saving import CheckpointWriter
from agentrl.controller.specs import RoleSpecs
from agentrl.data.attempt_files import FOLDER, AttemptFiles
from agentrl.rollout.limits import server_key
from agentrl.rollout.worker import RolloutSettings
from agentrl.servers.attached import check_attached

Seats = Mapping[Role, Sequence[Seat]]


@dataclass(frozen=True, slots=True)
class RunStart:
    """What every part of a run is started with. `stack` stops what was started, the last first."""

    config: Config
    run_dir: RunDir
    observer: Observer
    stack: ExitStack

    def with_config(self, config: Config) -> RunStart:
        return replace(self, config=config)


def start_ray(start: RunStart) -> Seats:
    """Start or join Ray, and return the reserved seats by role."""
    config, say = start.config, start.observer.say
    check_attached(
        config.rollout.urls,
        api_key=server_key(config.rollout.api_key_env),
        start_timeout_s=config.rollout.server_start_timeout_s,
        say=say,
    )
    say("starting Ray, servers, learner and rollout actors ...")
    is_profiled = bool(config.trainer.profile_steps)
    session = ray_session(config.cluster, user_files(config), keeps_call_events=is_profiled)
    say(start.stack.enter_context(session))
    seats = start.stack.enter_context(reserve_seats(config.placement, config.num_ranks))
    return recorded(seats, config.profiler.nsight, start.run_dir.root / "nsight")


def launch_servers(start: RunStart, seats: Seats) -> ServerFleet:
    """Launch the servers of the policy, and watch those that are attached."""
    config = start.config
    servers = ServerFleet.launch(
        config.rollout,
        config.model,
        seats.get("servers", ()),
        run_dir=start.run_dir.root,
        say=start.observer.say,
    )
    start.stack.callback(servers.close)
    return servers


def launch_frozen(start: RunStart, seats: Seats) -> FrozenFleet:
    """Launch the servers of frozen models, if there are any."""
    frozen = FrozenFleet.launch(
        start.config.frozen_plans,
        seats.get("frozen_servers", ()),
        run_dir=start.run_dir.root,
        say=start.observer.say,
    )
    start.stack.callback(frozen.close)
    return frozen


def launch_rollouts(start: RunStart, buffer: Actor[TrainingBuffer], servers: ServerFleet) -> RolloutFleet:
    """Launch the rollout actors, which write attempts for `buffer`."""
    config, run_dir = start.config, start.run_dir
    # Other nodes, too, read the files.
    is_synced = config.buffer.journal_sync == "machine" or len(ray.nodes()) > 1
    files = AttemptFiles.create(run_dir.root.resolve() / FOLDER, is_synced=is_synced)
    settings = RolloutSettings.of(config, images=run_dir.images)
    rollouts = RolloutFleet(settings, buffer, files, key_of=servers.key_of)
    start.stack.callback(rollouts.close)
    return rollouts


def planned_ranks(start: RunStart, seats: Seats, plan: BufferPlan) -> Ranks:
    """Return the learner's ranks, which `bring_up` starts."""
    config, folder = start.config, start.run_dir.root / "non_finite"
    specs = RoleSpecs.of(config, num_steps=plan.total_steps, dump_folder=str(folder))
    return Ranks(
        partial(launch_roles, specs, seats),
        max_restarts=config.learner.max_restarts,
        verify=config.trainer.verify,
    )


def open_checkpoints(
    start: RunStart, newest: Checkpoint | None, *, pinned: Callable[[], Collection[str]]
) -> CheckpointWriter:
    """Launch the recorder, for which a checkpoint waits, and return the writer of checkpoints."""
    observer = start.observer
    observer.recording = recording = RemoteRecording(launch_recorder(), observer.unwritten, observer.say)
    return CheckpointWriter(
        start.run_dir.checkpoints,
        start.config.trainer,
        newest=newest,
        wait_for_records=recording.wait,
        pinned=pinned,
    )


def readiness(config: Config, plan: BufferPlan) -> str:
    """Return in words what is ready."""
    report = plan.report
    rollout = config.rollout
    num_frozen = sum(one.rollout.num_started for one in config.frozen_plans)
    counts = {"attached": len(rollout.urls), rollout.backend: rollout.num_started, "frozen": num_frozen}
    servers = " and ".join(f"{count} {name}" for name, count in counts.items() if count)
    facts = (
        [f"{report.filtered} over-long prompts filtered, {report.truncated} cut"]
        if report.filtered or report.truncated
        else []
    )
    facts += [f"{report.repeated} equal to an earlier row"] if report.repeated else []
    skipped = f" ({', '.join(facts)})" if facts else ""
    return (
        f"{servers} server(s), {config.learner.world_size} learner rank(s), {config.rollout.num_actors} "
        f"rollout actor(s), {plan.num_tasks} tasks{skipped}, {plan.total_steps} steps"
    )
