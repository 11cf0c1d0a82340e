"""Start all processes of a run, and stop them at the end.

User errors are checked first; then all start in parallel.

driver
 ├─ BufferActor        no GPU        ledger, journal, place in the data
 ├─ RolloutActor x R   no GPU        agent loops on trio
 ├─ Recorder           no GPU        writes trajectories to Parquet
 ├─ WorkerHost x W     as placed     FSDP ranks, each around one worker
 └─ ServerActor x S    as placed     starts and watches one server process, of the policy or of a frozen
                                     model; attached URLs are watched by threads of the driver
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import ray

from agentrl.adapters.catalog import named_plugins
from agentrl.algorithms.linear_kernels import check_linear_kernels
from agentrl.algorithms.logprob_kernels import check_kernels
from agentrl.algorithms.registry import find_estimator
from agentrl.buffer.training_buffer import (
    BufferPlan,
    BufferSettings,
    TaskCheck,
    TrainingBuffer,
    planned_steps,
)
from agentrl.chat.chat import Chat
from agentrl.cluster.actors import Actor
from agentrl.cluster.buffer import DATA_TIMEOUT_S, launch_buffer
from agentrl.cluster.cluster import ray_session
from agentrl.cluster.elastic import why_no_adapter, why_no_experts
from agentrl.cluster.frozen_servers import FrozenFleet
from agentrl.cluster.pools import Seat
from agentrl.cluster.readiness import StartUp
from agentrl.cluster.recorder import launch_recorder
from agentrl.cluster.rollouts import RolloutFleet
from agentrl.cluster.seats import check_nsight, recorded, reserve_seats
from agentrl.cluster.servers import ServerFleet
from agentrl.cluster.user_files import check_files, user_files
from agentrl.cluster.workers import Workers
from agentrl.config.compose import dump_config
from agentrl.config.explain_inputs import context_warning
from agentrl.config.placement import Role
from agentrl.config.schema import Config
from agentrl.controller.baselines import check_baselines
from agentrl.controller.batch_scorer import RemoteBatchRewards, launch_scorer
from agentrl.controller.checkpoint import Checkpoint, find_checkpoint, put_aside, tidy
from agentrl.controller.conversations import Conversations
from agentrl.controller.observe import Observer
from agentrl.controller.opponents import FOLDER as OPPONENTS
from agentrl.controller.opponents import needed_snapshots
from agentrl.controller.recording import RemoteRecording
from agentrl.controller.recover import Ranks
from agentrl.controller.reward_role import launch_reward_model, resolve_reward_model
from agentrl.controller.roles import launch_roles
from agentrl.controller.run import Processes, Run, say_complete
from agentrl.controller.run_dir import RunDir
from agentrl.controller.saving import CheckpointWriter
from agentrl.controller.specs import RoleSpecs, check_critic
from agentrl.controller.teacher import check_teacher
from agentrl.controller.uploads import ClaimedUpload, Uploading, claim_upload
from agentrl.controller.validation import Validation
from agentrl.controller.watchdog import watching
from agentrl.data.attempt_files import FOLDER, AttemptFiles
from agentrl.data.checked_dataset import OfferedTools, Playable, build_dataset, check_training_data
from agentrl.data.checkpoint_files import read_model_config
from agentrl.data.model_source import resolve_model
from agentrl.data.storage import with_local_files
from agentrl.errors import ConfigError, concerning
from agentrl.interrupts import ending_at_the_second_interrupt, interruptible
from agentrl.learner.architecture import check_dtype, check_head_on_sglang, check_policy, check_replay
from agentrl.learner.layout import check_folder
from agentrl.learner.policy_loss import bind_policy_loss
from agentrl.learner.reward_model import RewardModel
from agentrl.plugins import Plugins
from agentrl.registered import all_of
from agentrl.rewards.select import RewardTable
from agentrl.rollout.frozen_models import resolve_opponents, resolve_teacher
from agentrl.rollout.limits import server_key
from agentrl.rollout.openai_door import check_address
from agentrl.rollout.tracing import check_tracing
from agentrl.rollout.worker import RolloutSettings
from agentrl.servers.attached import check_attached
from agentrl.servers.launch import check_backend
from agentrl.tracking.versions import VERSIONS
from agentrl.weights.disk import remove_versions


@contextmanager
def open_run(config: Config) -> Iterator[Run]:
    """Yield a run whose processes are ready. All of them are stopped afterwards, also after an error.

    Raises:
        UserError: the config, data or a plugin is wrong; raised before any process starts where possible.
        InfrastructureError: a process did not start; the message names it.
    """
    given, config = config, _resolved(config)
    plugins = named_plugins(config.agent, config.reward, config.eval)
    chat = Chat.of(config.model)
    warnings = [warning for forecast in all_of("agentrl.forecasts") for warning in forecast(config)]
    check_tracing(config.tracking.spans)
    total_steps = _check_training(config, plugins, chat)
    with interruptible(), ExitStack() as stack, ending_at_the_second_interrupt():
        run_dir = RunDir.open(given.trainer, dump_config(given))
        stack.callback(run_dir.close)
        # The servers and ranks are gone by then: nobody reads or writes a version.
        stack.callback(remove_versions, run_dir.weights(config.rollout.weights))
        tidy(run_dir.checkpoints)
        upload = claim_upload(config.trainer, run_dir, say=_say_early)
        checkpoint = find_checkpoint(run_dir.checkpoints, config.trainer)
        scoring = _open_scoring(config, run_dir, plugins, chat)
        if checkpoint is None and config.data.val_files:  # a resumed run does not play the baselines
            check_baselines(config.tracking.baselines, policy=Path(config.model.path))
        observer = Observer(config, run_dir, resumed_at=checkpoint.step if checkpoint else None)
        stack.callback(observer.close)
        if checkpoint is not None:
            say_resumed(checkpoint, config, total_steps=total_steps, say=observer.say)
        for warning in (*warnings, context_warning(config)):
            if warning is not None:
                observer.say(f"warning: {warning}")
        started = time.monotonic()
        uploading = _start_uploading(config, upload, run_dir, observer, stack)
        seats = _start_ray(config, run_dir, observer, stack)
        servers = ServerFleet.launch(
            config.rollout, config.model, seats.get("servers", ()), run_dir=run_dir.root, say=observer.say
        )
        stack.callback(servers.close)
        start_up = stack.enter_context(StartUp(observer.say))
        start_up.add(servers)
        frozen = _launch_frozen(config, seats, run_dir, observer, stack)
        start_up.add(*([frozen] if config.frozen_plans else []))
        config = confirm_adapter(config, given, servers)
        confirm_experts(config, servers)
        buffer = _launch_buffer(config, run_dir, checkpoint, observer)
        rollouts = _launch_rollouts(config, run_dir, buffer, servers)
        stack.callback(rollouts.close)
        start_up.add(rollouts)
        reward_ranks = _launch_scorer(config, scoring, buffer, seats, stack)
        start_up.add(*reward_ranks)
        with start_up.step("replay buffer"):
            # before the learner: an error in the data ends the run here, and lr schedules need total_steps
            plan = _buffer_plan(buffer, observer)
        ranks = _planned_ranks(config, seats, plan, run_dir)
        checkpoints = _open_checkpoints(config, run_dir, checkpoint, observer, uploading)
        # Callbacks run in reverse: the ranks stop first, so an interrupted run does not wait for its last
        # save.
        stack.callback(checkpoints.close)
        stack.callback(lambda: ranks.roles.stop())  # a recovery replaces them
        ranks.bring_up(
            [rollouts, servers, frozen, *reward_ranks],
            checkpoint,
            start_up=start_up,
            say=observer.say,
            parent=run_dir.checkpoints,
        )
        newest_version = _resume(buffer, run_dir, checkpoint, observer)
        observer.unwritten.attempt("readiness.txt", partial(start_up.finish, run_dir.root / "readiness.txt"))
        observer.say(f"ready after {time.monotonic() - started:.1f} s: {_readiness(config, plan)}")
        run = Run(
            config,
            run_dir,
            Processes(buffer, ranks, servers, frozen, rollouts),
            observer,
            checkpoints,
            validation=scoring.validation,
            batch_rewards=scoring.batch_rewards,
            total_steps=plan.total_steps,
            newest_version=newest_version,
        )
        with watching(run):
            yield run


def _start_uploading(
    config: Config,
    upload: ClaimedUpload | None,
    run_dir: RunDir,
    observer: Observer,
    stack: ExitStack,
) -> Uploading | None:
    """Copy the run folder in the background until `stack` ends; None without `trainer.upload_to`."""
    if upload is None:
        return None
    uploading = stack.enter_context(
        upload.uploading(
            interval_s=config.trainer.upload_interval_s,
            say=observer.say,
            snapshots=partial(needed_snapshots, config.agent.opponents, run_dir.root / OPPONENTS),
        )
    )
    observer.further_metrics = uploading.metrics
    return uploading


def _start_ray(
    config: Config, run_dir: RunDir, observer: Observer, stack: ExitStack
) -> Mapping[Role, Sequence[Seat]]:
    """Start or join Ray until `stack` ends, and return the reserved seats by role."""
    check_attached(
        config.rollout.urls,
        api_key=server_key(config.rollout.api_key_env),
        start_timeout_s=config.rollout.server_start_timeout_s,
        say=observer.say,
    )
    observer.say("starting Ray, servers, learner and rollout actors ...")
    is_profiled = bool(config.trainer.profile_steps)
    session = ray_session(config.cluster, user_files(config), keeps_call_events=is_profiled)
    observer.say(stack.enter_context(session))
    seats = stack.enter_context(reserve_seats(config.placement, config.num_ranks))
    return recorded(seats, config.profiler.nsight, run_dir.root / "nsight")


def _launch_frozen(
    config: Config,
    seats: Mapping[Role, Sequence[Seat]],
    run_dir: RunDir,
    observer: Observer,
    stack: ExitStack,
) -> FrozenFleet:
    """Launch the servers of frozen models, if there are any; `stack` stops them."""
    frozen = FrozenFleet.launch(
        config.frozen_plans, seats.get("frozen_servers", ()), run_dir=run_dir.root, say=observer.say
    )
    stack.callback(frozen.close)
    return frozen


def _launch_rollouts(
    config: Config, run_dir: RunDir, buffer: Actor[TrainingBuffer], servers: ServerFleet
) -> RolloutFleet:
    # Other nodes, too, read the files.
    is_synced = config.buffer.journal_sync == "machine" or len(ray.nodes()) > 1
    files = AttemptFiles.create(run_dir.root.resolve() / FOLDER, is_synced=is_synced)
    settings = RolloutSettings.of(config, images=run_dir.images)
    return RolloutFleet(settings, buffer, files, key_of=servers.key_of)


def _planned_ranks(
    config: Config, seats: Mapping[Role, Sequence[Seat]], plan: BufferPlan, run_dir: RunDir
) -> Ranks:
    """Return the learner's ranks, which `bring_up` starts."""
    specs = RoleSpecs.of(config, num_steps=plan.total_steps, dump_folder=str(run_dir.root / "non_finite"))
    return Ranks(
        partial(launch_roles, specs, seats),
        max_restarts=config.learner.max_restarts,
        verify=config.trainer.verify,
    )


