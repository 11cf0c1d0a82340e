"""Explain what fits on the GPUs of a run: memory per role and rank, and an error if one GPU is too small."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.config.model import ModelConfig
from agentrl.config.model_size import ModelSize
from agentrl.config.placement import SERVER_ROLES, Role
from agentrl.config.rank_memory import RankMemory, frozen_memory, trained_memory
from agentrl.config.rollout import RolloutConfig
from agentrl.config.schema import Config
from agentrl.errors import ConfigError
from agentrl.extras.plan.model_presets import known_size

GB = 10**9
STATIC_SHARE = 0.85
"""Share of a GPU that SGLang takes for weights and KV cache, about, unless `mem_fraction_static` is set."""
_NUM_NAMED = 3
"""Parts that an error names."""
_HALVINGS = 6

Lines = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """Memory of one GPU of a server, in bytes.

    weights: its part of the model, with copies that a publish needs.
    cache_per_token: its part of the KV cache of one token.
    static_share: part of the GPU that the server takes for both; None: it takes what `cache` says.
    cache: KV cache; 0 if the server takes what is left of its share.
    """

    weights: float
    cache_per_token: float
    static_share: float | None
    cache: float = 0.0

    def taken(self, gpu_bytes: float | None) -> float:
        """Return what the server takes of a GPU of this size; None: at least."""
        least = self.weights + self.cache
        return (
            least
            if self.static_share is None or gpu_bytes is None
            else max(least, self.static_share * gpu_bytes)
        )

    def num_cached_tokens(self, gpu_bytes: float) -> int:
        """Return the tokens for which there is room in the cache."""
        room = self.cache if self.static_share is None else self.static_share * gpu_bytes - self.weights
        return max(0, int(room / self.cache_per_token))


def memory_lines(config: Config) -> Lines:
    """Return the lines about the memory of GPUs; empty if no role has any."""
    roles = _roles_on_gpus(config)
    if not roles:
        return []
    lines: Lines = []
    for role in roles:
        if role in SERVER_ROLES:
            lines += _server_lines(config) if role == "servers" else _frozen_lines(config)
            continue
        memory = rank_memory(config, role)
        if memory is None:
            lines.append((_NAMES[role], _unknown(_model_path(config, role))))
            continue
        lines.append((_NAMES[role], f"{_gb(memory.peak_bytes)} = {_sum(memory.parts)}"))
        if memory.host:
            lines.append(("", f"and {_sum(memory.host)} in the host's memory"))
    lines += [
        (f"GPU of pool {pool}", _of_gpu(used, config))
        for pool, used in _by_pool(config, roles).items()
        if used
    ]
    return lines


def refuse_too_large(config: Config) -> None:
    """Check that each GPU has the memory that its roles need; nothing without `cluster.gpu_memory_gb`.

    Roles whose model is neither a local folder of a known type nor known by its name are left out.

    Raises:
        ConfigError: a GPU is too small; the line names the largest parts, and what would fit.
    """
    if config.cluster.gpu_memory_gb is None:
        return
    if (why := _overflow(config)) is None:
        return
    cures = list(_cures(config)) or list(_cures_beside_checkpointing(config))
    cure = (
        f"it would fit with {cures[0]}"
        if cures
        else "no change of one or two keys makes it fit; use more GPUs"
    )
    more = f", or {', or '.join(cures[1:3])}" if len(cures) > 1 else ""
    raise ConfigError(f"{why}; {cure}{more}")


def rank_memory(config: Config, role: Role) -> RankMemory | None:
    """Return the memory of a rank of a role (not of servers); None if its model's size is not known."""
    size = known_size(_model_path(config, role))
    if size is None:
        return None
    is_gpu = config.placement.device_of(role) == "cuda"
    if role == "reward_model":
        own = config.reward_model
        tokens = max(own.microbatch_tokens, own.max_tokens or 0)
        return frozen_memory(size, own.model, own.as_learner, tokens=tokens, is_gpu=is_gpu)
    longest = config.data.max_prompt_tokens + config.agent.max_response_tokens
    teacher = config.teacher_model if role == "actor" else None
    return trained_memory(
        size,
        config.model if role == "actor" else config.critic_model,
        config.learner,
        tokens=max(config.learner.microbatch_tokens, longest),
        is_gpu=is_gpu,
        has_reference=role == "actor" and config.algorithm.kl.coefficient > 0,
        has_logits=role == "actor",
        teacher=None if teacher is None else ModelSize.read(teacher.path),
    )


