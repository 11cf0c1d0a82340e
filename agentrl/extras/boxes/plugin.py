"""What this room registers: `agentrl boxes`."""

from agentrl.cli.command import LOOK, Command
from agentrl.extras.boxes.command import boxes

COMMANDS = (Command("boxes", boxes, "agentrl boxes --remove", LOOK),)
