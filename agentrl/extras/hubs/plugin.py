"""What this room registers: worlds of others."""

from agentrl.cli.command import Command
from agentrl.extras.hubs import command as hubs

COMMANDS = (
    Command(
        "data reasoning_gym",
        hubs.data_reasoning_gym,
        "agentrl data reasoning_gym data/sums --generators chain_sum,gcd",
    ),
    Command("data gymnasium", hubs.data_gymnasium, "agentrl data gymnasium data/lake --games FrozenLake-v1"),
    Command("data harbor", hubs.data_harbor, "agentrl data harbor tasks data/tasks.jsonl"),
    Command(
        "data openenv",
        hubs.data_openenv,
        "agentrl data openenv data/ladder --server ladder=http://127.0.0.1:8000",
    ),
    Command(
        "data verifiers",
        hubs.data_verifiers,
        "agentrl data verifiers data/echo --environment echo_v1 --python verifiers/bin/python",
    ),
    Command(
        "data textarena",
        hubs.data_textarena,
        "agentrl data textarena data/nim --games Nim-v0 --python textarena/bin/python",
    ),
    Command(
        "data tau2",
        hubs.data_tau2,
        "agentrl data tau2 data/desk --tasks tasks.json --environment desk --policy @policy.md --plugin "
        "desk.py",
    ),
)

REGISTERS = {
    "agentrl.agents": {
        "textarena": "agentrl.extras.hubs.textarena:TextArenaAgent",
        "verifiers": "agentrl.extras.hubs.verifiers:VerifiersAgent",
    },
    "agentrl.commands": {
        "hubs": "agentrl.extras.hubs.plugin:COMMANDS",
    },
    "agentrl.environments": {
        "gymnasium": "agentrl.extras.hubs.gymnasium_game:GymnasiumGame",
        "openenv": "agentrl.extras.hubs.openenv:OpenEnv",
        "textarena": "agentrl.extras.hubs.textarena:TextArenaGame",
        "verifiers": "agentrl.extras.hubs.verifiers:VerifiersEnvironment",
    },
    "agentrl.interactions": {
        "openenv": "agentrl.extras.hubs.openenv:OpenEnvPartner",
    },
    "agentrl.rewards": {
        "gymnasium": "agentrl.extras.hubs.gymnasium_game:GameReward",
        "openenv": "agentrl.extras.hubs.openenv:OpenEnvReward",
        "reasoning_gym": "agentrl.extras.hubs.reasoning_gym:ReasoningGym",
        "tau2": "agentrl.extras.hubs.tau2:Tau2Reward",
        "textarena": "agentrl.extras.hubs.textarena:TextArenaReward",
        "verifiers": "agentrl.extras.hubs.verifiers:VerifiersReward",
        "verifiers_group": "agentrl.extras.hubs.verifiers:VerifiersGroupReward",
    },
}
"""By group of entry points, as pyproject.toml lists it: name -> object."""
