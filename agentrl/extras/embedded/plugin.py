"""What this room registers: `agentrl serve`."""

from agentrl.cli.command import SERVE, Command
from agentrl.extras.embedded.command import serve

COMMANDS = (Command("serve", serve, "agentrl serve MODEL --port 30000", SERVE),)
