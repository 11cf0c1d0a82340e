"""Simulated runs: published set-ups beside their published speed-ups, and what binds at which scale.

    python benchmarks/simulation.py --out docs/results/simulation.json --pictures docs/results

Each set-up is a config in benchmarks/simulated/, whose first lines say what is published, fitted and assumed.
It is simulated as it is, and synchronously on as many GPUs, which servers and learner share in turn. Large
ones are simulated with fewer groups on fewer servers (agentrl/extras/plan/scaled.py), except the one of
--in-flight: 64 rollout actors keep so many attempts in flight, each of which is simulated.
"""

from __future__ import annotations

import argparse
import logging
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import write_result

from agentrl.config.compose import load_config
from agentrl.config.schema import Config
from agentrl.extras.plan.estimate import estimate_of
from agentrl.extras.plan.measure import Simulated
from agentrl.extras.plan.picture import draw
from agentrl.extras.plan.report import binding, sweep_table
from agentrl.extras.plan.scaled import scaled, whole
from agentrl.extras.plan.simulate import simulate

FOLDER = Path(__file__).with_name("simulated")
IN_TURN = ("buffer.max_staleness=0", "rollout.colocated=true")


@dataclass(frozen=True)
class Setup:
    """A set-up.

    name: of its config. synchronous: overrides of its synchronous run.
    step_s: published seconds per step, asynchronous and synchronous; None: not published.
    speed_up: published; None: none is.
    """

    name: str
    synchronous: tuple[str, ...]
    step_s: tuple[float, float] | None
    speed_up: float | None
    source: str


HOUR_S = 3600 / 1000
"""Seconds per step of a run of 1,000 steps, per hour."""
SETUPS = (
    Setup(
        "verl",
        (
            *IN_TURN,
            "rollout.num_servers=128",
            "learner.world_size=128",
            "algorithm.mode=decoupled",
            "learner.minibatches_per_step=16",
            "simulation.learner.mfu=0.37",
        ),
        (150.63, 356.30),
        356.30 / 150.63,
        "verl, Recipe: Fully Async Policy Trainer, table of the 7B model, 128 H20: colocate sync and 64:64",
    ),
    Setup(
        "areal",
        (*IN_TURN, "rollout.num_servers=96", "learner.world_size=192"),
        (25.4 * HOUR_S, 57.7 * HOUR_S),
        57.7 / 25.4,
        "AReaL v0.3, table 2 (end-to-end comparison), 7B on 24 nodes, 1,000 steps",
    ),
    Setup(
        "roll_flash",
        (*IN_TURN, "rollout.num_servers=64", "learner.world_size=64"),
        None,
        2.24,
        "ROLL Flash (arXiv 2510.11345), abstract: up to 2.24 on RLVR with the same GPUs; no step times found",
    ),
    Setup(
        "prime_rl",
        (*IN_TURN, "rollout.num_servers=16", "learner.world_size=128"),
        None,
        None,
        "prime-rl, config of INTELLECT-3.1 on 16 nodes; asynchronous only, no speed-up is published",
    ),
    Setup(
        "sync_vs_async",
        ("buffer.max_staleness=0",),
        (14.351, 44.134),
        3.10,
        "this project, docs/results/sync_vs_async.json (measured)",
    ),
)

AGENTS: Mapping[str, Any] = {
    "model": {"path": "qwen3-8b", "dtype": "bfloat16"},
    "agent": {"max_response_tokens": 15360, "tool_timeout_s": 60.0, "trajectory_timeout_s": 7200.0},
    "buffer": {"groups_per_step": 128, "max_staleness": 2},
    "rollout": {"backend": "sglang", "group_size": 8, "weights": {"transport": "distributed"}},
    "simulation": {
        "turns": {"kind": "uniform", "mean": 3},
        "turn_tokens": {"kind": "lognormal", "mean": 1000, "sigma": 1.0},
        "tool_tokens": {"kind": "lognormal", "mean": 300, "sigma": 1.0},
        "tool_s": {"kind": "exponential", "mean": 4.0},
    },
}
"""A run of agents that is simulated at several sizes: Qwen3-8B on H100, 1,024 attempts per step."""


def agents(ranks: int, servers: int, **changes: Mapping[str, Any]) -> Config:
    """Return the config of the agents' run on so many GPUs. changes: by section."""
    staleness = changes.get("buffer", {}).get("max_staleness", 2)
    sections = {name: {**section, **changes.get(name, {})} for name, section in AGENTS.items()}
    sections["learner"] = {"world_size": ranks}
    sections["rollout"] |= {"num_servers": servers, "num_actors": staleness + 1}
    sections["rollout"] |= {"max_concurrent_trajectories": 1024}
    return Config.model_validate(sections)


