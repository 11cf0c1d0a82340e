"""What this room registers: the import of configs."""

from agentrl.cli.command import Command
from agentrl.extras.verl.command import config_import

COMMANDS = (Command("config import", config_import, "agentrl config import ppo_trainer.yaml --out run.yaml"),)
