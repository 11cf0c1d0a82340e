"""Sweeps and what-ifs: the same simulation with other values of some keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from agentrl.config.keys import iter_sections
from agentrl.config.schema import Config
from agentrl.errors import ConfigError


def full_key(name: str) -> str:
    """Return the key of a config that `name` abbreviates: its last word, if only one section has it.

    Raises:
        ConfigError: no section has it, or several have.
    """
    if "." in name:
        return name
    keys = [
        ".".join((*section, field))
        for section, model in iter_sections(Config)
        for field in model.model_fields
        if field == name
    ]
    if len(keys) == 1:
        return keys[0]
    if not keys:
        raise ConfigError(f"{name}: no key of the config has this name; docs/config.md lists all")
    raise ConfigError(f"{name} is ambiguous; use one of {', '.join(keys)}")


def parse_sweep(text: str) -> tuple[str, list[str]]:
    """Return the key and the values of `KEY=V1,V2,...`.

    Raises:
        ConfigError: it has another form, or a value twice.
    """
    name, _, values = text.partition("=")
    found = [value for value in values.split(",") if value]
    if not name or not found:
        raise ConfigError(f"--sweep {text}: use KEY=V1,V2,..., such as max_staleness=0,1,2,4")
    if twice := [value for value in dict.fromkeys(found) if found.count(value) > 1]:
        raise ConfigError(f"--sweep {text}: {', '.join(twice)} is given twice; leave out one")
    return full_key(name), found


def what_ifs(config: Config) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield changes that relieve one component each: a name, and overrides."""
    rollout, buffer = config.rollout, config.buffer
    servers = max(1, rollout.num_started)
    yield "as it is", ()
    yield "half as many servers again", [f"rollout.num_servers={servers + max(1, servers // 2)}"]
    more_ranks = config.simulation.learner.mfu * 1.5
    if config.simulation.learner.tokens_per_s is not None:
        yield (
            "a learner 1.5 times as fast",
            [f"simulation.learner.tokens_per_s={1.5 * config.simulation.learner.tokens_per_s}"],
        )
    elif more_ranks <= 1:
        yield "a learner 1.5 times as fast", [f"simulation.learner.mfu={more_ranks:g}"]
    yield (
        f"buffer.max_staleness={buffer.max_staleness + 2}",
        [f"buffer.max_staleness={buffer.max_staleness + 2}"],
    )
    yield (
        "twice the attempts in flight",
        [f"rollout.max_concurrent_trajectories={2 * rollout.max_concurrent_trajectories}"],
    )
    yield (
        "publishes in no time",
        ["simulation.publish_s=0", "simulation.network_gb_s=1e6", "simulation.disk_gb_s=1e6"],
    )
    yield "tools in no time", ["simulation.tool_s={kind: fixed, mean: 0}", "simulation.tool_hang=0"]
