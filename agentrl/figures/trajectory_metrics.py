"""Computes the metrics of a set of trajectories."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from agentrl.types import SCORED_OUTCOMES, Lags, Outcome, Trajectory


def summarise_trajectories(
    trajectories: Sequence[Trajectory], *, lags: Lags | None, prefix: str = "rollout/"
) -> dict[str, float]:
    """Return means and shares over `trajectories`; undefined values are absent.

    A failed trajectory says nothing about the policy: it counts only in `trajectories`, `failed` and
    `outcome/*`.

    Args:
        lags: returns the lag of tokens behind the weights that are trained; None: no lag metrics
            (validation).
        prefix: namespace, `rollout/` or `val/`.

    Returns:
        prefix + one of:
        `trajectories`, `failed` (counts); `outcome/<name>`, `truncated` (shares);
        `reward_mean`, `reward_std` (over trajectories, population), `accuracy`, `accuracy/<agent>`;
        `reward/<...>` (mean of each such metric over the trajectories that have it);
        `reward/<term>/applied` (share of trajectories to which the term applied; absent if it always did);
        `source/<data_source>/` + `trajectories`, `reward_mean`, `accuracy`, `reward/<...>`: by data source;
        `tool_use`, `tool_use/needs_tool` (share with at least one call; the latter over tasks with
        `extra_info.needs_tool`);
        `segments/mean`, `turns/mean`, `tool_calls/mean`, `tool_errors/mean` (per trajectory);
        `response_tokens/mean`, `response_tokens/max` (tokens after the prompt), `action_tokens/mean` (sampled
        ones); `lag/mean`, `lag/max` and the shares `lag/0`, `lag/1`, ... over action tokens.
    """
    if not trajectories:
        return {}
    scored = [t for t in trajectories if t.outcome in SCORED_OUTCOMES]
    values: dict[str, float] = {"trajectories": len(trajectories), "failed": len(trajectories) - len(scored)}
    values |= _outcomes(trajectories)
    if scored:
        values |= (
            _rewards(scored) | _reward_metrics(scored) | _sources(scored) | _tools(scored) | _lengths(scored)
        )
    if lags is not None:
        values |= _lags(scored, lags)
    return {prefix + name: float(value) for name, value in values.items()}


def is_correct(trajectory: Trajectory) -> float:
    """Return the reward's metric `accuracy`, in [0, 1]; without one, whether the reward is positive."""
    return float(trajectory.metrics.get("accuracy", trajectory.reward > 0))


def num_tool_calls(trajectory: Trajectory) -> int:
    """Return the number of tool calls of the policy, well-formed or not."""
    if "num_tool_calls" in trajectory.metrics:
        return int(trajectory.metrics["num_tool_calls"])
    return sum(len(message.tool_calls) for message in trajectory.messages if message.role == "assistant")


def _outcomes(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    counts = Counter(t.outcome for t in trajectories)
    shares = {
        f"outcome/{outcome.value}": count / len(trajectories) for outcome, count in sorted(counts.items())
    }
    return {**shares, "truncated": counts[Outcome.TRUNCATED] / len(trajectories)}


def _rewards(scored: Sequence[Trajectory]) -> dict[str, float]:
    rewards = np.array([t.reward for t in scored])
    by_agent: dict[str, list[float]] = defaultdict(list)
    for trajectory in scored:
        by_agent[trajectory.agent_name].append(is_correct(trajectory))
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "accuracy": _mean(value for values in by_agent.values() for value in values),
        **{f"accuracy/{agent}": _mean(values) for agent, values in sorted(by_agent.items())},
    }


def _reward_metrics(scored: Sequence[Trajectory]) -> dict[str, float]:
    """Return the means of all metrics that rewards reported.

    A term reports `applied` only for trajectories to which it did NOT apply, so the share is computed from
    counts.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for trajectory in scored:
        for name, value in trajectory.metrics.items():
            if name.startswith("reward/"):
                found[name].append(value)
    applied = {name: len(values) for name, values in found.items() if name.endswith("/applied")}
    values = {name: _mean(values) for name, values in found.items() if name not in applied}
    for name, num_not in applied.items():
        num_applied = len(found.get(name.removesuffix("/applied"), ()))
        values[name] = num_applied / (num_applied + num_not)
    return dict(sorted(values.items()))


def _sources(scored: Sequence[Trajectory]) -> dict[str, float]:
    by_source: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in scored:
        by_source[trajectory.data_source].append(trajectory)
    values: dict[str, float] = {}
    for source, members in sorted(by_source.items()):
        facts = {
            "trajectories": len(members),
            "reward_mean": _mean(t.reward for t in members),
            "accuracy": _mean(is_correct(t) for t in members),
            **_reward_metrics(members),
        }
        values |= {f"source/{source}/{name}": value for name, value in facts.items()}
    return values


def _tools(scored: Sequence[Trajectory]) -> dict[str, float]:
    calls = [num_tool_calls(t) for t in scored]
    values = {"tool_use": _mean(count > 0 for count in calls), "tool_calls/mean": _mean(calls)}
    needed = [count > 0 for count, t in zip(calls, scored, strict=True) if t.extra_info.get("needs_tool")]
    if needed:
        values["tool_use/needs_tool"] = _mean(needed)
    errors = [t.metrics["num_tool_errors"] for t in scored if "num_tool_errors" in t.metrics]
    return values | ({"tool_errors/mean": _mean(errors)} if errors else {})


def _lengths(scored: Sequence[Trajectory]) -> dict[str, float]:
    responses = [t.num_response_tokens for t in scored]
    return {
        "segments/mean": _mean(len(t.segment_starts) for t in scored),
        "turns/mean": _mean(int(t.turn_ids.max(initial=-1)) + 1 for t in scored),
        "response_tokens/mean": _mean(responses),
        "response_tokens/max": max(responses),
        "action_tokens/mean": _mean(t.num_action_tokens for t in scored),
    }


def _lags(scored: Sequence[Trajectory], lags_of: Lags) -> dict[str, float]:
    lags: NDArray[np.int32] = np.concatenate(
        [lags_of(t.versions[t.action_mask]) for t in scored] or [np.empty(0, np.int32)]
    )
    if not len(lags):
        return {}
    found, counts = np.unique(lags, return_counts=True)
    shares = {
        f"lag/{lag}": count / len(lags) for lag, count in zip(found.tolist(), counts.tolist(), strict=True)
    }
    return {"lag/mean": float(lags.mean()), "lag/max": float(lags.max()), **shares}


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(np.fromiter(values, dtype=float)))