def _open_checkpoints(
    config: Config,
    run_dir: RunDir,
    newest: Checkpoint | None,
    observer: Observer,
    uploading: Uploading | None,
) -> CheckpointWriter:
    """Launch the recorder, for which a checkpoint waits, and return the writer of checkpoints."""
    observer.recording = recording = RemoteRecording(launch_recorder(), observer.unwritten, observer.say)
    return CheckpointWriter(
        run_dir.checkpoints,
        config.trainer,
        newest=newest,
        wait_for_records=recording.wait,
        pinned=tuple if uploading is None else uploading.pinned,
    )


def _say_early(text: str) -> None:
    """Show a message before there is a console."""
    sys.stderr.write(f"{text}\n")


def _resolved(config: Config) -> Config:
    """Return the config with its models and data files resolved, after all checks that need no process."""
    check_files(config.models, config.agent)
    if config.cluster.address is None:  # else each process checks its own node when it starts
        check_address(config.agent.gateway)
        for servers in (config.rollout, *(plan.rollout for plan in config.frozen_plans)):
            check_backend(servers)
    config = config.model_copy(
        update={
            "data": with_local_files(config.data),
            "model": resolve_model(config.model),
            "reward_model": resolve_reward_model(config.reward_model),
        }
    )
    config = _with_frozen_models(config)
    config = config.with_adapter_resolved
    check_nsight(config.profiler.nsight)
    with concerning("algorithm.advantage"):
        find_estimator(config.algorithm.advantage)
    with concerning("algorithm.policy_loss"):
        bind_policy_loss(config.algorithm)
    check_policy(config.model)
    check_dtype(config.model)
    check_folder(config.model, config.learner)
    if config.rollout.replay_experts:
        check_replay(config.model)
    if config.rollout.backend == "sglang":
        check_head_on_sglang(config.model)
    check_kernels(config.learner.logprob_kernels, device=config.placement.device_of("actor"))
    with concerning("learner.linear_kernels"):
        check_linear_kernels(config.learner.linear_kernels, device=config.placement.device_of("actor"))
    if config.has_critic:
        check_critic(config.critic_model, config.model, config.learner)
    if config.teacher_model is not None:
        check_teacher(config.teacher_model, config.model, config.learner)
    return config


