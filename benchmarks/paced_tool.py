"""A tool that only sleeps, for the seconds that the paced server (paced_server.py) writes into its calls."""

from __future__ import annotations

import asyncio

from agentrl.plugins import tool


@tool
async def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return "done"
