"""What this room registers: pages and pictures of runs."""

from agentrl.cli.command import LOOK, Command
from agentrl.extras.view.command import view
from agentrl.extras.view.report_command import report

COMMANDS = (
    Command("report", report, "agentrl report runs/quickstart/run", LOOK),
    Command("view", view, "agentrl view runs/quickstart/run", LOOK),
)
