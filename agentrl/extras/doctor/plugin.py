"""What this room registers: `agentrl doctor`."""

from agentrl.cli.command import PLAN, Command
from agentrl.extras.doctor.command import doctor

COMMANDS = (Command("doctor", doctor, "agentrl doctor configs/quickstart.yaml", PLAN),)