def server_memory(config: Config) -> ServerMemory | None:
    """Return the memory of a GPU of a server that the run starts; None if the model's size is not known."""
    return _memory_of(config.model, config.rollout)


def _memory_of(model: ModelConfig, rollout: RolloutConfig) -> ServerMemory | None:
    size = known_size(model.path)
    if size is None:
        return None
    width = 4 if model.dtype == "float32" else 2
    weights, cached = width * size.num_parameters, width * size.kv_values_per_token
    if rollout.backend == "embedded":
        own = rollout.embedded
        return ServerMemory(2 * weights, cached, None, own.num_blocks * own.page_size * cached)
    arguments = rollout.sglang.args
    tp, pp = _size(arguments, "tp_size", "tp"), _size(arguments, "pp_size", "pp")
    share = arguments.get("mem_fraction_static", STATIC_SHARE)
    return sglang_memory(size, width=width, tp=tp, pp=pp, share=float(share))


def sglang_memory(size: ModelSize, *, width: int, tp: int, pp: int, share: float) -> ServerMemory:
    """Return the memory of a GPU of an SGLang server. `width`: bytes of a number."""
    # Ranks beyond the number of key-value heads keep copies of them.
    cached = width * size.kv_values_per_token / pp / min(tp, size.num_kv_heads)
    return ServerMemory(width * size.num_parameters / tp / pp, cached, share)


# -------------------------------------------------------------------------------------------------- the pools


@dataclass(frozen=True, slots=True)
class _Use:
    """What the roles of a pool take of one of its GPUs at the largest moment, by role and part."""

    parts: Mapping[str, float]

    @property
    def num_bytes(self) -> float:
        return sum(self.parts.values())


def _by_pool(config: Config, roles: list[Role]) -> dict[str, _Use | None]:
    """Return the use of one GPU of each pool; None for a pool with a role whose model is not known."""
    pools: dict[str, list[Role]] = {}
    for role in roles:
        pools.setdefault(config.placement.pool_of(role), []).append(role)
    return {pool: _use(config, members) for pool, members in pools.items()}