def _with_frozen_models(config: Config) -> Config:
    """Return the config with the local folders of opponents and teacher, all of which have the policy's
    tokenizer.
    """
    algorithm, policy = config.algorithm, config.model
    if not config.trainer.val_only:
        distillation = resolve_teacher(algorithm.distillation, policy)
        algorithm = algorithm.model_copy(update={"distillation": distillation})
    agent = resolve_opponents(config.agent, policy)
    config = config.model_copy(update={"agent": agent, "algorithm": algorithm})
    for plan in config.frozen_plans:
        with concerning(plan.key):
            check_policy(plan.model)
    return config


def _check_training(config: Config, plugins: Plugins, chat: Chat) -> int:
    """Check training data and chat template early: the replay buffer would refuse them after the start-up.

    Returns the number of steps, if no row turns out to be too long.
    """
    offered = OfferedTools(config.agent, plugins)
    rewards = RewardTable(config.reward, plugins)
    rewards.check_services()
    check = TaskCheck(rewards.check, offered, plugins)
    num_rows = check_training_data(config.data, Playable(config.agent, plugins, chat, check))
    return planned_steps(config.trainer, num_tasks=num_rows, groups_per_step=config.buffer.groups_per_step)


def say_resumed(
    checkpoint: Checkpoint, config: Config, *, total_steps: int, say: Callable[[str], None]
) -> None:
    """Say what is resumed, and what of the config has no effect on it."""
    say(f"resumed from {checkpoint.folder.name}")
    before, here = Path(read_model_config(checkpoint.learner).path), Path(config.model.path)
    has_moved = before.name == here.name and not before.exists()  # the run continues on another machine
    if before.absolute() != here.absolute() and not has_moved:
        say(
            f"model.path={str(here)!r} has no effect on the weights: they continue from "
            f"{checkpoint.folder.name}, saved under model.path={str(before)!r}; to begin with others, choose "
            "another trainer.run_dir"
        )
    if checkpoint.step >= total_steps and not config.trainer.val_only:
        say_complete(checkpoint.step, total_steps, "only its policy and its report are written", say)


