"""The command line: `main`, and what the commands of all rooms share."""

from __future__ import annotations


def main() -> None:
    """Run the command line. Exit code 2: user error; 1: infrastructure error; 130: Ctrl-C."""
    from agentrl.cli.app import run  # rooms import this package for `command` and `options`

    run()
