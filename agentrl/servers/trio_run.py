"""Runs an async function under trio from a plain thread."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import trio
from trio.abc import Instrument

from agentrl.errors import AgentRLError

T = TypeVar("T")


def in_trio(function: Callable[..., Awaitable[T]], *args: Any, instruments: Sequence[Instrument] = ()) -> T:
    """Run `function(*args)` under trio and return its value.

    Exception groups of nurseries are unwrapped: a KeyboardInterrupt or AgentRLError inside is raised as
        itself.
    """
    try:
        return trio.run(function, *args, instruments=instruments)
    except BaseExceptionGroup as group:
        for kind in (KeyboardInterrupt, AgentRLError):
            found = _first_leaf(group, kind)
            if found is not None:
                raise found from group
        raise


def _first_leaf(group: BaseExceptionGroup[BaseException], kind: type[BaseException]) -> BaseException | None:
    matching: BaseException | None = group.subgroup(kind)
    while isinstance(matching, BaseExceptionGroup):
        matching = matching.exceptions[0]
    return matching
