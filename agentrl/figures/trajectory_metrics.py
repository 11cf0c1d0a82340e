"""Computes the metrics of a set of trajectories."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from agentrl.data.attempt_facts import AttemptFacts
from agentrl.types import SCORED_OUTCOMES, Group, Lags, Outcome, Trajectory


def summarise_trajectories(
    trajectories: Sequence[Trajectory], *, lags: Lags | None, prefix: str = "rollout/"
) -> dict[str, float]:
    """Return the metrics of trajectories that are in memory (see `summarise_attempts`)."""
    return summarise_attempts([AttemptFacts.of(t) for t in trajectories], lags=lags, prefix=prefix)


def summarise_attempts(
    attempts: Sequence[AttemptFacts], *, lags: Lags | None, prefix: str = "rollout/"
) -> dict[str, float]:
    """Return means and shares over `attempts`; undefined values are absent.

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
        `opponent/<name>/` + `trajectories`, `reward_mean`, `accuracy`: of those with this opponent;
        `tool_use`, `tool_use/needs_tool` (share with at least one call; the latter over tasks with
        `extra_info.needs_tool`);
        `segments/mean`, `turns/mean`, `tool_calls/mean`, `tool_errors/mean` (per trajectory);
        `response_tokens/mean`, `response_tokens/max` (tokens after the prompt), `action_tokens/mean` (sampled
        ones); `lag/mean`, `lag/max` and the shares `lag/0`, `lag/1`, ... over action tokens.
    """
    if not attempts:
        return {}
    scored = [t for t in attempts if t.outcome in SCORED_OUTCOMES]
    values: dict[str, float] = {"trajectories": len(attempts), "failed": len(attempts) - len(scored)}
    values |= _outcomes(attempts)
    if scored:
        values |= (
            _rewards(scored)
            | _reward_metrics(scored)
            | _sources(scored)
            | _opponents(scored)
            | _tools(scored)
            | _lengths(scored)
        )
    if lags is not None:
        values |= _lags(scored, lags)
    return {prefix + name: float(value) for name, value in values.items()}


def is_correct(attempt: AttemptFacts | Trajectory) -> float:
    """Return the reward's metric `accuracy`, in [0, 1]; without one, whether the reward is positive."""
    return float(attempt.metrics.get("accuracy", attempt.reward > 0))


def _outcomes(attempts: Sequence[AttemptFacts]) -> dict[str, float]:
    counts = Counter(t.outcome for t in attempts)
    shares = {f"outcome/{outcome.value}": count / len(attempts) for outcome, count in sorted(counts.items())}
    return {**shares, "truncated": counts[Outcome.TRUNCATED] / len(attempts)}


def _rewards(scored: Sequence[AttemptFacts]) -> dict[str, float]:
    rewards = np.array([t.reward for t in scored])
    by_agent: dict[str, list[float]] = defaultdict(list)
    for attempt in scored:
        by_agent[attempt.agent_name].append(is_correct(attempt))
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "accuracy": _mean(value for values in by_agent.values() for value in values),
        **{f"accuracy/{agent}": _mean(values) for agent, values in sorted(by_agent.items())},
    }


def _reward_metrics(scored: Sequence[AttemptFacts]) -> dict[str, float]:
    """Return the means of all metrics that rewards reported.

    A term reports `applied` only for trajectories to which it did NOT apply, so the share is computed from
    counts.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for attempt in scored:
        for name, value in attempt.metrics.items():
            if name.startswith("reward/"):
                found[name].append(value)
    applied = {name: len(values) for name, values in found.items() if name.endswith("/applied")}
    values = {name: _mean(values) for name, values in found.items() if name not in applied}
    for name, num_not in applied.items():
        num_applied = len(found.get(name.removesuffix("/applied"), ()))
        values[name] = num_applied / (num_applied + num_not)
    return dict(sorted(values.items()))


def _sources(scored: Sequence[AttemptFacts]) -> dict[str, float]:
    by_source: dict[str, list[AttemptFacts]] = defaultdict(list)
    for attempt in scored:
        by_source[attempt.data_source].append(attempt)
    values: dict[str, float] = {}
    for source, members in sorted(by_source.items()):
        facts = {**_results(members), **_reward_metrics(members)}
        values |= {f"source/{source}/{name}": value for name, value in facts.items()}
    return values


def _opponents(scored: Sequence[AttemptFacts]) -> dict[str, float]:
    by_name: dict[str, list[AttemptFacts]] = defaultdict(list)
    for attempt in scored:
        for name, _ in attempt.opponents:
            by_name[name].append(attempt)
    return {
        f"opponent/{name}/{fact}": value
        for name, members in sorted(by_name.items())
        for fact, value in _results(members).items()
    }


def _results(members: Sequence[AttemptFacts]) -> dict[str, float]:
    return {
        "trajectories": len(members),
        "reward_mean": _mean(t.reward for t in members),
        "accuracy": _mean(is_correct(t) for t in members),
    }


def _tools(scored: Sequence[AttemptFacts]) -> dict[str, float]:
    calls = [t.num_tool_calls for t in scored]
    values = {"tool_use": _mean(count > 0 for count in calls), "tool_calls/mean": _mean(calls)}
    needed = [count > 0 for count, t in zip(calls, scored, strict=True) if t.needs_tool]
    if needed:
        values["tool_use/needs_tool"] = _mean(needed)
    errors = [t.metrics["num_tool_errors"] for t in scored if "num_tool_errors" in t.metrics]
    return values | ({"tool_errors/mean": _mean(errors)} if errors else {})


def _lengths(scored: Sequence[AttemptFacts]) -> dict[str, float]:
    responses = [t.num_response_tokens for t in scored]
    return {
        "segments/mean": _mean(len(t.segments) for t in scored),
        "turns/mean": _mean(t.num_turns for t in scored),
        "response_tokens/mean": _mean(responses),
        "response_tokens/max": max(responses),
        "action_tokens/mean": _mean(t.num_action_tokens for t in scored),
    }


def _lags(scored: Sequence[AttemptFacts], lags_of: Lags) -> dict[str, float]:
    counts: Counter[int] = Counter()
    for attempt in scored:
        counts.update(dict(attempt.versions))
    versions = np.array(list(counts), np.int32)
    tokens: Counter[int] = Counter()  # by lag
    for lag, version in zip(lags_of(versions).tolist(), versions.tolist(), strict=True):
        tokens[lag] += counts[version]
    total = tokens.total()
    if not total:
        return {}
    shares = {f"lag/{lag}": count / total for lag, count in sorted(tokens.items())}
    mean = sum(lag * count for lag, count in tokens.items()) / total
    return {"lag/mean": mean, "lag/max": float(max(tokens)), **shares}


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(np.fromiter(values, dtype=float)))


def constant_group_share(groups: Sequence[Group]) -> float:
    """Return the share of groups with equal rewards, in [0, 1]; group-relative advantages are 0 in them."""
    return sum(is_constant(group) for group in groups) / len(groups) if groups else 0.0


def is_constant(group: Group) -> float:
    """Return 1.0 if all scored attempts have the same reward, and their conversations too, else 0.0."""
    return float(len({_earned(t) for t in group.attempts if t.outcome in SCORED_OUTCOMES}) <= 1)


def _earned(attempt: Any) -> tuple[Any, ...]:
    by_conversation = (
        (name, value)
        for name, value in attempt.metrics.items()
        if name.startswith("conversation/") and name.endswith("/reward")
    )
    return (attempt.reward, *sorted(by_conversation))
