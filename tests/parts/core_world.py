"""The world of a run that needs no extra: sums, a reward and a partner of the tests, servers of the tests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from parts.played_server import played_sglang
from parts.run_world import World, write_tiny_model

SOURCE = "sums"
PLUGINS = Path(__file__).with_name("rewards.py")
AGENTS = ("tool_agent", "single_turn_agent", "interaction_agent")


def write_core_world(folder: Path) -> World:
    """Write a tiny policy, rows of the three agents, and a config."""
    write_tiny_model(folder / "model")
    write_sums(folder / "data/train.jsonl", 240)
    write_sums(folder / "data/val.jsonl", 9)
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(core_config(folder)))
    return World(folder, config)


def core_config(folder: Path) -> dict[str, Any]:
    return {
        "data": {"train_files": [str(folder / "data/train.jsonl")], "max_prompt_tokens": 256},
        "model": {"path": str(folder / "model")},
        "agent": {
            "plugins": [str(PLUGINS)],
            "tools": ["calculator"],
            "max_turns": 2,
            "max_response_tokens": 64,
            "max_turn_tokens": 16,
        },
        "reward": {"sources": {SOURCE: "evenness"}},
        "rollout": {"group_size": 2, "max_concurrent_trajectories": 32, **played_sglang()},
        "buffer": {"groups_per_step": 4, "stall_timeout_s": 120},
        "learner": {"microbatch_tokens": 512, "optimizer": {"lr": 1.0e-3}},
        "tracking": {"report": False},
    }


def write_sums(path: Path, num_rows: int, *, agents: Sequence[str] = AGENTS) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in sums(num_rows, agents)))


def sums(num_rows: int, agents: Sequence[str] = AGENTS) -> Iterator[dict[str, Any]]:
    """Yield rows of verl's schema; their agents alternate."""
    for index in range(num_rows):
        agent = agents[index % len(agents)]
        truth, question = str(7 * index + 11), f"What is {7 * index}+11?"
        partner = {"name": "tutor", "ground_truth": truth} if agent == "interaction_agent" else None
        yield {
            "data_source": SOURCE,
            "prompt": [{"role": "user", "content": question}],
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"index": index, "interaction_kwargs": partner},
            "agent_name": agent,
        }
