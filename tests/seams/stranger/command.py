"""`agentrl longest RUN`: the longest trajectory of a run's last step."""

from pathlib import Path

import typer

from agentrl.cli.command import Command
from agentrl.data.trajectories import decode, read_parquet


def longest(run: Path) -> None:
    """Print the number of tokens of the longest trajectory in the last step of RUN."""
    newest = max((run / "trajectories").glob("step_*.parquet"))
    typer.echo(max(trajectory.num_tokens for trajectory in decode(read_parquet(newest))))


COMMANDS = (Command("longest", longest, "agentrl longest runs/mine", "Stranger"),)
