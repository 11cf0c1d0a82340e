"""The event loop that attempts are played in, as somebody in another thread sees it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace

import trio

from agentrl.rollout.loop_gaps import LoopGaps
from agentrl.rollout.scopes import LiveScopes, Scope, count_tasks, look, where_blocked


@dataclass(frozen=True, slots=True)
class PlayLoop:
    """A trio loop: its tasks, the thread that it runs in, and that of asyncio plugins beside it."""

    gaps: LoopGaps
    root: trio.lowlevel.Task
    thread: threading.Thread
    plugins: threading.Thread

    @classmethod
    def here(cls, gaps: LoopGaps, *, plugins: threading.Thread) -> PlayLoop:
        """Return the one that the caller, a task, runs in."""
        root = trio.lowlevel.current_root_task()
        assert root is not None, "this is called from a task"
        return cls(gaps, root, threading.current_thread(), plugins)

    def look(self, scopes: Scope, *, limit: int, places: Mapping[str, str]) -> LiveScopes:
        """Return what goes on inside `scopes` (see `scopes.look`), with all tasks, and where loops stand that are blocked."""
        threads = [self.plugins, *([self.thread] if self.gaps.is_blocked else [])]
        blocked = tuple(where for thread in threads if (where := where_blocked(thread)) is not None)
        return replace(look(scopes, limit=limit, places=places), tasks=count_tasks(self.root), blocked=blocked)
