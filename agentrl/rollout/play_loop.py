"""The event loop in which attempts are played, as seen from other threads."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace

import trio

from agentrl.rollout.loop_gaps import LoopGaps
from agentrl.rollout.scopes import LiveScopes, Scope, count_tasks, look, where_blocked


@dataclass(frozen=True, slots=True)
class PlayLoop:
    """A trio loop: its root task, its thread, and the thread of the asyncio plugins."""

    gaps: LoopGaps
    root: trio.lowlevel.Task
    thread: threading.Thread
    plugins: threading.Thread

    @classmethod
    def here(cls, gaps: LoopGaps, *, plugins: threading.Thread) -> PlayLoop:
        """Return the loop in which the calling task runs."""
        root = trio.lowlevel.current_root_task()
        assert root is not None, "this is called from a task"
        return cls(gaps, root, threading.current_thread(), plugins)

    def look(self, scopes: Scope, *, limit: int, places: Mapping[str, str]) -> LiveScopes:
        """Return the live scopes inside `scopes` (see `scopes.look`), all tasks, and where blocked loops are."""
        threads = [self.plugins, *([self.thread] if self.gaps.is_blocked else [])]
        blocked = tuple(where for thread in threads if (where := where_blocked(thread)) is not None)
        return replace(look(scopes, limit=limit, places=places), tasks=count_tasks(self.root), blocked=blocked)
