"""What this room registers: boxes and their environments."""

from agentrl.cli.command import LOOK, Command
from agentrl.extras.boxes.command import boxes

COMMANDS = (Command("boxes", boxes, "agentrl boxes --remove", LOOK),)

REGISTERS = {
    "agentrl.closing_notes": {
        "boxes": "agentrl.extras.boxes.closing:box_lines",
    },
    "agentrl.commands": {
        "boxes": "agentrl.extras.boxes.plugin:COMMANDS",
    },
    "agentrl.counters": {
        "boxes": "agentrl.extras.boxes.pool:box_counters",
    },
    "agentrl.environments": {
        "repository": "agentrl.extras.boxes.repository:Repository",
        "terminal": "agentrl.extras.boxes.terminal:Terminal",
        "workspace": "agentrl.extras.boxes.workspace:Workspace",
    },
}
"""By group of entry points, as pyproject.toml lists it: name -> object."""
