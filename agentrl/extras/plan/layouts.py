"""Layouts of a plan: pools of GPUs, settings of the learner, and servers, each of which fits its GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl.config.frozen_servers import FrozenPlan
from agentrl.config.learner import LearnerConfig
from agentrl.config.model_size import ModelSize
from agentrl.config.rank_memory import RankMemory, trained_memory
from agentrl.config.schema import Config
from agentrl.errors import ConfigError
from agentrl.extras.plan.explain_memory import GB, sglang_memory
from agentrl.extras.plan.gpus import GPUS
from agentrl.extras.plan.model_presets import PRESETS, known_size
from agentrl.extras.plan.speeds import WIDTH, model_size

HOST_GB = 1500
"""Memory of a node that ranks may use for what is moved to the host; most nodes of 8 GPUs have 2 TB."""
_MIXED_NODES = 4
"""Largest number of nodes of which each is divided between the learner and servers."""
_SEQUENCE_PARALLEL = (1, 2, 4, 8)
_EXPERT_PARALLEL = 8
_MICROBATCH_TOKENS = 32_768
"""Tokens of a microbatch beyond which larger ones are not faster."""
_COPY_RANKS = 64
"""Ranks from which several copies of the weights (HSDP) are preferred to one."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Nodes of which each gives a role so many GPUs."""

    nodes: int
    gpus_per_node: int

    @property
    def num_gpus(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True)
class Split:
    """GPUs of the learner, of the servers, and of the servers of frozen models, if there are any.

    needs: GPUs of the cluster, in whole nodes if there are several.
    """

    learner: Pool
    servers: Pool
    needs: int
    frozen: Pool | None = None


