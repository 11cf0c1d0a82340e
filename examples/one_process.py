"""Asynchronous GRPO with off-policy correction, complete in one file and one process, without a framework.

Read it from `main` upwards. `agentrl` distributes this loop over servers, rollout actors, a buffer and
sharded ranks:

    sample    OLDER versions of the policy sample the attempts of a step, as in asynchronous training
    group     attempts at the same task are compared with each other: GRPO's advantages
    score     the learner's log-probabilities before its first update: the proximal policy
    update    loss = weight * clip(ratio) * advantage, a mean over all sampled tokens; AdamW
    publish   the weights become the next version

The loss has three policies: `behavior` sampled the token, `proximal` starts the step, `policy` is trained.

    ratio  = policy / proximal     with gradient, clipped: limits how far one step moves (PPO)
    weight = proximal / behavior   without gradient, truncated: corrects old samples (decoupled PPO, TIS)

It takes a minute on one core. tests/learner/test_one_process.py checks that agentrl's learner computes the
same losses and gradients.
"""

from __future__ import annotations

import copy
import random
import re
import tempfile
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from agentrl.extras.datatools.arithmetic import write_arithmetic  # only data comes from agentrl

LETTERS = "\n0123456789+-*=?no"  # a token is a letter; "\n" ends a turn
END = LETTERS.index("\n")


@dataclass(frozen=True)
class Settings:
    steps: int = 40
    tasks_per_step: int = 16
    group_size: int = 8  # attempts at one task
    max_lag: int = 3  # versions that the sampling policy may be behind the trained one
    max_turns: int = 3
    turn_tokens: int = 8
    temperature: float = 1.0
    epochs: int = 2  # updates per step
    clip: float = 0.2
    dual_clip: float = 3.0
    weight_cap: float = 2.0
    lr: float = 5e-4  # decays to 0
    grad_clip: float = 1.0


@dataclass
class Attempt:
    """An attempt at a task.

    The lists have one entry per token; `mask` is True for tokens that the policy sampled.
    """

    task: dict[str, Any]
    group: int
    tokens: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    behavior: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turn: str = ""  # the policy's last turn
    reward: float = 0.0

    def add(self, token: int, *, sampled: bool, behavior: float = 0.0, version: int = -1) -> None:
        for column, value in (
            (self.tokens, token),
            (self.mask, sampled),
            (self.behavior, behavior),
            (self.versions, version),
        ):
            column.append(value)

    def add_text(self, text: str, *, sampled: bool = False) -> None:
        for letter in text:
            self.add(LETTERS.index(letter), sampled=sampled)


def reply(task: dict[str, Any], turn: str) -> str | None:
    """Return the environment's reply to a turn (`?12*34` calls the calculator); None ends the attempt."""
    product = re.fullmatch(r"\?(\d+)\*(\d+)", turn)
    if task["kind"] == "tool" and product:
        return str(int(product[1]) * int(product[2]))
    if task["kind"] == "interaction" and turn != task["truth"]:
        return "no"
    return None


def play(
    versions: deque[tuple[int, PreTrainedModel]], tasks: list[dict[str, Any]], group_size: int, s: Settings
) -> list[Attempt]:
    """Play all tasks at once.

    The weights change during an attempt: each turn is sampled by the next version.
    """
    playing = attempts = [Attempt(task, group) for group, task in enumerate(tasks) for _ in range(group_size)]
    for attempt in attempts:
        attempt.add_text(attempt.task["question"])
    for turn in range(s.max_turns):
        version, policy = versions[min(turn, len(versions) - 1)]
        write_turn(policy, version, playing, s)
        answers = [reply(attempt.task, attempt.turn) for attempt in playing]
        for attempt, answer in zip(playing, answers, strict=True):
            attempt.reward = float(attempt.turn == attempt.task["truth"])
            if answer is not None:
                attempt.add_text(answer + "\n")
        playing = [attempt for attempt, answer in zip(playing, answers, strict=True) if answer is not None]
    return attempts


