"""What the attempts of one event loop share: processes, and slots."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

_SHARED: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Hashable, Any]] = WeakKeyDictionary()


def shared(key: Hashable, make: Callable[[], T]) -> T:
    """Return the running event loop's one object for a key; the first caller makes it."""
    objects = _SHARED.setdefault(asyncio.get_running_loop(), {})
    if key not in objects:
        objects[key] = make()
    return objects[key]
