"""What this room registers: object storage."""

from agentrl.cli.command import LOOK, Command
from agentrl.extras.storage.command import disk, fetch

COMMANDS = (
    Command("fetch", fetch, "agentrl fetch s3://bucket/runs/first runs/first", LOOK),
    Command("disk", disk, "agentrl disk runs/quickstart/run", LOOK),
)

REGISTERS = {
    "agentrl.commands": {
        "storage": "agentrl.extras.storage.plugin:COMMANDS",
    },
    "agentrl.storage": {
        "objects": "agentrl.extras.storage.objects",
    },
    "agentrl.listeners": {
        "upload": "agentrl.extras.storage.upload_listener:upload",
    },
}
"""By group of entry points, as pyproject.toml lists it: name -> object."""
