"""What this room registers: `agentrl export`."""

from agentrl.cli.command import CORE, Command
from agentrl.extras.export.command import export

COMMANDS = (
    Command(
        "export", export, "agentrl export runs/quickstart/run/checkpoints/step_000020 runs/exported", CORE
    ),
)

REGISTERS = {
    "agentrl.commands": {
        "export": "agentrl.extras.export.plugin:COMMANDS",
    },
}
"""By group of entry points, as pyproject.toml lists it: name -> object."""
