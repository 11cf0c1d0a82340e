"""What this room registers: what is asked of finished runs and evaluations."""

from agentrl.cli.command import EVALUATE, LOOK, Command
from agentrl.extras.research.compare_command import compare
from agentrl.extras.research.generate_command import generate
from agentrl.extras.research.run_commands import audit, replay
from agentrl.extras.research.score_command import score

COMMANDS = (
    Command("audit", audit, "agentrl audit runs/quickstart/run", LOOK),
    Command("replay", replay, "agentrl replay runs/quickstart/run --last-step 4", LOOK),
    Command(
        "generate",
        generate,
        "agentrl generate --model MODEL --in rows.parquet --out responses.parquet",
        EVALUATE,
    ),
    Command("compare", compare, "agentrl compare runs/eval/before runs/eval/after", EVALUATE),
    Command("score", score, "agentrl score responses.parquet --out scores.parquet", EVALUATE),
)

REGISTERS = {
    "agentrl.commands": {
        "research": "agentrl.extras.research.plugin:COMMANDS",
    },
    "agentrl.listeners": {
        "baselines": "agentrl.extras.research.baselines:baselines",
    },
}
"""By group of entry points, as pyproject.toml lists it: name -> object."""
