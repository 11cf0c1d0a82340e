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

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from agentrl.adapters.catalog import named_plugins
from agentrl.chat.chat import Chat
from agentrl.cluster.readiness import StartUp
from agentrl.config.compose import dump_config
from agentrl.config.explain_inputs import context_warning
from agentrl.config.schema import Config
from agentrl.controller.attached import confirm_adapter, confirm_experts
from agentrl.controller.checkpoint import find_checkpoint, tidy
from agentrl.controller.launch import (
    RunStart,
    launch_frozen,
    launch_rollouts,
    launch_servers,
    open_checkpoints,
    planned_ranks,
    readiness,
    start_ray,
)
from agentrl.controller.listeners import Listeners, Opened
from agentrl.controller.observe import Observer
from agentrl.controller.resolve import check_training, resolved
from agentrl.controller.resume import buffer_plan, resume, say_resumed, start_buffer
from agentrl.controller.run import Processes, Run
from agentrl.controller.run_dir import RunDir
from agentrl.controller.scoring import open_scoring, start_scorer
from agentrl.interrupts import ending_at_the_second_interrupt, interruptible
from agentrl.registered import all_of
from agentrl.rollout.tracing import check_tracing
from agentrl.weights.disk import remove_versions


@contextmanager
def open_run(config: Config) -> Iterator[Run]:
    """Yield a run whose processes are ready. All of them are stopped afterwards, also after an error.

    Raises:
        UserError: the config, data or a plugin is wrong; raised before any process starts where possible.
        InfrastructureError: a process did not start; the message names it.
    """
    given, config = config, resolved(config)
    plugins = named_plugins(config.agent, config.reward, config.eval)
    chat = Chat.of(config.model)
    warnings = [warning for forecast in all_of("agentrl.forecasts") for warning in forecast(config)]
    check_tracing(config.tracking.spans)
    total_steps = check_training(config, plugins, chat)
    with interruptible(), ExitStack() as stack, ending_at_the_second_interrupt():
        run_dir = RunDir.open(given.trainer, dump_config(given))
        stack.callback(run_dir.close)
        # The servers and ranks are gone by then: nobody reads or writes a version.
        stack.callback(remove_versions, run_dir.weights(config.rollout.weights))
        tidy(run_dir.checkpoints)
        listeners = Listeners.of(config, run_dir)  # one may bring the checkpoints of another machine
        checkpoint = find_checkpoint(run_dir.checkpoints, config.trainer)
        scoring = open_scoring(config, run_dir, plugins, chat)
        resumed_at = checkpoint.step if checkpoint else None
        observer = Observer(config, run_dir, resumed_at=resumed_at, listeners=listeners)
        stack.callback(observer.close)
        stack.push(lambda kind, error, trace: listeners.tell_close(error))
        listeners.tell_open(Opened(observer, resumed_at, listeners.needed))
        if checkpoint is not None:
            say_resumed(checkpoint, config, total_steps=total_steps, say=observer.say)
        for warning in (*warnings, context_warning(config)):
            if warning is not None:
                observer.say(f"warning: {warning}")

        started = time.monotonic()
        start = RunStart(config, run_dir, observer, stack)
        seats = start_ray(start)
        servers = launch_servers(start, seats)
        start_up = stack.enter_context(StartUp(observer.say))
        start_up.add(servers)
        frozen = launch_frozen(start, seats)
        start_up.add(*([frozen] if config.frozen_plans else []))
        start = start.with_config(confirm_adapter(config, given, servers))
        confirm_experts(start.config, servers)
        buffer = start_buffer(start.config, run_dir, checkpoint, observer)
        rollouts = launch_rollouts(start, buffer, servers)
        start_up.add(rollouts)
        reward_ranks = start_scorer(start.config, scoring, buffer, seats, stack)
        start_up.add(*reward_ranks)
        with start_up.step("replay buffer"):
            # before the learner: an error in the data ends the run here, and lr schedules need total_steps
            plan = buffer_plan(buffer, observer)
        ranks = planned_ranks(start, seats, plan)
        checkpoints = open_checkpoints(start, checkpoint, pinned=listeners.pinned)
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
        newest_version = resume(buffer, run_dir, checkpoint, observer)
        observer.unwritten.attempt("readiness.txt", partial(start_up.finish, run_dir.root / "readiness.txt"))
        observer.say(f"ready after {time.monotonic() - started:.1f} s: {readiness(start.config, plan)}")
        run = Run(
            start.config,
            run_dir,
            Processes(buffer, ranks, servers, frozen, rollouts),
            observer,
            checkpoints,
            listeners=listeners,
            validation=scoring.validation,
            batch_rewards=scoring.batch_rewards,
            total_steps=plan.total_steps,
            newest_version=newest_version,
        )
        stack.callback(listeners.tell_end)
        listeners.tell_start(run)
        yield run
