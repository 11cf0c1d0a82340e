"""The training loop: read this file first.

    take      groups from the replay buffer; no token lags by more than `buffer.max_staleness` versions
    reward    rewards that need the whole batch, if the config has any
    assess    with a critic: values before action tokens; with KL in the reward: KL(policy || reference);
              with a teacher: its log-probabilities of what the policy sampled
    credit    rewards -> advantages over runs of action tokens; what needs values or KL per token is left to
              the ranks that load them
    plan      by lengths alone: which trajectories are in which microbatch of which rank, without padding
    score     each rank loads its trajectories; their proximal (and reference) log-probabilities, before the
              first update
    update    loss / global count, backward, clip, step; once per minibatch and epoch.
              The critic updates before the policy, or in parallel with it if it has its own pool
    publish   pause the servers, send the weights, resume; version + 1

Meanwhile the rollout actors lease tasks, play them and fill the buffer. Only the staleness bound stops them.
If a learner rank is lost, `recovering` resets the run to its newest checkpoint, and the loop continues there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import numpy as np

from agentrl.cluster.workers import Handle
from agentrl.config.schema import Config
from agentrl.controller.assess import assess, begin_critic_updates, measure_on_ranks, settle
from agentrl.controller.credit import (
    credit,
    leave_out_masked,
    leave_out_old,
    split_minibatches,
    whitened,
    with_reward,
)
from agentrl.controller.learner import plan_for
from agentrl.controller.roles import Roles
from agentrl.controller.run import Run, RunResult, complete_result
from agentrl.controller.start import open_run
from agentrl.data.attempt_facts import AttemptFacts
from agentrl.heap import without_collections
from agentrl.learner.learner import Learner
from agentrl.learner.packing import budget_metrics
from agentrl.types import Group, Lags

Timer = Callable[[str], AbstractContextManager[None]]
"""Measures a named phase of the step: `with timer("score"): ...`."""


def train(config: Config) -> RunResult:
    """Run a training, or resume an interrupted one, and return its result.

    Raises:
        UserError: the config, data or a plugin is wrong. All processes that were started are stopped again.
        InfrastructureError: the run lost a process, server or file that it could not replace.
    """
    if (complete := complete_result(config.trainer)) is not None:
        return complete
    with open_run(config) as run:
        run.begin()
        with run.recovering():
            run.publish()
        if config.trainer.val_only:
            run.validate()
            return run.finish()
        if run.step >= run.total_steps:
            return run.finish()
        run.start_rollouts()
        if config.trainer.val_before_train and not run.is_resumed:
            run.validate()
        while True:
            with run.recovering():
                while run.step < run.total_steps:
                    train_step(run, config)
                    if _is_due(run.step, config.trainer.test_freq, run.total_steps):
                        run.validate()
                    if run.owes_checkpoint or _is_due(run.step, config.trainer.save_freq, run.total_steps):
                        run.save()
                return run.finish()


@without_collections()  # they look through all attempts of the batch again and again
def train_step(run: Run, config: Config) -> None:
    """Take one batch, train on it, publish."""
    groups = run.take()
    # before `publish` replaces it: lags count from the weights that train on the batch
    learned_by = run.lineage
    with run.memory_for_learner(), run.traced(), run.column_folder() as columns:
        updates = learn(
            run.roles,
            groups,
            config,
            step=run.step,
            lags=learned_by.lags,
            timer=run.timer,
            columns=columns,
            proximal_folder=run.proximal_folder,
        )
    run.step += 1
    with run.timer("publish"):
        run.publish()
    run.record(groups, updates, learned_by=learned_by)


def learn(
    roles: Roles,
    groups: Sequence[Group[AttemptFacts]],
    config: Config,
    *,
    step: int,
    lags: Lags,
    timer: Timer,
    columns: str | None = None,
    proximal_folder: str | None = None,
) -> list[dict[str, float]]:
    """Make the updates of one step and return the metrics of each.

    The outcome depends only on the state of the roles, the groups, the step and the lags. That is why a
    replay from stored trajectories gives the same weights.

    Args:
        step: number of steps made before this one; it also seeds the split into minibatches.
        lags: returns the lag of each token, in versions behind the weights that are being trained.
        columns: folder in which the ranks keep numbers per token for each other; None: in memory, for ranks
            in this process.
        proximal_folder: where the ranks store proximal log-probabilities; None: nowhere.
    """
    learner = roles.learner
    with timer("assess"):
        groups = with_reward(groups)
        assessment = assess(roles, groups, config.algorithm, config.learner, folder=columns)
    with timer("credit"):
        samples = credit(
            groups, config.algorithm, group_size=config.rollout.fixed_group_size, assessment=assessment
        )
        samples = whitened(samples, partial(measure_on_ranks, learner))
        samples = leave_out_old(samples, lags=lags, max_lag=config.algorithm.correction.max_lag)
        samples = leave_out_masked(samples, config.rollout.masked_outcomes)
    rng = np.random.default_rng((config.trainer.seed, step))
    minibatches = split_minibatches(samples, num_minibatches=config.learner.minibatches_per_step, rng=rng)
    beside = settle(roles, groups, assessment)
    critic_updates: list[Handle[dict[str, float]]] = []
    if roles.critic is not None:
        with timer("update_critic"):
            critic_updates = begin_critic_updates(
                roles, minibatches, config.algorithm, config.learner, num_epochs=config.critic_epochs
            )
            if step < config.critic.warmup_steps:
                return [*beside, *(update.wait() for update in critic_updates)]
    # All minibatches are scored before the first update: the proximal policy is fixed for the whole step.
    with timer("score"):
        packed = [plan_for(learner, m, config.learner) for m in minibatches]
        scored = [learner.run(Learner.score, microbatches) for microbatches in packed]
        if proximal_folder is not None:
            beside += [
                learner.run(Learner.store_proximal, *both, proximal_folder, step + 1, part)
                for part, both in enumerate(zip(packed, scored, strict=True))
            ]
    beside.append(
        budget_metrics(
            [m for own in packed for m in own],
            num_tokens=sum(ref.shape.num_tokens for minibatch in minibatches for ref in minibatch),
            max_tokens=config.learner.microbatch_tokens,
        )
    )
    with timer("update"):
        updates = [
            learner.run(Learner.update, minibatch)
            for _ in range(config.learner.epochs_per_step)
            for minibatch in scored
        ]
    if roles.critic is not None:
        with timer("update_critic"):  # a critic in its own pool may still be computing
            beside += [update.wait() for update in critic_updates]
    return [*updates, *beside]


def _is_due(step: int, frequency: int, total_steps: int) -> bool:
    """Return whether `step` is a multiple of `frequency`, or the last. A frequency of -1 means never."""
    return frequency > 0 and (step % frequency == 0 or step == total_steps)