def _use(config: Config, roles: list[Role]) -> _Use | None:
    ranks: dict[Role, RankMemory] = {}
    for role in roles:
        if role not in SERVER_ROLES:
            if (memory := rank_memory(config, role)) is None:
                return None
            ranks[role] = memory
    state = {f"{role}'s {name}": size for role, own in ranks.items() for name, size in own.state.items()}
    # One role of a pool computes at a time, apart from servers.
    busiest = max(ranks, key=lambda role: ranks[role].working_bytes, default=None)
    working = (
        {} if busiest is None else {f"{busiest}'s {name}": n for name, n in ranks[busiest].working.items()}
    )
    gpu_bytes = _gpu_bytes(config)
    if "frozen_servers" in roles:
        frozen = _of_frozen(config, gpu_bytes)
        if frozen is None:
            return None
        state |= frozen  # they never release their memory
    if "servers" not in roles:
        return _Use(state | working)
    server = server_memory(config)
    if server is None:
        return None
    num_gpus = config.placement.pools_in_use[config.placement.pool_of("servers")].num_gpus
    num = max(1, config.rollout.num_started // num_gpus)
    serving = {"servers' weights": num * server.weights}
    serving["servers' KV cache"] = num * (server.taken(gpu_bytes) - server.weights)
    if config.rollout.colocated:
        # They release their memory while the learner computes, and the learner keeps its state meanwhile.
        return max((_Use(state | working), _Use(state | serving)), key=lambda use: use.num_bytes)
    return _Use(state | working | serving)


def _of_frozen(config: Config, gpu_bytes: float | None) -> dict[str, float] | None:
    """Return what servers of frozen models take of one GPU of their pool, where the largest of them are; None
    if the size of a model is not known.
    """
    servers = [_memory_of(plan.model, plan.rollout) for plan in config.frozen_plans]
    known = [server for server in servers if server is not None]
    if len(known) < len(servers):
        return None
    num_gpus = config.placement.pools_in_use[config.placement.pool_of("frozen_servers")].num_gpus
    num = -(-config.num_ranks["frozen_servers"] // num_gpus)
    largest = max(known, key=lambda server: server.taken(gpu_bytes))
    return {
        "frozen servers' weights": num * largest.weights,
        "frozen servers' KV cache": num * (largest.taken(gpu_bytes) - largest.weights),
    }


def _overflow(config: Config) -> str | None:
    """Return what does not fit; None if everything does, or is not known."""
    gpu_bytes = _gpu_bytes(config)
    if gpu_bytes is None:
        return None
    roles = _roles_on_gpus(config)
    given = f"cluster.gpu_memory_gb={config.cluster.gpu_memory_gb:g}"
    for pool, use in _by_pool(config, roles).items():
        if use is not None and use.num_bytes > gpu_bytes:
            largest = sorted(use.parts.items(), key=lambda item: -item[1])[:_NUM_NAMED]
            named = ", ".join(f"{name} {_gb(size)}" for name, size in largest if size > 0)
            return f"a GPU of pool {pool} needs about {_gb(use.num_bytes)}, but {given}: {named}"
    if "servers" in roles and (server := server_memory(config)) is not None:
        longest = config.data.max_prompt_tokens + config.agent.max_response_tokens
        room = server.num_cached_tokens(gpu_bytes)
        if room < longest:
            return (
                f"a server's GPU has room for {room:,} tokens of KV cache beside {_gb(server.weights)} of "
                f"weights ({given}), fewer than the {longest:,} of the longest trajectory"
            )
    return None


def _cures(config: Config) -> Iterator[str]:
    """Yield single changes after which everything fits."""
    learner = config.learner
    changes: list[tuple[str, dict[str, Any]]] = []
    if not learner.gradient_checkpointing:
        changes.append(("learner.gradient_checkpointing=true", {"gradient_checkpointing": True}))
    longest = config.data.max_prompt_tokens + config.agent.max_response_tokens
    tokens = learner.microbatch_tokens
    for _ in range(_HALVINGS):
        tokens //= 2
        if tokens < longest:
            break
        changes.append((f"learner.microbatch_tokens={tokens}", {"microbatch_tokens": tokens}))
    if learner.offload == "none":
        changes.append(("learner.offload=optimizer", {"offload": "optimizer"}))
    if learner.offload != "parameters":
        changes.append(("learner.offload=parameters", {"offload": "parameters"}))
    if learner.gradient_checkpointing and not learner.activation_offload:
        changes.append(("learner.activation_offload=true", {"activation_offload": True}))
    if "actor" in _roles_on_gpus(config):
        is_found = set()
        for text, change in changes:
            key = next(iter(change))
            if key not in is_found and _overflow(_with_learner(config, change)) is None:
                is_found.add(key)
                yield text
        yield from _wider(config)
    if config.model.lora.rank == 0:
        lora = config.model.lora.model_copy(update={"rank": 32})
        if (
            _overflow(config.model_copy(update={"model": config.model.model_copy(update={"lora": lora})}))
            is None
        ):
            yield "model.lora.rank=32"
    if config.rollout.backend == "sglang" and "servers" in _roles_on_gpus(config):
        yield from _smaller_servers(config)


def _cures_beside_checkpointing(config: Config) -> Iterator[str]:
    if not config.learner.gradient_checkpointing:
        for cure in _cures(_with_learner(config, {"gradient_checkpointing": True})):
            yield f"learner.gradient_checkpointing=true and {cure}"


def _wider(config: Config) -> Iterator[str]:
    """Yield the smallest number of ranks at which the learner fits; its pool must grow as well."""
    learner = config.learner
    for factor in (2, 4, 8, 16, 32, 64):
        size = learner.world_size * factor
        fsdp = learner.fsdp
        if fsdp.shard_size is not None:
            fsdp = fsdp.model_copy(update={"shard_size": fsdp.shard_size * factor})
        if _overflow(_with_learner(config, {"world_size": size, "fsdp": fsdp})) is None:
            where = (
                "" if learner.fsdp.shard_size is None else f" and learner.fsdp.shard_size={fsdp.shard_size}"
            )
            yield f"learner.world_size={size}{where} on as many GPUs"
            return


def _smaller_servers(config: Config) -> Iterator[str]:
    arguments = dict(config.rollout.sglang.args)
    tp = _size(arguments, "tp_size", "tp")
    for factor in (2, 4, 8):
        own = {**arguments, "tp_size": tp * factor}
        sglang = config.rollout.sglang.model_copy(update={"args": own})
        if (
            _overflow(
                config.model_copy(update={"rollout": config.rollout.model_copy(update={"sglang": sglang})})
            )
            is None
        ):
            yield f"rollout.sglang.args.tp_size={tp * factor}, and as many GPUs per server"
            return


def _with_learner(config: Config, change: Mapping[str, Any]) -> Config:
    return config.model_copy(update={"learner": config.learner.model_copy(update=dict(change))})


# ------------------------------------------------------------------------------------------------------- text

_NAMES: Mapping[Role, str] = {
    "actor": "a learner rank",
    "critic": "a critic rank",
    "reward_model": "a reward model's rank",
    "servers": "a server's GPU",
    "frozen_servers": "a frozen server's GPU",
}


def _server_lines(config: Config) -> Lines:
    server = server_memory(config)
    name = _NAMES["servers"]
    if server is None:
        return [(name, _unknown(config.model.path))]
    longest = config.data.max_prompt_tokens + config.agent.max_response_tokens
    rollout = config.rollout
    num_played = -(-rollout.num_actors * rollout.max_concurrent_trajectories // max(1, rollout.num_started))
    wanted = server.cache_per_token * longest * num_played
    text = (
        f"{_gb(server.weights)} weights + KV cache of {server.cache_per_token / 1e3:,.1f} kB per token; "
        f"{num_played:,} trajectories of {longest:,} tokens would fill {_gb(wanted)}"
    )
    gpu_bytes = _gpu_bytes(config)
    if gpu_bytes is not None:
        text += f", and there is room for {server.num_cached_tokens(gpu_bytes):,} tokens"
    return [(name, text)]


def _frozen_lines(config: Config) -> Lines:
    """Return a line for each frozen model: the memory of one GPU of its servers."""
    lines: Lines = []
    for plan in config.frozen_plans:
        server = _memory_of(plan.model, plan.rollout)
        text = (
            _unknown(plan.model.path)
            if server is None
            else f"{_gb(server.weights)} weights + KV cache of {server.cache_per_token / 1e3:,.1f} kB per "
            "token"
        )
        lines.append((_NAMES["frozen_servers"], f"{plan.key}: {text}"))
    return lines


def _of_gpu(use: _Use, config: Config) -> str:
    text = f"about {_gb(use.num_bytes)}"
    gpu_bytes = _gpu_bytes(config)
    return text if gpu_bytes is None else f"{text}, {use.num_bytes / gpu_bytes:.0%} of {_gb(gpu_bytes)}"


def _roles_on_gpus(config: Config) -> list[Role]:
    return [role for role in config.num_ranks if config.placement.device_of(role) == "cuda"]


def _gpu_bytes(config: Config) -> float | None:
    own = config.cluster.gpu_memory_gb
    return None if own is None else own * GB


def _model_path(config: Config, role: Role) -> str:
    if role == "reward_model":
        return config.reward_model.model.path
    return config.critic_model.path if role == "critic" else config.model.path


def _unknown(path: str) -> str:
    return f"not known: {path or 'the model'} is no local folder of a known architecture, and no known name"


def _size(arguments: Mapping[str, object], *names: str) -> int:
    value = next((arguments[name] for name in names if name in arguments), 1)
    return value if isinstance(value, int) else 1


def _sum(parts: Mapping[str, float]) -> str:
    return " + ".join(f"{size / GB:,.1f} {name}" for name, size in parts.items() if size >= GB / 20)


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / GB:,.1f} GB"
