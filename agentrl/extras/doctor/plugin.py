"""What this room registers: `agentrl doctor`."""

from agentrl.cli.command import PLAN, Command
from agentrl.extras.doctor.command import doctor

COMMANDS = (Command("doctor", doctor, "agentrl doctor configs/quickstart.yaml", PLAN),)

REGISTERS = {
    "agentrl.commands": {
        "doctor": "agentrl.extras.doctor.plugin:COMMANDS",
    },
}
"""By group of entry points, as pyproject.toml lists it: name -> object."""
