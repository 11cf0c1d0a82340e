"""A tool that only takes time: the paced server (paced_server.py) says in its calls how much."""

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
