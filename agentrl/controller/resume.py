"""The replay buffer of a run, and the state in which a run resumes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from agentrl.buffer.training_buffer import BufferPlan, BufferSettings, TrainingBuffer
from agentrl.cluster.actors import Actor
from agentrl.cluster.buffer import DATA_TIMEOUT_S, launch_buffer
from agentrl.config.schema import Config
from agentrl.controller.checkpoint import Checkpoint, put_aside
from agentrl.controller.observe import Observer
from agentrl.controller.run import say_complete
from agentrl.controller.run_dir import RunDir
from agentrl.data.checkpoint_files import read_model_config
from agentrl.tracking.versions import VERSIONS


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


def start_buffer(
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


def buffer_plan(buffer: Actor[TrainingBuffer], observer: Observer) -> BufferPlan:
    plan = buffer.within(DATA_TIMEOUT_S).run(TrainingBuffer.plan)
    observer.set_total_steps(plan.total_steps)
    for line in (plan.template_note, plan.journal_note, *plan.sandboxes):
        if line is not None:
            observer.say(line)
    return plan


def resume(
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
