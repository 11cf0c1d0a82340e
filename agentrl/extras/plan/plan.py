"""`make_plan`: for a model and a number of GPUs, the config that learns fastest among those that fit.

All splits of the GPUs that fit are estimated (`agentrl.extras.plan.estimate`), and the best is planned.
Splits of fewer GPUs are among those of more, so more GPUs never make the estimate slower.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.config.model_size import ModelSize
from agentrl.config.schema import Config
from agentrl.errors import ConfigError
from agentrl.extras.plan.estimate import StepEstimate, StepEstimator
from agentrl.extras.plan.explain_memory import GB, refuse_too_large
from agentrl.extras.plan.gpus import GPUS
from agentrl.extras.plan.layouts import (
    FrozenNeeds,
    LearnerLayout,
    Pool,
    Split,
    frozen_servers,
    learner_layout,
    least_learner_bytes,
    longest_tokens,
    server_sizes,
    splits,
    splits_beside,
)

STALENESS = (0, 1, 2, 4)
"""Bounds that are tried if none is given."""
_WORTH = 1.05
"""A larger bound on staleness is chosen if it is faster by more than this factor."""
_MOST_GPUS = 4096
_NEAR = 4
"""Numbers of ranks that are tried per number of GPUs: more ranks need less memory each."""
_PER_ACTOR = 256
"""Attempts in flight of a rollout actor."""
_MAX_SOURCES = 8


@dataclass(frozen=True, slots=True)
class PlanCandidate:
    """A way to use the GPUs, and its estimate. tp: GPUs of a server; frozen_tp: of one of a frozen model."""

    split: Split
    layout: LearnerLayout
    tp: int
    max_staleness: int
    estimate: StepEstimate
    frozen_tp: int | None = None

    @property
    def num_servers(self) -> int:
        return self.split.servers.num_gpus // self.tp

    @property
    def rank(self) -> tuple[float, int, int]:
        """Smaller is better: the step, then GPUs, then GPUs of a server."""
        return (self.estimate.step_s, self.split.needs, self.tp)


@dataclass(frozen=True, slots=True)
class Plan:
    """The best candidate, others near it, and the config of the best."""

    best: PlanCandidate
    others: Sequence[PlanCandidate]
    config: Config


def make_plan(config: Config, size: ModelSize, num_gpus: int, *, max_staleness: int | None = None) -> Plan:
    """Return the fastest plan for so many GPUs. max_staleness: the only bound to try; None: `STALENESS`.

    config: what does not depend on the plan: model, lengths, batch, GPU.

    Raises:
        ConfigError: nothing fits; one line with what is missing and what would be right.
    """
    _refuse_gpus(config, num_gpus)
    frozen = frozen_servers(config)
    if max_staleness is not None and max_staleness < 0:
        raise ConfigError(f"--max-staleness {max_staleness}: use 0 or more")
    bounds = STALENESS if max_staleness is None else (max_staleness,)
    found = list(_candidates(config, size, num_gpus, bounds, frozen))
    if not found:
        raise ConfigError(_why_nothing_fits(config, size, num_gpus))
    best = _choose(found)
    planned = apply(config, best)
    refuse_too_large(planned)  # a check of the search: it never raises
    return Plan(best, _others(found, best), planned)


def apply(config: Config, chosen: PlanCandidate) -> Config:
    """Return the config with everything that a candidate decides."""
    split, rollout = chosen.split, config.rollout
    in_flight = (chosen.max_staleness + 1) * config.buffer.groups_per_step * config.attempts_per_group
    actors = max(1, math.ceil(in_flight / _PER_ACTOR))
    groups_per_actor = math.ceil(in_flight / config.attempts_per_group / actors)
    nodes = split.needs > config.simulation.gpus_per_node
    changes: dict[str, Any] = {
        "learner": chosen.layout.changes,
        "buffer": {"max_staleness": chosen.max_staleness},
        "rollout": {
            "num_servers": chosen.num_servers,
            "num_actors": actors,
            "max_concurrent_trajectories": groups_per_actor * config.attempts_per_group,
            "sglang": {
                "args": {
                    **rollout.sglang.args,
                    "tp_size": chosen.tp,
                    "mem_fraction_static": config.simulation.server.memory_share,
                }
            },
            "weights": {"sources": min(_MAX_SOURCES, split.learner.nodes)},
        },
        "placement": {
            "pools": {
                "learning": {"nodes": split.learner.nodes, "gpus_per_node": split.learner.gpus_per_node},
                "serving": {"nodes": split.servers.nodes, "gpus_per_node": split.servers.gpus_per_node},
            },
            "roles": {"actor": "learning", "servers": "serving"},
        },
        "cluster": {
            "gpu_memory_gb": GPUS[config.simulation.gpu].memory_gb,
            **({"address": config.cluster.address or "auto"} if nodes else {}),
        },
        "simulation": {"server": {"gpus": chosen.tp}},
    }
    if split.frozen is not None:
        changes = _merged(changes, _of_frozen(config, split.frozen, chosen.frozen_tp))
    return Config.model_validate(_merged(config.model_dump(mode="json"), changes))


def _of_frozen(config: Config, pool: Pool, tp: int | None) -> dict[str, Any]:
    """Return the keys of the servers of opponents and a teacher."""
    own = {"sglang_args": {"tp_size": tp}}
    started = {name: own for name, one in config.agent.opponents.items() if one.is_started}
    has_teacher = config.algorithm.distillation.servers.is_started
    return {
        "placement": {
            "pools": {"frozen": {"nodes": pool.nodes, "gpus_per_node": pool.gpus_per_node}},
            "roles": {"frozen_servers": "frozen"},
        },
        "agent": {"opponents": started},
        **({"algorithm": {"distillation": {"servers": own}}} if has_teacher else {}),
    }


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **values,
        **{
            name: _merged(values[name], change)
            if isinstance(change, Mapping) and isinstance(values.get(name), Mapping)
            else change
            for name, change in changes.items()
        },
    }


# ---------------------------------------------------------------------------------------------------- search


def _candidates(
    config: Config, size: ModelSize, num_gpus: int, bounds: Sequence[int], frozen: FrozenNeeds | None
) -> Iterator[PlanCandidate]:
    sizes = server_sizes(config, size)
    layouts: dict[int, LearnerLayout | None] = {}
    estimator: StepEstimator | None = None
    for split in _splits(config, num_gpus, frozen):
        ranks = split.learner.num_gpus
        fitting = [tp for tp in sizes if split.servers.gpus_per_node % tp == 0]
        if not fitting:
            continue
        if ranks not in layouts:
            layouts[ranks] = learner_layout(config, size, ranks)
        layout = layouts[ranks]
        if layout is None:
            continue
        estimator = estimator or StepEstimator(config, size)
        for tp in fitting:
            for bound in bounds:
                servers = split.servers.num_gpus // tp
                estimate = estimator.estimate(ranks=ranks, servers=servers, tp=tp, max_staleness=bound)
                yield PlanCandidate(split, layout, tp, bound, estimate, None if frozen is None else frozen.tp)


def _splits(config: Config, num_gpus: int, frozen: FrozenNeeds | None) -> Iterator[Split]:
    node = config.simulation.gpus_per_node
    return splits(num_gpus, node) if frozen is None else splits_beside(frozen, num_gpus, node)


def _choose(found: Sequence[PlanCandidate]) -> PlanCandidate:
    """Return the best candidate: for each number of GPUs, the smallest bound on staleness that is nearly as
    fast as the fastest, and of these the fastest.
    """
    picks: list[PlanCandidate] = []
    fastest: dict[int, PlanCandidate] = {}
    ordered = sorted(found, key=lambda own: own.split.needs)
    for index, own in enumerate(ordered):
        before = fastest.get(own.max_staleness)
        if before is None or own.rank < before.rank:
            fastest[own.max_staleness] = own
        is_last = index + 1 == len(ordered) or ordered[index + 1].split.needs > own.split.needs
        if is_last:
            limit = _WORTH * min(best.estimate.step_s for best in fastest.values())
            picks.append(
                next(fastest[bound] for bound in sorted(fastest) if fastest[bound].estimate.step_s <= limit)
            )
    return min(picks, key=lambda own: own.rank)


def _others(found: Sequence[PlanCandidate], best: PlanCandidate) -> list[PlanCandidate]:
    """Return the runners-up: the next splits, another size of the servers, and other bounds on staleness."""
    others: list[PlanCandidate] = []
    same_bound = [own for own in found if own.max_staleness == best.max_staleness]
    by_ranks: dict[int, PlanCandidate] = {}
    for own in sorted(same_bound, key=lambda own: own.rank):
        by_ranks.setdefault(own.split.learner.num_gpus, own)
    by_ranks.pop(best.split.learner.num_gpus, None)
    others += list(by_ranks.values())[:2]
    here = [own for own in found if own.split == best.split]
    other_tp = [own for own in here if own.tp != best.tp and own.max_staleness == best.max_staleness]
    others += sorted(other_tp, key=lambda own: own.rank)[:1]
    others += [own for own in here if own.tp == best.tp and own.max_staleness != best.max_staleness]
    return others


# -------------------------------------------------------------------------------------------------- refusals


def _refuse_gpus(config: Config, num_gpus: int) -> None:
    node = config.simulation.gpus_per_node
    if num_gpus < 2:
        raise ConfigError(f"--gpus {num_gpus}: learner and servers have GPUs of their own; use at least 2")
    if num_gpus > _MOST_GPUS:
        raise ConfigError(
            f"--gpus {num_gpus:,}: use at most {_MOST_GPUS:,}, of which all divisions are tried"
        )
    if num_gpus > node and num_gpus % node:
        near = num_gpus // node * node
        raise ConfigError(
            f"--gpus {num_gpus}: nodes have {node} GPUs; use {near} or {near + node}, or set "
            "simulation.gpus_per_node"
        )


def _why_nothing_fits(config: Config, size: ModelSize, num_gpus: int) -> str:
    gpu, node = config.simulation.gpu, config.simulation.gpus_per_node
    memory_gb = GPUS[gpu].memory_gb
    billions = f"{size.num_parameters / 1e9:,.1f} billion parameters"
    sizes = server_sizes(config, size)
    cure = _cure(config, size, num_gpus)
    if not sizes:
        return (
            f"no server of up to {min(8, node)} {gpu} ({memory_gb:g} GB each) has room for {billions} and a "
            f"trajectory of {longest_tokens(config):,} tokens; {cure}"
        )
    frozen = frozen_servers(config)
    taken = 0 if frozen is None else frozen.num_gpus
    if min(sizes) >= num_gpus - taken:
        also = f", the servers of frozen models {taken}" if taken else ""
        return (
            f"a server needs {min(sizes)} of the {num_gpus} GPUs{also}, and the learner some as well; {cure}"
        )
    ranks = max((own.learner.num_gpus for own in _with_server(config, num_gpus, sizes)), default=1)
    least = least_learner_bytes(config, size, ranks)
    return (
        f"beside a server, the learner of {billions} has {ranks} {gpu}, each of which would need "
        f"{least / GB:,.0f} GB of its {memory_gb:g} with everything moved to the host that fits there; {cure}"
    )


def _with_server(config: Config, num_gpus: int, sizes: Sequence[int]) -> list[Split]:
    return [
        own
        for own in _splits(config, num_gpus, frozen_servers(config))
        if any(own.servers.gpus_per_node % tp == 0 for tp in sizes)
    ]


def _cure(config: Config, size: ModelSize, num_gpus: int) -> str:
    """Return what would make a plan possible."""
    if (more := _least_gpus(config, size, num_gpus)) is not None:
        return f"use --gpus {more}"
    for gpu in ("h200", "b200"):
        if GPUS[gpu].memory_gb <= GPUS[config.simulation.gpu].memory_gb:
            continue
        own = config.simulation.model_copy(update={"gpu": gpu})
        changed = config.model_copy(update={"simulation": own})
        if (gpus := _least_gpus(changed, size, 2)) is not None:
            return f"use --gpu {gpu} --gpus {max(gpus, num_gpus)}"
    return "use a smaller --context, or model.lora.rank=32"


def _least_gpus(config: Config, size: ModelSize, num_gpus: int) -> int | None:
    """Return the smallest number of GPUs above `num_gpus` with which something fits."""
    node = config.simulation.gpus_per_node
    sizes = server_sizes(config, size)
    if not sizes:
        return None
    counts = [*range(num_gpus, node), *range(math.ceil(num_gpus / node) * node, _MOST_GPUS + 1, node)]
    for count in counts:
        ranks = sorted({own.learner.num_gpus for own in _with_server(config, count, sizes)})
        if any(learner_layout(config, size, own) for own in ranks[-_NEAR:]):
            return count
    return None
