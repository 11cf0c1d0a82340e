"""What this room registers: the embedded server."""

from agentrl.cli.command import SERVE, Command
from agentrl.extras.embedded.command import serve

COMMANDS = (Command("serve", serve, "agentrl serve MODEL --port 30000", SERVE),)

REGISTERS = {
    "agentrl.commands": {
        "embedded": "agentrl.extras.embedded.plugin:COMMANDS",
    },
    "agentrl.servers": {
        "embedded": "agentrl.extras.embedded.launch:EmbeddedServer",
    },
}
"""By group of entry points, as pyproject.toml lists it: name -> object."""
