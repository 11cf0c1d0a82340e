"""What a plan prints: its predicted step, what limits it, and the runners-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.config.schema import Config
from agentrl.extras.plan.explain_memory import memory_lines
from agentrl.extras.plan.measure import Simulated
from agentrl.extras.plan.plan import Plan, PlanCandidate, apply
from agentrl.extras.plan.report import binding
from agentrl.extras.plan.scaled import MOST_ATTEMPTS, scaled
from agentrl.extras.plan.simulate import simulate


@dataclass(frozen=True, slots=True)
class Checked:
    """A candidate, with its simulation. factor: how many times smaller it was than the run."""

    candidate: PlanCandidate
    simulated: Simulated
    factor: float


def check(plan: Plan, config: Config) -> list[Checked]:
    """Simulate the best candidate and the others, in this order; the others only if that is cheap."""
    found: list[Checked] = []
    for own in (plan.best, *plan.others):
        smaller, factor = scaled(apply(config, own))
        attempts = smaller.buffer.groups_per_step * smaller.attempts_per_group
        if not found or attempts <= 2 * MOST_ATTEMPTS:
            found.append(Checked(own, simulate(smaller), factor))
    return found


def plan_lines(plan: Plan, checked: Sequence[Checked], *, num_gpus: int) -> list[str]:
    """Return the lines about a plan. checked: empty if nothing was simulated."""
    best, config = plan.best, plan.config
    split, own = best.split, config.simulation
    lines = [
        f"{config.model.path} on {num_gpus} {own.gpu}: {split.learner.num_gpus} learner ranks, "
        f"{best.num_servers} servers of {best.tp}, max_staleness {best.max_staleness}",
        f"batch       {config.buffer.groups_per_step} groups of {config.rollout.group_size}, up to "
        f"{config.data.max_prompt_tokens + config.agent.max_response_tokens:,} tokens each",
        f"step        {best.estimate.step_s:,.1f} s estimated{_simulated(checked)}",
        f"limit       {best.estimate.limit}: learner {best.estimate.learner_s:,.1f} s, servers "
        f"{best.estimate.servers_s:,.1f} s{_longest(best)}",
    ]
    if checked:
        binds, change = binding(config, checked[0].simulated, best.estimate)
        lines += [f"simulation  {binds}", f"change      {change}"]
    lines += [
        f"memory      {name}: {text}" if name else f"            {text}"
        for name, text in memory_lines(config)
    ]
    if split.frozen is not None and best.frozen_tp is not None:
        keys = ", ".join(plan.key for plan in config.frozen_plans)
        num = split.frozen.num_gpus // best.frozen_tp
        lines.append(f"frozen      {num} servers of {best.frozen_tp}: {keys}; no step waits for them here")
    if (unused := num_gpus - split.needs) > 0:
        lines.append(f"unused      {unused} GPUs would not make a step faster")
    return [*lines, "", *_table(plan, checked)]


def _simulated(checked: Sequence[Checked]) -> str:
    if not checked:
        return ""
    first = checked[0]
    of = "" if first.factor == 1 else f" with 1/{first.factor:.3g} of groups, servers and learner"
    return f", {first.simulated.step_s:,.1f} s simulated{of}"


def _longest(best: PlanCandidate) -> str:
    if best.max_staleness == 0:
        return ""
    return f", longest attempt {best.estimate.longest_s:,.1f} s in each of {best.max_staleness + 1} steps"


def _table(plan: Plan, checked: Sequence[Checked]) -> list[str]:
    lines = ["  ranks  servers x GPUs  max_staleness  estimated s  simulated s  limit"]
    simulations = {id(own.candidate): f"{own.simulated.step_s:,.1f}" for own in checked}
    for own in (plan.best, *plan.others):
        simulated = simulations.get(id(own), "-")
        mark = "*" if own is plan.best else " "
        lines.append(
            f"{mark} {own.split.learner.num_gpus:5}  {f'{own.num_servers} x {own.tp}':>14}  "
            f"{own.max_staleness:13}  {own.estimate.step_s:11,.1f}  {simulated:>11}  {own.estimate.limit}"
        )
    return lines
