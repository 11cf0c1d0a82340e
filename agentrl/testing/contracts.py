"""Contracts that every plugin must meet: what a room registers as `contracts` of `agentrl.testing`."""

from __future__ import annotations

from typing import Any

from agentrl.registered import required
from agentrl.testing import GROUP


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    return getattr(required(GROUP, "contracts", by="agentrl.testing.contracts"), name)