SCALE: Mapping[str, tuple[str, str, Mapping[str, Config]]] = {
    "gpus": (
        "GPUs",
        "8, 64 and 512 GPUs, half of them serve; 1,024 attempts per step",
        {str(num): agents(num // 2, num // 2) for num in (8, 64, 512)},
    ),
    "servers_per_rank": (
        "ranks of 64 GPUs",
        "64 GPUs divided between learner ranks and servers",
        {str(ranks): agents(ranks, 64 - ranks) for ranks in (8, 16, 24, 32, 48)},
    ),
    "max_staleness": (
        "max_staleness",
        "64 GPUs, half of them serve: what the bound on staleness buys",
        {str(bound): agents(32, 32, buffer={"max_staleness": bound}) for bound in (0, 1, 2, 4)},
    ),
    "tool_hang": (
        "hanging tools, deadline",
        "64 GPUs: 5 % of the tool calls hang until their deadline",
        {
            "none": agents(32, 32),
            **{
                f"5 %, {seconds} s": agents(
                    32,
                    32,
                    agent={"tool_timeout_s": float(seconds)},
                    simulation={"tool_hang": 0.05},
                )
                for seconds in (10, 300)
            },
        },
    ),
}
"""Questions about scale: label, title, and configs by value."""


def run(config: Config, steps: int) -> tuple[Simulated, float, float]:
    """Return what the run comes to, how many times smaller its simulation is, and its CPU seconds."""
    own = config.simulation.model_copy(update={"steps": steps})
    smaller, factor = scaled(config.model_copy(update={"simulation": own}))
    started = time.process_time()
    return whole(simulate(smaller), factor), factor, time.process_time() - started


def figures(config: Config, found: tuple[Simulated, float, float]) -> dict[str, Any]:
    """Return what is kept of a simulation."""
    simulated, factor, cpu_s = found
    return {
        "step_s": round(simulated.step_s, 2),
        "phases": {name: round(seconds, 2) for name, seconds in simulated.phases.items()},
        "servers": {name: round(share, 3) for name, share in simulated.servers.items()},
        "learner_waits": round(simulated.learner_idle_share, 3),
        "lease_waits": round(simulated.leasing_share, 3),
        "lags": {str(lag): round(share, 3) for lag, share in simulated.lags.items()},
        "mean_tokens": round(simulated.mean_tokens),
        "sampled_tokens_per_s": round(simulated.tokens_per_s),
        "binds": binding(config, simulated, estimate_of(config))[0],
        "factor": round(factor, 2),
        "cpu_s": round(cpu_s, 1),
    }


def published(setup: Setup, steps: int) -> dict[str, Any]:
    """Simulate a set-up, asynchronous and synchronous."""
    own: dict[str, Any] = {"name": setup.name, "source": setup.source}
    for kind, overrides in (("asynchronous", ()), ("synchronous", setup.synchronous)):
        config = load_config(str(FOLDER / f"{setup.name}.yaml"), overrides)
        own[kind] = figures(config, run(config, steps))
    own["speed_up"] = round(own["synchronous"]["step_s"] / own["asynchronous"]["step_s"], 2)
    own["published_step_s"] = setup.step_s
    own["published_speed_up"] = None if setup.speed_up is None else round(setup.speed_up, 2)
    said = "none" if setup.speed_up is None else f"{setup.speed_up:.2f}"
    print(
        f"{setup.name:<14} {own['synchronous']['step_s']:7.1f} s -> {own['asynchronous']['step_s']:6.1f} s  "
        f"speed-up {own['speed_up']:.2f}, published {said}",
        flush=True,
    )
    return own


def scale(name: str, steps: int, pictures: Path | None) -> dict[str, Any]:
    """Simulate one question about scale, and draw it."""
    label, title, configs = SCALE[name]
    found = {value: run(config, steps) for value, config in configs.items()}
    simulated = {value: own[0] for value, own in found.items()}
    print("\n".join(sweep_table(label, simulated)), flush=True)
    if pictures is not None:
        draw(simulated, pictures / f"simulated_{name}.png", title=title, label=label)
    return {value: figures(configs[value], own) for value, own in found.items()}


def full_size(in_flight: int) -> dict[str, Any]:
    """Simulate 64 actors with so many attempts in flight in all, one of 6 batches each, in full size."""
    actors, staleness = 64, 6
    own = agents(
        448,
        64,
        buffer={"groups_per_step": -(-in_flight // (8 * staleness)), "max_staleness": staleness},
        simulation={**AGENTS["simulation"], "warmup": 1, "steps": 1},
    )
    seats = {"num_actors": actors, "max_concurrent_trajectories": -(-in_flight // actors)}
    config = own.model_copy(update={"rollout": own.rollout.model_copy(update=seats)})
    started = time.process_time()
    simulated = simulate(config)
    found = figures(config, (simulated, 1.0, time.process_time() - started))
    found["most_in_flight"] = simulated.most_in_flight
    found["peak_rss_gb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2)
    print(f"{found['most_in_flight']:,} attempts in flight: {found['cpu_s']:,.0f} CPU s", flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setups", default=",".join(setup.name for setup in SETUPS), help="names, or none")
    parser.add_argument("--scale", default=",".join(SCALE), help="questions about scale, or none")
    parser.add_argument("--steps", type=int, default=6, help="measured steps of each simulation")
    parser.add_argument("--in-flight", type=int, default=50_000, help="attempts of the full-size one, or 0")
    parser.add_argument("--pictures", type=Path, help="folder for pictures of the questions about scale")
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    args = parser.parse_args(arguments)
    logging.getLogger("agentrl").setLevel(logging.ERROR)  # servers that pause do not answer
    setups = [published(setup, args.steps) for setup in SETUPS if setup.name in args.setups.split(",")]
    questions = {
        name: scale(name, args.steps, args.pictures) for name in SCALE if name in args.scale.split(",")
    }
    full = full_size(args.in_flight) if args.in_flight else None
    write_result(args.out, {"setups": setups, "scale": questions, "full_size": full})


if __name__ == "__main__":
    main()