@torch.no_grad()
def write_turn(policy: PreTrainedModel, version: int, attempts: list[Attempt], s: Settings) -> None:
    """Sample a turn in each attempt.

    Each token records its log-probability and version, for the correction.
    """
    writing = attempts
    for attempt in attempts:
        attempt.turn = ""
    for _ in range(s.turn_tokens):
        if not writing:
            return
        logits_NTV = policy(pad([a.tokens for a in writing])).logits
        last_NV = torch.stack(
            [logits_TV[len(a.tokens) - 1] for logits_TV, a in zip(logits_NTV, writing, strict=True)]
        )
        logprobs_NV = torch.log_softmax(last_NV / s.temperature, -1)
        for attempt, logprobs_V, token in zip(
            writing, logprobs_NV, torch.multinomial(logprobs_NV.exp(), 1)[:, 0].tolist(), strict=True
        ):
            attempt.add(token, sampled=True, behavior=float(logprobs_V[token]), version=version)
            attempt.turn += LETTERS[token].strip()
        writing = [a for a in writing if a.tokens[-1] != END]


# -------------------------------------------------------------------------------------------- the mathematics
# N attempts, T tokens of the longest one, V vocabulary. Padding is on the right: a causal model ignores it.


def pad(rows: list[list[Any]]) -> Tensor:
    length = max(map(len, rows))
    return torch.tensor([row + [0] * (length - len(row)) for row in rows])


def grpo_advantages(rewards: Tensor, groups: list[int]) -> Tensor:
    """Return (R - mean of the group) / (std of the group + 1e-6), f[N]; 0 for groups with equal rewards."""
    advantages = torch.zeros_like(rewards)
    for group in set(groups):
        members = torch.tensor([g == group for g in groups])
        if (own := rewards[members]).min() < own.max():
            advantages[members] = (own - own.mean()) / (own.std() + 1e-6)
    return advantages


def log_probabilities(policy: PreTrainedModel, tokens_NT: Tensor, temperature: float) -> Tensor:
    """Return log p(token | tokens before it) at the sampling temperature, f[N, T]; 0 for the first token."""
    logprobs_NTV = torch.log_softmax(policy(tokens_NT).logits[:, :-1] / temperature, -1)
    predicted = logprobs_NTV.gather(-1, tokens_NT[:, 1:, None])[..., 0]
    return torch.cat([torch.zeros_like(predicted[:, :1]), predicted], 1)


def token_losses(
    policy: Tensor, proximal: Tensor, behavior: Tensor, advantages: Tensor, s: Settings
) -> Tensor:
    """Return losses f[N, T], truncated weight * PPO's loss with dual clip, of log-probabilities f[N, T] and
    advantages f[N, 1].
    """
    ratio = torch.exp((policy - proximal).clamp(-20, 20))
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(1 - s.clip, 1 + s.clip) * advantages)
    # Dual clip: with a negative advantage and a large ratio, the loss would have no bound.
    loss = torch.where(advantages < 0, torch.minimum(loss, -s.dual_clip * advantages), loss)
    weight = torch.exp((proximal - behavior).clamp(-20, 20)).clamp(max=s.weight_cap)
    return weight * loss


def learn(
    policy: PreTrainedModel, optimizer: torch.optim.Optimizer, attempts: list[Attempt], s: Settings
) -> list[dict[str, float]]:
    """Make the updates of one step and return the loss, gradient norm and mean weight of each."""
    tokens, mask, behavior = (
        pad(rows) for rows in zip(*((a.tokens, a.mask, a.behavior) for a in attempts), strict=True)
    )
    mask, behavior = mask.bool(), behavior.to(policy.dtype)
    rewards = torch.tensor([a.reward for a in attempts], dtype=torch.float64)
    advantages = grpo_advantages(rewards, [a.group for a in attempts]).float()[:, None].to(policy.dtype)
    with torch.no_grad():
        proximal = log_probabilities(policy, tokens, s.temperature)
    metrics = []
    for _ in range(s.epochs):
        now = log_probabilities(policy, tokens, s.temperature)
        # One mean over all sampled tokens of the step. Tokens of the environment are context, without a loss.
        loss = token_losses(now, proximal, behavior, advantages, s)[mask].sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), s.grad_clip)
        optimizer.step()
        metrics.append(
            {
                "loss": loss.item(),
                "grad_norm": norm.item(),
                "weight": torch.exp(proximal - behavior)[mask].mean().item(),
            }
        )
    return metrics


