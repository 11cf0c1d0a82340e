"""The lines of a simulation: where the time goes, what binds first, and what to change."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.config.schema import Config
from agentrl.extras.plan.estimate import LONGEST, StepEstimate, estimate_of
from agentrl.extras.plan.measure import Simulated

IDLE = 0.1
"""Share of a step from which a wait counts as one."""


def lines_of(config: Config, found: Simulated) -> list[str]:
    """Return the lines about one simulation."""
    own, rollout = config.simulation, config.rollout
    phases = " + ".join(f"{name} {seconds:.1f}" for name, seconds in found.phases.items() if seconds >= 0.05)
    is_full = found.kv_share >= 0.995
    lines = [
        f"{max(1, rollout.num_started)} servers of {own.server.gpus} {own.gpu}, "
        f"{config.learner.world_size} ranks; {config.buffer.groups_per_step} groups of {rollout.group_size}, "
        f"max_staleness {config.buffer.max_staleness}; {own.steps} steps",
        f"step            {found.step_s:,.1f} s (95 % within {found.step_p95_s:,.1f} s) = {phases}",
        f"tokens          {found.tokens_per_step:,.0f} per step, {found.tokens_per_s:,.0f} sampled tokens/s; "
        f"attempts of {found.mean_tokens:,.0f} tokens, the longest {found.longest_tokens:,.0f}",
        f"servers         {_shares(found.servers)}",
        f"                {found.running:.1f} requests run and {found.waiting:.1f} wait on each; KV cache "
        + ("full at times" if is_full else f"{found.kv_share:.0%} at most"),
        f"learner         waits {found.learner_idle_share:.0%} of the time for a batch",
        f"actors          play {found.most_in_flight:,} attempts at a time at most, and wait "
        f"{found.leasing_share:.0%} of the time for a lease",
        f"lag of tokens   {', '.join(f'{lag}: {share:.0%}' for lag, share in found.lags.items())}",
    ]
    if found.dropped:
        dropped = ", ".join(f"{reason} {number:.2f}" for reason, number in found.dropped.items())
        lines.append(f"dropped         groups per step: {dropped}")
    if found.num_failures:
        lines.append(f"failures        {found.num_failures} processes died")
    if found.redone_share >= 0.01:
        lines.append(f"computed again  {found.redone_share:.2f} prompt tokens per sampled token")
    if found.memory_gb:
        lines.append(
            "memory          " + ", ".join(f"{name} {size:,.1f} GB" for name, size in found.memory_gb.items())
        )
    binds, change = binding(config, found, estimate_of(config))
    return [*lines, f"binds first     {binds}", f"change          {change}"]


def binding(config: Config, found: Simulated, estimate: StepEstimate) -> tuple[str, str]:
    """Return what bounds the step time, and what would move the bound.

    `estimate` knows whether that is the longest attempt: servers that play the last attempts are busy, but
    more would not help.
    """
    if found.learner_idle_share < IDLE:
        return _learner_binds(found)
    if estimate.limit == LONGEST:
        return (
            "the longest attempt: a batch waits for it, and further servers would not sample it faster",
            f"buffer.max_staleness={config.buffer.max_staleness + 1}, more GPUs per server, more groups per "
            "step, or shorter attempts",
        )
    idle = found.servers["idle"]
    if found.servers["paused"] > IDLE and found.servers["paused"] >= idle:
        return (
            f"publishes: servers are paused {found.servers['paused']:.0%} of the time",
            "rollout.weights.transport=distributed, a faster network, or fewer and larger steps",
        )
    if idle < 2.5 * IDLE:
        if found.waiting > found.running / 4:
            return (
                f"the KV cache and slots of the servers: {found.waiting:.0f} requests wait on each",
                "more servers, more GPUs per server, or shorter contexts",
            )
        return "the servers: they compute all the time", "more servers"
    if found.leasing_share > IDLE:
        return (
            f"the bound on staleness: actors wait {found.leasing_share:.0%} of the time for a lease, and "
            "servers are idle in the tail of each batch",
            f"buffer.max_staleness={config.buffer.max_staleness + 1}, or fewer servers",
        )
    return (
        "attempts in flight: servers are idle while all attempts wait for tools or for the longest of them",
        "rollout.max_concurrent_trajectories, or more rollout.num_actors",
    )


def _learner_binds(found: Simulated) -> tuple[str, str]:
    phase = max(found.phases, key=lambda name: found.phases[name])
    share = found.phases[phase] / found.step_s
    cures = {
        "learn": "more ranks, larger microbatches, or servers moved to the learner",
        "publish": "rollout.weights.transport=distributed, a faster network, or fewer and larger steps",
        "save": "trainer.save_freq, or a faster disk",
    }
    idle = found.servers["idle"]
    more = f" (servers are idle {idle:.0%} of the time)" if idle > IDLE else ""
    return f"the learner: {share:.0%} of the step is `{phase}`", cures.get(
        phase, "fewer tokens per step"
    ) + more


def _shares(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)


def sweep_table(key: str, found: Mapping[str, Simulated]) -> list[str]:
    """Return the lines of a sweep, one per value."""
    first = next(iter(found.values()))
    width = max(len(key), *map(len, found))
    lines = [
        f"{key:<{width}}  {'step s':>8}  {'relative':>8}  {'tokens/s':>10}  {'learner waits':>13}  "
        f"{'servers idle':>12}  {'mean lag':>8}  dropped"
    ]
    for value, own in found.items():
        lag = sum(lag * share for lag, share in own.lags.items())
        # By tokens, so that steps with other batch sizes can be compared.
        relative = own.tokens_per_s / first.tokens_per_s
        lines.append(
            f"{value:<{width}}  {own.step_s:8.1f}  {relative:7.2f}x  {own.tokens_per_s:10,.0f}  "
            f"{own.learner_idle_share:13.0%}  {own.servers['idle']:12.0%}  {lag:8.2f}  "
            f"{sum(own.dropped.values()):7.2f}"
        )
    return lines
