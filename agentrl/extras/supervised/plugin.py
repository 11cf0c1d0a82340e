"""What this room registers: `agentrl sft` and `agentrl rm`, and the schemas of their configs."""

from agentrl.cli.command import CORE, Command
from agentrl.extras.supervised.command import rm, sft

COMMANDS = (
    Command("sft", sft, "agentrl sft configs/quickstart_sft.yaml", CORE),
    Command("rm", rm, "agentrl rm rm.yaml model.path=MODEL data.train_files=[pairs.parquet]", CORE),
)

REGISTERS = {
    "agentrl.commands": {
        "supervised": "agentrl.extras.supervised.plugin:COMMANDS",
    },
    "agentrl.configs": {
        "rm": "agentrl.extras.supervised.config:RMConfig",
        "sft": "agentrl.extras.supervised.config:SFTConfig",
    },
}
"""By group of entry points, as pyproject.toml lists it: name -> object."""
