"""What this room registers: commands on uploaded runs."""

from agentrl.cli.command import LOOK, Command
from agentrl.extras.storage.command import disk, fetch

COMMANDS = (
    Command("fetch", fetch, "agentrl fetch s3://bucket/runs/first runs/first", LOOK),
    Command("disk", disk, "agentrl disk runs/quickstart/run", LOOK),
)
