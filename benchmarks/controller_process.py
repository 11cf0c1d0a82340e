"""The controller of `data_plane.py`, in a process of its own, with stand-ins for the ranks and the scorer in
another: their answers arrive as bytes, and their time and memory are not the controller's.
"""

from __future__ import annotations

import pickle
import resource
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.learner import LearnerConfig
from agentrl.config.schema import Config
from agentrl.controller.assess import assess, measure_on_ranks, pack_for_critic, settle
from agentrl.controller.batch_scorer import BatchScorer, RemoteBatchRewards
from agentrl.controller.credit import (
    credit,
    group_attempts,
    leave_out_masked,
    leave_out_old,
    split_minibatches,
    whitened,
    with_reward,
)
from agentrl.controller.learner import plan_for
from agentrl.controller.reward_kl import RewardKL
from agentrl.controller.roles import Roles
from agentrl.figures.trajectory_metrics import summarise_attempts
from agentrl.heap import without_collections
from agentrl.learner.dispatch import cut
from agentrl.learner.sample_refs import Assessed, PlannedMicrobatch, assessments
from agentrl.types import Message, Task

NUM_RANKS = 64
MICROBATCH_TOKENS = 65_536

KL = {"place": "reward", "coefficient": 0.1, "estimator": "k1", "target": 0.1}
ALGORITHMS = {
    "grpo": AlgorithmConfig(),
    "critic": AlgorithmConfig.model_validate({"advantage": "gae", "lam": 0.95, "whiten": True, "kl": KL}),
    "kl": AlgorithmConfig.model_validate({"kl": KL}),
    "batch_reward": AlgorithmConfig(),
}
"""By mode: GRPO; GAE with a critic, whitened, and KL in the reward; GRPO with KL in the reward; GRPO after a
reward of scope batch.
"""
ANSWERS = {"Learner.parity_tokens": 4096.0, "Critic.parity_tokens": 4096.0, "Learner.shared_prefix": True}
FUNCTION = """
def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
    return [float(len(text) % 7) for text in solution_strs]
"""


@dataclass(frozen=True, slots=True)
class Controlled:
    """What a batch cost the controller. peak_mib: growth of its peak memory. first_message: to rank 0."""

    cpu_s: float
    peak_mib: float
    plan_bytes: int
    first_message: bytes


def run_controller(mode: str, message: bytes, folder: Path, *, group_size: int) -> Controlled:
    """Handle the buffer's answer `message` in a new process; `folder`: for columns, which stay there."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_control, mode, message, folder, group_size).result()


def _control(mode: str, message: bytes, folder: Path, group_size: int) -> Controlled:
    (folder / "batch.py").write_text(FUNCTION)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        others = Elsewhere(pool, folder)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.process_time()
        with without_collections():  # as in `train_step`
            messages = _step(mode, message, others, folder, group_size)
        cpu_s = time.process_time() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Controlled(cpu_s, (peak - before) / 1024, sum(map(len, messages)), messages[0])


def _step(mode: str, message: bytes, others: Elsewhere, folder: Path, group_size: int) -> list[bytes]:
    """Do what the controller does with a batch; return the messages to the policy's ranks."""
    algorithm, config = ALGORITHMS[mode], LearnerConfig(microbatch_tokens=MICROBATCH_TOKENS)
    has_kl = algorithm.kl.place == "reward"
    roles: Any = Roles(
        others, others if mode == "critic" else None, RewardKL(algorithm.kl) if has_kl else None
    )
    groups = group_attempts(pickle.loads(message))
    if mode == "batch_reward":
        rewards = RemoteBatchRewards(is_any=True)
        rewards.connect(others)  # type: ignore[arg-type]  # it answers as the scorer
        groups = group_attempts(rewards.score([t for group in groups for t in group.attempts]))
    groups = with_reward(groups)
    assessment = assess(roles, groups, algorithm, config, folder=str(folder))
    samples = credit(groups, algorithm, group_size=group_size, assessment=assessment)
    samples = whitened(samples, partial(measure_on_ranks, roles.learner))
    samples = leave_out_old(samples, lags=lambda versions: 1 - versions, max_lag=4)
    samples = leave_out_masked(samples, ())
    settle(roles, groups, assessment)
    messages = []
    for minibatch in split_minibatches(samples, num_minibatches=1, rng=np.random.default_rng(0)):
        if mode == "critic":
            _messages(pack_for_critic(roles.critic, minibatch, algorithm, config))
        messages += _messages(plan_for(roles.learner, minibatch, config))
    attempts = [t for group in groups for t in group.attempts]
    summarise_attempts(attempts, lags=lambda versions: 1 - versions)
    pickle.dumps(attempts, protocol=5)  # for the recorder
    return messages


def _messages(microbatches: Sequence[PlannedMicrobatch]) -> list[bytes]:
    return [pickle.dumps(part, protocol=5) for part in cut(microbatches, NUM_RANKS, what="plan")]


class Elsewhere:
    """Stands for ranks and the scorer, and answers from another process."""

    dp_size = NUM_RANKS

    def __init__(self, pool: ProcessPoolExecutor, folder: Path) -> None:
        self._pool = pool
        self._folder = folder
        pool.submit(_answers, [], folder).result()  # it starts, and imports what it needs

    def run(self, method: Callable[..., Any], *args: Any) -> Any:
        name = method.__qualname__
        if name in ANSWERS:
            return ANSWERS[name]
        if name == "BatchScorer.score":
            [found] = self._ask(name, [args])
            return found
        items, *rest = args
        shares = [(own, *rest) for own in cut(items, NUM_RANKS, what=name)]
        return [item for own in self._ask(name, shares) for item in own]

    def _ask(self, name: str, shares: Sequence[tuple[Any, ...]]) -> list[Any]:
        messages = [pickle.dumps((name, share), protocol=5) for share in shares]
        return [pickle.loads(found) for found in self._pool.submit(_answers, messages, self._folder).result()]


def _answers(messages: Sequence[bytes], folder: Path) -> list[bytes]:
    return [_answer(message, folder) for message in messages]


def _answer(message: bytes, folder: Path) -> bytes:
    """Answer as one rank, or as the scorer."""
    name, args = pickle.loads(message)
    if name == "BatchScorer.score":
        found: Any = _scorer(folder).score(*args)
    elif name == "Learner.moments":
        found = [[sample.moments() for sample in share] for share in args[0]]
    else:
        found = _assessed(*args, has_sums=name == "Learner.reward_kl")
    return pickle.dumps(found, protocol=5)


def _assessed(microbatches: Sequence[PlannedMicrobatch], folder: str, *, has_sums: bool) -> list[Assessed]:
    rng = np.random.default_rng(0)
    sizes = [sum(piece.num_actions for piece in m.plan.pieces) for m in microbatches]
    columns = [rng.standard_normal(size, np.float32) for size in sizes]
    return assessments(columns, folder, summed_for=microbatches if has_sums else None)


@cache
def _scorer(folder: Path) -> BatchScorer:
    function = {"path": str(folder / "batch.py"), "scope": "batch"}
    # The attempts are made up, so no tokenizer belongs to them.
    reward = {"custom_function": function, "timeout_s": 3600.0, "solution_str": "messages"}
    config = Config.model_validate({"reward": reward})
    return BatchScorer(config, _Tasks(), None)  # type: ignore[arg-type]  # it answers as the buffer


class _Tasks:
    def run(self, _method: object, group_ids: Sequence[int]) -> list[Task]:
        return [
            Task(f"t:{group_id}", "bench", (Message("user", "?"),), "tool_agent", ground_truth="1")
            for group_id in group_ids
        ]
