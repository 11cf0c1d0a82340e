"""Credit as one formula over a whole batch in memory, with a number per token: what the ranks' must equal.

It reads trajectories, not facts; it knows no runs, columns or moments.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.algorithms.compact import ActionBatch, AdvantageOptions
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.types import Outcome, Trajectory
from parts.built_in import ESTIMATORS

Floats = Sequence[NDArray[np.floating]]


def credit_in_memory(
    played: Sequence[Trajectory],
    algorithm: AlgorithmConfig,
    *,
    values: Floats | None = None,
    ends: Sequence[float] | None = None,
    kl: Floats | None = None,
    kl_coefficient: float = 0.0,
    teacher_kl: Floats | None = None,
) -> tuple[list[NDArray[np.float64]], list[NDArray[np.float64]] | None]:
    """Return advantages and returns, f64[A] per trajectory in the order of positions.

    values, kl, teacher_kl: f[A] per trajectory in the same order. ends: values behind truncated attempts.
    """
    rows = [row for index, t in enumerate(played) for row in rows_of(index, t, algorithm)]
    lengths = torch.tensor([len(order) for _, _, order in rows])

    def column(numbers: Floats | None) -> torch.Tensor | None:
        if numbers is None:
            return None
        own = [np.asarray(numbers[index], np.float64)[order] for index, _, order in rows]
        return torch.from_numpy(np.concatenate([np.empty(0), *own]))

    rewards = []
    for t in played:
        earned = np.zeros(t.num_tokens)
        for event in t.rewards:
            earned[event.position] += event.value
        rewards.append(earned[t.action_mask])
    rewards_A, kl_A, values_A = column(rewards), column(kl), column(values)
    assert rewards_A is not None
    if kl_A is not None:
        rewards_A = rewards_A - kl_coefficient * kl_A
    labels = {label: number for number, label in enumerate(dict.fromkeys(label for _, label, _ in rows))}
    batch = ActionBatch.of_tokens(
        rewards_A,
        torch.from_numpy(np.concatenate([numbers_of(played[i], o, algorithm) for i, _, o in rows])),
        lengths,
        torch.tensor([labels[label] for _, label, _ in rows]),
        torch.tensor([played[index].outcome is Outcome.TRUNCATED for index, _, _ in rows]),
        None,
        values_A=values_A,
        values_after_N=None if ends is None else torch.tensor(ends, dtype=torch.float64),
    )
    options = AdvantageOptions(
        algorithm.gamma, algorithm.lam, algorithm.bootstrap_truncated, algorithm.singleton, 1, 1.0, 1.0
    )
    found = ESTIMATORS[algorithm.advantage](batch, options)
    advantages_A = found.advantages_A.numpy()
    if algorithm.whiten and len(advantages_A):
        centred = advantages_A - advantages_A.mean()
        is_flat = advantages_A.min() == advantages_A.max()
        advantages_A = centred * 0 if is_flat else centred / np.sqrt(advantages_A.var(ddof=1) + 1e-8)
    if teacher_kl is not None:
        advantages_A = advantages_A + _taught(column(teacher_kl).numpy(), lengths.tolist(), algorithm)
    laid = _laid(played, rows, advantages_A)
    if algorithm.segment_credit == "last":
        for own, t in zip(laid, played, strict=True):
            own[~_is_last(t)] = 0
    return laid, None if found.returns_A is None else _laid(played, rows, found.returns_A.numpy())


def numbers_of(t: Trajectory, order: NDArray[np.int64], algorithm: AlgorithmConfig) -> NDArray[np.int64]:
    """Return i64[A]: the turn of each token; a conversation credited on its own counts its own turns."""
    turns = t.turn_ids[t.action_mask][order]
    if algorithm.conversation_credit == "attempt" or not t.conversations:
        return turns
    return np.unique(turns, return_inverse=True)[1].astype(np.int64)


def rows_of(
    index: int, t: Trajectory, algorithm: AlgorithmConfig
) -> list[tuple[int, object, NDArray[np.int64]]]:
    """Return (index, label of its group, order of sampling) of what is credited on its own."""
    turns = t.turn_ids[t.action_mask]
    order = np.argsort(turns, kind="stable")
    if algorithm.conversation_credit == "attempt" or not t.conversations:
        return [(index, (t.group_id, "main"), order)]
    starts = np.searchsorted(t.segment_starts, np.flatnonzero(t.action_mask), side="right") - 1
    owners = np.asarray(t.segment_conversations)[starts] if len(starts) else starts
    found = [
        (index, (t.group_id, one.name), order[owners[order] == number])
        for number, one in enumerate(t.conversations)
        if (owners == number).any()
    ]
    return found or [(index, (t.group_id, "main"), order)]


def _taught(
    kl: NDArray[np.float64], lengths: Sequence[int], algorithm: AlgorithmConfig
) -> NDArray[np.float64]:
    own, added = algorithm.distillation, np.zeros(len(kl))
    end = 0
    for length in lengths:
        end, total = end + length, 0.0
        for place in range(end - 1, end - length - 1, -1):
            total = kl[place] + own.gamma * total
            added[place] = -own.coefficient * total
    return added


def _laid(played: Sequence[Trajectory], rows: Sequence, numbers: NDArray) -> list[NDArray[np.float64]]:
    laid, start = [np.zeros(t.num_action_tokens) for t in played], 0
    for index, _, order in rows:
        laid[index][order] = numbers[start : start + len(order)]
        start += len(order)
    return laid


def _is_last(t: Trajectory) -> NDArray[np.bool_]:
    """Return bool[A]: whether a token is in the last segment of its conversation."""
    owners = t.segment_conversations or (0,) * len(t.segment_starts)
    lasts = set({owner: place for place, owner in enumerate(owners)}.values())
    segments = np.searchsorted(t.segment_starts, np.flatnonzero(t.action_mask), side="right") - 1
    return np.isin(segments, list(lasts))
