"""What this room registers: `agentrl new` and `play`."""

from agentrl.cli.command import PLAN, Command
from agentrl.extras.testing.command import new, play

COMMANDS = (
    Command("new", new, "agentrl new tool word_count --out my_plugins", PLAN),
    Command("play", play, "agentrl play configs/quickstart.yaml --row 0", PLAN),
)
