"""What this room registers: planning, simulation, forecasts."""

from agentrl.cli.command import PLAN, Command
from agentrl.extras.plan.command import plan
from agentrl.extras.plan.explain_command import config_explain
from agentrl.extras.plan.simulation_command import simulate

COMMANDS = (
    Command(
        "config explain",
        config_explain,
        "agentrl config explain configs/quickstart.yaml buffer.max_staleness=0",
    ),
    Command("plan", plan, "agentrl plan qwen3-8b --gpus 64 --gpu h100 --context 32768 --out plan.yaml", PLAN),
    Command("simulate", simulate, "agentrl simulate run.yaml --sweep max_staleness=0,1,2,4", PLAN),
)

REGISTERS = {
    "agentrl.commands": {
        "plan": "agentrl.extras.plan.plugin:COMMANDS",
    },
    "agentrl.forecasts": {
        "memory": "agentrl.extras.plan.forecast:memory",
    },
}
"""By group of entry points, as pyproject.toml lists it: name -> object."""
