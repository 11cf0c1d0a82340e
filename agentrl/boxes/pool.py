"""How many boxes one process of a run has at a time."""

from __future__ import annotations

from dataclasses import dataclass

import trio

from agentrl.boxes.box import BoxMaker, OpenBox, Start


@dataclass(slots=True)
class BoxCounts:
    """What a pool did so far. box_s: seconds that boxes existed, summed over those that were closed."""

    num_started: int = 0
    num_failed: int = 0
    most_open: int = 0
    box_s: float = 0.0


class BoxPool:
    """Opens at most `max_boxes` boxes at a time. Others wait, first come, first served."""

    def __init__(self, maker: BoxMaker, *, max_boxes: int) -> None:
        self.maker = maker
        self.counts = BoxCounts()
        self._slots = trio.CapacityLimiter(max_boxes)
        self._opened: dict[OpenBox, tuple[object, float]] = {}

    async def open(self, start: Start) -> OpenBox:
        """Wait for a free slot and start a box. Whoever calls this calls `close`.

        Raises:
            SandboxError, DataError, BoxRefused: as `BoxMaker.start`.
        """
        slot = object()
        await self._slots.acquire_on_behalf_of(slot)
        try:
            box = await self.maker.start(start)
        except BaseException:
            self.counts.num_failed += 1
            self._slots.release_on_behalf_of(slot)
            raise
        self._opened[box] = (slot, trio.current_time())
        self.counts.num_started += 1
        self.counts.most_open = max(self.counts.most_open, len(self._opened))
        return box

    async def replace(self, box: OpenBox, start: Start) -> OpenBox:
        """Stop a box and start another one in its slot, so that it does not wait behind other attempts.

        Raises:
            SandboxError, DataError, BoxRefused: as `BoxMaker.start`. The slot is free then.
        """
        slot, since = self._opened.pop(box)
        try:
            await box.stop()
            other = await self.maker.start(start)
        except BaseException:
            self.counts.num_failed += 1
            self._slots.release_on_behalf_of(slot)
            raise
        self._opened[other] = (slot, since)
        self.counts.num_started += 1
        return other

    async def close(self, box: OpenBox) -> None:
        """Stop a box and free its slot, also if stopping fails. Safe to call again."""
        slot, since = self._opened.pop(box, (None, 0.0))
        if slot is None:
            return
        try:
            await box.stop()
        finally:
            self.counts.box_s += trio.current_time() - since
            self._slots.release_on_behalf_of(slot)
