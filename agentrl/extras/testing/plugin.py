"""What this room registers: writing, listing and testing plugins."""

from agentrl.cli.command import PLAN, Command
from agentrl.extras.testing.command import new, play
from agentrl.extras.testing.plugins_command import plugins

COMMANDS = (
    Command("plugins", plugins, "agentrl plugins configs/quickstart.yaml", PLAN),
    Command("new", new, "agentrl new tool word_count --out my_plugins", PLAN),
    Command("play", play, "agentrl play configs/quickstart.yaml --row 0", PLAN),
)

REGISTERS = {
    "agentrl.commands": {
        "testing": "agentrl.extras.testing.plugin:COMMANDS",
    },
    "agentrl.testing": {
        "contracts": "agentrl.extras.testing.contracts",
        "play": "agentrl.extras.testing",
    },
    "pytest11": {
        "agentrl": "agentrl.extras.testing.fixtures",
    },
}
"""By group of entry points, as pyproject.toml lists it: name -> object."""
