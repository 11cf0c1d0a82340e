"""What this room registers: datasets, benchmarks, models, chat templates."""

from agentrl.cli.command import EXTEND, SERVE, Command, CommandFamily
from agentrl.extras.datatools import command as data
from agentrl.extras.datatools import models_command as models

COMMANDS = (
    CommandFamily(
        "data",
        "Write datasets as Parquet in the schema that `agentrl train` reads, and inspect them.",
        EXTEND,
    ),
    Command("data arithmetic", data.data_arithmetic, "agentrl data arithmetic runs/quickstart/data"),
    *(
        Command(f"data {kind}", data.writer(kind), f"agentrl data {kind} data/{kind}", text=text)
        for kind, text in data.KINDS.items()
    ),
    Command(
        "data hf",
        data.data_hf,
        "agentrl data hf OWNER/NAME data/mine --prompt-column question --data-source math",
    ),
    Command("data preference", data.data_preference, "agentrl data preference data/pairs --in pairs.jsonl"),
    Command(
        "data filter",
        data.data_filter,
        "agentrl data filter train.parquet hard.parquet --difficulty-from runs/eval/mine --max-pass-rate 0.5",
    ),
    Command("data show", data.data_show, "agentrl data show runs/quickstart/data/train.parquet --rows 2"),
    Command("check-template", models.check_template, "agentrl check-template MODEL --tools", SERVE),
    CommandFamily("models", "Write models from GGUF files or packages as Hugging Face folders.", SERVE),
    Command("models import", models.models_import, "agentrl models import MODEL.gguf models/mine"),
    Command("models fetch", models.models_fetch, "agentrl models fetch smollm2 models/smollm2"),
)

REGISTERS = {
    "agentrl.benchmarks": {
        "aime_2024": "agentrl.extras.datatools.benchmarks:aime_2024",
        "aime_2025": "agentrl.extras.datatools.benchmarks:aime_2025",
        "gsm8k": "agentrl.extras.datatools.benchmarks:gsm8k",
        "math_500": "agentrl.extras.datatools.benchmarks:math_500",
    },
    "agentrl.commands": {
        "datatools": "agentrl.extras.datatools.plugin:COMMANDS",
    },
}
"""By group of entry points, as pyproject.toml lists it: name -> object."""
