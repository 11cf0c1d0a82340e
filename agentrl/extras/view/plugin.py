"""What this room registers: pages and pictures of runs."""

from agentrl.cli.command import LOOK, Command
from agentrl.extras.view.command import view
from agentrl.extras.view.report_command import report

COMMANDS = (
    Command("report", report, "agentrl report runs/quickstart/run", LOOK),
    Command("view", view, "agentrl view runs/quickstart/run", LOOK),
)

REGISTERS = {
    "agentrl.commands": {
        "view": "agentrl.extras.view.plugin:COMMANDS",
    },
    "agentrl.evaluation_reports": {
        "picture": "agentrl.extras.view.evaluation_picture:draw_picture",
    },
    "agentrl.listeners": {
        "report": "agentrl.extras.view.report_listener:ReportListener",
    },
}
"""By group of entry points, as pyproject.toml lists it: name -> object."""