def confirm_adapter(config: Config, given: Config, servers: ServerFleet) -> Config:
    """Ask attached servers whether they can load the adapter; if one cannot, return the config with `merged`.

    Args:
        config: with the adapter resolved.
        given: the user's config, which may force `alone`.

    Raises:
        ConfigError: `given` forces `alone`, and a server cannot load the adapter.
        ServerError: an attached server is not up in time, or does not answer.
    """
    if config.rollout.weights.adapter != "alone" or not config.rollout.urls:
        return config
    why = servers.talk(servers.wait_until_attached(), partial(why_no_adapter, model=config.model))
    if why is None:
        return config
    if given.rollout.weights.adapter == "alone":
        raise ConfigError(f"rollout.weights.adapter=alone: {why}; use auto or merged")
    return config.with_adapter("merged")


def confirm_experts(config: Config, servers: ServerFleet) -> None:
    """Ask attached servers whether they record experts, if the learner is to replay them.

    Raises:
        ConfigError: a server does not. Otherwise every attempt on it would fail.
        ServerError: an attached server is not up in time, or does not answer.
    """
    if not config.rollout.replay_experts or not config.rollout.urls:
        return
    why = servers.talk(servers.wait_until_attached(), why_no_experts)
    if why is not None:
        raise ConfigError(f"rollout.replay_experts=true: {why}; or use rollout.replay_experts=false")


@dataclass(frozen=True, slots=True)
class _Scoring:
    """What is scored outside of attempts: batches of training, and validations.

    validation: None without `data.val_files`.
    """

    batch_rewards: RemoteBatchRewards
    validation_rewards: RemoteBatchRewards
    validation: Validation | None


def _open_scoring(config: Config, run_dir: RunDir, plugins: Plugins, chat: Chat) -> _Scoring:
    rewards = _batch_rewards(config, plugins)
    if rewards.is_any and config.needs_early_rewards:
        raise ConfigError(
            f"{config.needs_early_rewards} needs rewards when a group is complete, but a reward with "
            "scope=batch is computed later"
        )
    if config.reward_model.is_used:
        Conversations(config.reward_model, config.agent, plugins)  # raises here what its process would
    own = config.of_validation
    validation_rewards = rewards if own is config else _batch_rewards(own, plugins)
    return _Scoring(
        rewards, validation_rewards, _open_validation(own, run_dir, plugins, chat, validation_rewards)
    )


