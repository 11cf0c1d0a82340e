"""What this room registers: what reads files written for verl."""

from agentrl.cli.command import Command
from agentrl.extras.verl.command import config_import

COMMANDS = (Command("config import", config_import, "agentrl config import ppo_trainer.yaml --out run.yaml"),)

REGISTERS = {
    "agentrl.commands": {
        "verl": "agentrl.extras.verl.plugin:COMMANDS",
    },
    "agentrl.foreign_keys": {
        "verl": "agentrl.extras.verl.keys:answer",
    },
    "agentrl.plugin_sources": {
        "verl_function_tools": "agentrl.extras.verl.tools:verl_function_tools",
        "verl_interaction_config": "agentrl.extras.verl.interactions:verl_interactions",
        "verl_tool_config": "agentrl.extras.verl.tools:verl_tools",
    },
}
"""By group of entry points, as pyproject.toml lists it: name -> object."""