def read_rows(
    folder: Path,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[list[tuple[str, bool]]]]:
    """Return training tasks, validation tasks, and a teacher's conversations of (text, whether the policy
    writes it).
    """

    def task(row: dict[str, Any]) -> dict[str, Any]:
        expression, kind = row["extra_info"]["expression"], row["extra_info"]["kind"]
        return {"question": expression + "=\n", "kind": kind, "truth": row["reward_model"]["ground_truth"]}

    def text(message: dict[str, Any]) -> tuple[str, bool]:
        if message["tool_calls"]:
            arguments = message["tool_calls"][0]["function"]["arguments"]
            return "?" + re.findall(r"[\d*]+", arguments)[0] + "\n", True
        spoken = message["content"].removeprefix("#### ")
        return ("no" if message["role"] == "user" else spoken) + "\n", message["role"] == "assistant"

    write_arithmetic(folder, seed=0, num_train=2000, num_val=192, num_sft=4000)
    train, val, sft = (
        pq.read_table(folder / f"{name}.parquet").to_pylist() for name in ("train", "val", "sft")
    )
    taught = [[(row["expression"] + "=\n", False), *map(text, row["messages"][1:])] for row in sft]
    return list(map(task, train)), list(map(task, val)), taught


def warm_start(policy: PreTrainedModel, taught: list[list[tuple[str, bool]]], *, steps: int) -> None:
    """Imitate the teacher, because reinforcement learning needs some successful attempts to start from."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for _ in range(steps):
        attempts = [Attempt({}, 0) for _ in range(64)]
        for attempt, conversation in zip(attempts, random.sample(taught, 64), strict=True):
            for text, is_own in conversation:
                attempt.add_text(text, sampled=is_own)
        mask = pad([a.mask for a in attempts]).bool()
        loss = -log_probabilities(policy, pad([a.tokens for a in attempts]), 1.0)[mask].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def accuracy(policy: PreTrainedModel, tasks: list[dict[str, Any]], s: Settings) -> float:
    return sum(a.reward for a in play(deque([(0, policy)]), tasks, 1, s)) / len(tasks)


def main(s: Settings, *, warm_steps: int = 400) -> list[float]:
    """Train and print the reward curve; return the validation accuracies before and after."""
    random.seed(0)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        train, val, taught = read_rows(Path(folder))
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    policy = Qwen2ForCausalLM(
        Qwen2Config(vocab_size=len(LETTERS), tie_word_embeddings=True, initializer_range=0.1, **sizes)
    )
    warm_start(policy, taught, steps=warm_steps)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=s.lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, s.steps)
    # Oldest first; the last is the newest published.
    versions = deque([(0, copy.deepcopy(policy))], maxlen=s.max_lag + 1)
    validated = [accuracy(policy, val, s)]
    print(f"warm start: validation accuracy {validated[0]:.3f}")
    for step in range(s.steps):
        attempts = play(versions, random.sample(train, s.tasks_per_step), s.group_size, s)
        metrics = learn(policy, optimizer, attempts, s)[-1]
        versions.append((step + 1, copy.deepcopy(policy)))  # publish
        schedule.step()
        reward = sum(a.reward for a in attempts) / len(attempts)
        lag = step - min(v for a in attempts for v in a.versions if v >= 0)
        print(
            f"step {step:2d}  lag {lag}  weight {metrics['weight']:.3f}  reward {reward:.3f}  "
            f"{'#' * round(60 * reward)}",
            flush=True,
        )
    validated.append(accuracy(policy, val, s))
    print(
        f"after {s.steps} steps with samples up to {s.max_lag} versions old: validation accuracy "
        f"{validated[-1]:.3f}"
    )
    return validated


if __name__ == "__main__":
    main(Settings())