def _batch_rewards(config: Config, plugins: Plugins) -> RemoteBatchRewards:
    return RemoteBatchRewards(is_any=RewardTable(config.reward, plugins).may_score("batch"))


def _open_validation(
    config: Config, run_dir: RunDir, plugins: Plugins, chat: Chat, rewards: RemoteBatchRewards
) -> Validation | None:
    """Return the validation, None without `data.val_files`. `config` and `rewards`: those of validation."""
    if not config.data.val_files:
        return None
    playable = Playable(config.agent, plugins, chat, RewardTable(config.reward, plugins).check)
    dataset = build_dataset(
        config.data,
        config.data.val_files,
        playable,
        max_rows=config.data.max_val_rows,
        images=run_dir.images,
    )
    folder = run_dir.validation_data if config.trainer.keep_trajectories else None
    return Validation(
        dataset, config.eval, rewards=rewards, folder=folder, num_examine=config.reward.num_examine
    )


def _launch_scorer(
    config: Config,
    scoring: _Scoring,
    buffer: Actor[TrainingBuffer],
    seats: Mapping[Role, Sequence[Seat]],
    stack: ExitStack,
) -> list[Workers[RewardModel]]:
    """Launch the scorer of batches and the ranks of the reward model, if there are any; return the ranks.

    `stack` stops them.
    """
    used = [own for own in (scoring.batch_rewards, scoring.validation_rewards) if own.is_any]
    if not used:
        return []
    ranks = None
    if config.reward_model.is_used:
        device = config.placement.device_of("reward_model")
        ranks = launch_reward_model(config.reward_model, seats["reward_model"], device=device)
        stack.callback(ranks.stop)
    scorer = launch_scorer(config, buffer, ranks)
    stack.callback(scorer.kill)
    for rewards in used:
        rewards.connect(scorer)
    return [] if ranks is None else [ranks]


def _launch_buffer(
    config: Config, run_dir: RunDir, checkpoint: Checkpoint | None, observer: Observer
) -> Actor[TrainingBuffer]:
    """Start the replay buffer with the journal in the run folder.

    A run that does not resume, or resumes from another folder's checkpoint, starts a new journal.
    """
    is_own = checkpoint is None or checkpoint.is_in(run_dir.checkpoints)
    is_new = config.trainer.resume_mode == "disable" or not is_own
    return launch_buffer(
        BufferSettings.of(config),
        str(run_dir.root.resolve()),
        is_new=is_new,
        say=observer.say,
        num_leasing=config.rollout.num_actors,
    )


def _buffer_plan(buffer: Actor[TrainingBuffer], observer: Observer) -> BufferPlan:
    plan = buffer.within(DATA_TIMEOUT_S).run(TrainingBuffer.plan)
    observer.set_total_steps(plan.total_steps)
    for line in (plan.template_note, plan.journal_note, *plan.sandboxes):
        if line is not None:
            observer.say(line)
    return plan


def _resume(
    buffer: Actor[TrainingBuffer], run_dir: RunDir, checkpoint: Checkpoint | None, observer: Observer
) -> int:
    """Put the buffer at the checkpoint's step, and checkpoints of other steps aside.

    Returns the newest version that was ever used here, by whoever knows the newest; -1: none.
    """
    newest_version = run_dir.next_version() - 1
    if (aside := put_aside(run_dir.checkpoints, checkpoint)) is not None:
        observer.say(aside)
    state = checkpoint.buffer_state() if checkpoint else None
    step = checkpoint.step if checkpoint else 0
    resumed = buffer.within(DATA_TIMEOUT_S).run(TrainingBuffer.resume, step, state)
    if resumed.num_other:
        observer.say(
            f"{resumed.num_other} complete groups of the checkpoint have another size than "
            "rollout.group_size asks for: they are played again"
        )
    if resumed.newest_version > newest_version:
        observer.say(
            f"{VERSIONS} ends with version {newest_version}, the journal with {resumed.newest_version}: "
            f"lines are missing; versions go on after {resumed.newest_version}"
        )
    return max(newest_version, resumed.newest_version)


def _readiness(config: Config, plan: BufferPlan) -> str:
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