@dataclass(frozen=True, slots=True)
class FrozenNeeds:
    """Servers of opponents and of a teacher. tp: GPUs of each."""

    count: int
    tp: int

    @property
    def num_gpus(self) -> int:
        return self.count * self.tp

    def pools(self, most_nodes: int, gpus_per_node: int) -> Iterator[Pool]:
        """Yield the pools for them: with as many on each of its nodes."""
        for nodes in range(1, min(most_nodes, self.count) + 1):
            if self.count % nodes == 0 and self.num_gpus <= nodes * gpus_per_node:
                yield Pool(nodes, self.num_gpus // nodes)


@dataclass(frozen=True, slots=True)
class LearnerLayout:
    """Settings of the learner with which a rank fits its GPU. changes: keys of the section `learner`."""

    world_size: int
    changes: Mapping[str, Any] = field(hash=False)
    peak_bytes: float


def splits(num_gpus: int, gpus_per_node: int) -> Iterator[Split]:
    """Yield the ways to divide GPUs. More GPUs only add ways: all that fit fewer GPUs are among them."""
    node = min(num_gpus, gpus_per_node)
    for learner in range(1, node):
        for servers in range(1, node - learner + 1):
            yield Split(Pool(1, learner), Pool(1, servers), learner + servers)
    nodes = num_gpus // gpus_per_node
    for learner in range(1, nodes):
        for servers in range(1, nodes - learner + 1):
            used = (learner + servers) * gpus_per_node
            yield Split(Pool(learner, gpus_per_node), Pool(servers, gpus_per_node), used)
    for mixed in range(2, min(nodes, _MIXED_NODES) + 1):
        for quarter in (1, 2, 3):
            share, rest = divmod(quarter * gpus_per_node, 4)
            if not rest:
                yield Split(Pool(mixed, share), Pool(mixed, gpus_per_node - share), mixed * gpus_per_node)


def splits_beside(frozen: FrozenNeeds, num_gpus: int, gpus_per_node: int) -> Iterator[Split]:
    """Yield the ways to divide GPUs that leave some for servers of frozen models: on the only node, on nodes
    of their own, or on those of the servers.
    """
    node = gpus_per_node
    for pool in frozen.pools(1, node):
        for split in splits(min(num_gpus, node) - pool.num_gpus, node):
            yield replace(split, frozen=pool, needs=split.needs + pool.num_gpus)
    nodes = num_gpus // node
    for pool in frozen.pools(nodes - 1, node) if num_gpus > node else ():
        for split in splits(num_gpus - pool.nodes * node, node):
            needs = math.ceil(split.needs / node) * node + pool.nodes * node
            yield replace(split, frozen=pool, needs=needs)
        for servers in range(pool.nodes, nodes) if pool.gpus_per_node < node else ():
            for learner in range(1, nodes - servers + 1):
                beside = Pool(servers, node - pool.gpus_per_node)
                yield Split(Pool(learner, node), beside, (learner + servers) * node, pool)


def frozen_servers(config: Config) -> FrozenNeeds | None:
    """Return the servers of opponents and a teacher, as small as their models allow; None if the run starts
    none.

    Raises:
        ConfigError: the size of a model is not known, or no server of a node has room for it.
    """
    plans = config.frozen_plans
    if not plans:
        return None
    count = sum(plan.rollout.num_started for plan in plans)
    return FrozenNeeds(count, max(_frozen_tp(config, plan) for plan in plans))


def _frozen_tp(config: Config, plan: FrozenPlan) -> int:
    """Return the smallest number of GPUs of a server that fits a frozen model."""
    # Without a path it is the policy.
    size = model_size(config) if plan.model.path == config.model.path else known_size(plan.model.path)
    if size is None:
        raise ConfigError(
            f"{plan.key}.model.path={plan.model.path!r} has no config.json of a known architecture; use such "
            f"a folder, or one of {', '.join(PRESETS)}"
        )
    if not (fitting := server_sizes(config, size)):
        gpu, most = config.simulation.gpu, min(8, config.simulation.gpus_per_node)
        raise ConfigError(
            f"{plan.key}: no server of up to {most} {gpu} has room for {plan.model.path!r} and a "
            f"conversation of {longest_tokens(config):,} tokens; use a smaller model, or a smaller --context"
        )
    return min(fitting)


def learner_layout(config: Config, size: ModelSize, world_size: int) -> LearnerLayout | None:
    """Return the simplest layout with which so many ranks fit their GPUs; None if there is none.

    First choice is what costs no time: more ranks per copy of the weights, then recomputed activations,
    tokens split over ranks, and last what is moved to the host's memory.
    """
    gpu_bytes = GPUS[config.simulation.gpu].memory_gb * GB
    for changes in _learner_changes(config, size, world_size):
        memory = _memory(config, size, changes)
        on_node = min(world_size, config.simulation.gpus_per_node)
        if memory.peak_bytes <= gpu_bytes and on_node * sum(memory.host.values()) <= HOST_GB * GB:
            return LearnerLayout(world_size, changes, memory.peak_bytes)
    return None


def least_learner_bytes(config: Config, size: ModelSize, world_size: int) -> float:
    """Return the smallest peak of a rank of all layouts whose part on the host fits there."""
    on_node = min(world_size, config.simulation.gpus_per_node)
    found = [
        _memory(config, size, changes | {"microbatch_tokens": longest_tokens(config)})
        for changes in _learner_changes(config, size, world_size)
    ]
    return min(own.peak_bytes for own in found if on_node * sum(own.host.values()) <= HOST_GB * GB)


def _memory(config: Config, size: ModelSize, changes: Mapping[str, Any]) -> RankMemory:
    learner = LearnerConfig.model_validate({**config.learner.model_dump(), **changes})
    return trained_memory(
        size,
        config.model,
        learner,
        tokens=learner.microbatch_tokens,
        is_gpu=True,
        has_reference=config.algorithm.kl.coefficient > 0,
        teacher=None if config.teacher_model is None else ModelSize.read(config.teacher_model.path),
    )


def longest_tokens(config: Config) -> int:
    """Return the tokens of the longest trajectory."""
    return config.data.max_prompt_tokens + config.agent.max_response_tokens


def server_sizes(config: Config, size: ModelSize) -> list[int]:
    """Return the numbers of GPUs that a server may have: those with room for the longest trajectory."""
    memory_gb = GPUS[config.simulation.gpu].memory_gb
    return [tp for tp in _divisions(size, config) if room_tokens(config, size, tp, memory_gb)]


def room_tokens(config: Config, size: ModelSize, tp: int, memory_gb: float) -> int:
    """Return the tokens of KV cache of a server; 0 if they are fewer than the longest trajectory has."""
    share = config.simulation.server.memory_share
    server = sglang_memory(size, width=WIDTH, tp=tp, pp=1, share=share)
    room = server.num_cached_tokens(memory_gb * GB)
    return room if room >= longest_tokens(config) else 0


def _divisions(size: ModelSize, config: Config) -> list[int]:
    """Return the degrees of tensor parallelism that SGLang has for the model within a node."""
    found = []
    for tp in (1, 2, 4, 8):
        kv = size.num_kv_heads
        is_even = size.num_heads % tp == 0 and (kv % tp == 0 or tp % kv == 0)
        if is_even and tp <= config.simulation.gpus_per_node:
            found.append(tp)
    return found


def _learner_changes(config: Config, size: ModelSize, world_size: int) -> Iterator[dict[str, Any]]:
    """Yield layouts of the learner, in order of preference."""
    longest = longest_tokens(config)
    experts = 1
    if size.experts is not None and not config.model.lora.rank:
        experts = math.gcd(math.gcd(size.experts.num, world_size), _EXPERT_PARALLEL)
    degrees = [
        degree
        for degree in _SEQUENCE_PARALLEL
        if world_size % degree == 0
        and size.num_heads % degree == 0
        and degree <= config.simulation.gpus_per_node
    ]
    budgets = sorted({max(longest, _MICROBATCH_TOKENS), longest}, reverse=True)
    base = {"world_size": world_size, "expert_parallel": experts}
    memory: list[dict[str, Any]] = [
        {"gradient_checkpointing": False},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "activation_offload": True},
        {"gradient_checkpointing": True, "offload": "optimizer"},
        {"gradient_checkpointing": True, "offload": "optimizer", "activation_offload": True},
        {"gradient_checkpointing": True, "offload": "parameters"},
        {"gradient_checkpointing": True, "offload": "parameters", "activation_offload": True},
    ]
    for index, saving in enumerate(memory):
        for degree in degrees[:1] if index == 0 else degrees:
            for tokens in budgets:
                own = {**base, **saving, "sequence_parallel": degree, "microbatch_tokens": tokens}
                for shards in _shard_sizes(config, world_size, experts):
                    yield {**own, "fsdp": {**config.learner.fsdp.model_dump(), "shard_size": shards}}


def _shard_sizes(config: Config, world_size: int, experts: int) -> Iterator[int | None]:
    """Yield the ranks per copy of the weights: with many ranks several copies first, then one."""
    node = config.simulation.gpus_per_node
    if world_size > _COPY_RANKS:
        nodes = world_size // node
        for copy_nodes in range(_COPY_RANKS // node, nodes):
            shards = copy_nodes * node
            if world_size % shards == 0 and shards % experts == 0:
                yield shards
    yield None
