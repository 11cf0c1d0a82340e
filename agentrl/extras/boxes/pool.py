"""How many boxes one process of a run has at a time, and boxes that are started before they are needed."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, fields

import trio

from agentrl.errors import AgentRLError
from agentrl.extras.boxes.box import BoxMaker, BoxRefused, OpenBox, Start

log = logging.getLogger(__name__)

HEALTH_S = 10.0
"""Seconds that a warm box has to run `true` before it is used."""
PAUSE_S = 5.0
"""Pause after a warm box could not be started."""


@dataclass(slots=True)
class BoxCounts:
    """What a pool did so far.

    num_started: boxes that were given out. num_warm: those that were started before. num_failed: starts that
    failed. num_unhealthy: warm boxes that did not answer any more. num_open: boxes in use now.
    box_s: seconds of use, summed over the boxes that were closed.
    """

    num_started: int = 0
    num_warm: int = 0
    num_failed: int = 0
    num_unhealthy: int = 0
    num_open: int = 0
    box_s: float = 0.0


_counts: list[BoxCounts] = []
"""Of all pools of this process."""


def box_counters() -> dict[str, float]:
    """Return the sums over all pools of this process, as `boxes_<name>`; {} if there is no pool."""
    if not _counts:
        return {}
    names = [field.name for field in fields(BoxCounts)]
    return {
        f"boxes_{name.removeprefix('num_')}": float(sum(getattr(counts, name) for counts in _counts))
        for name in names
    }


class BoxPool:
    """Opens at most `max_boxes` boxes at a time. Others wait, first come, first served.

    num_warm: empty boxes that are kept ready besides. max_warm_s: a box that waited longer is not used.
    """

    def __init__(
        self, maker: BoxMaker, *, max_boxes: int, num_warm: int = 0, max_warm_s: float = 900.0
    ) -> None:
        self.maker = maker
        self.counts = BoxCounts()
        _counts.append(self.counts)
        self._slots = trio.CapacityLimiter(max_boxes)
        self._opened: dict[OpenBox, tuple[object, float]] = {}
        self._num_warm = num_warm
        self._max_warm_s = max_warm_s
        self._warm: WarmBoxes | None = None

    async def open(self, start: Start) -> OpenBox:
        """Wait for a free slot and start a box. Whoever calls this calls `close`.

        Raises:
            SandboxError, DataError, BoxRefused: as `BoxMaker.start`.
        """
        slot = object()
        await self._slots.acquire_on_behalf_of(slot)
        return await self._start(start, slot, trio.current_time())

    async def replace(self, box: OpenBox, start: Start) -> OpenBox:
        """Stop a box and start another one in its slot, so that it does not wait behind other attempts.

        Raises:
            SandboxError, DataError, BoxRefused: as `BoxMaker.start`. The slot is free then.
        """
        slot, since = self._opened.pop(box)
        self.counts.num_open -= 1
        try:
            await box.stop()
        except BaseException:
            self._slots.release_on_behalf_of(slot)
            raise
        return await self._start(start, slot, since)

    async def close(self, box: OpenBox) -> None:
        """Stop a box and free its slot, also if stopping fails. Safe to call again."""
        slot, since = self._opened.pop(box, (None, 0.0))
        if slot is None:
            return
        try:
            await box.stop()
        finally:
            self.counts.num_open -= 1
            self.counts.box_s += trio.current_time() - since
            self._slots.release_on_behalf_of(slot)

    async def _start(self, start: Start, slot: object, since: float) -> OpenBox:
        try:
            box = await self._warm_or_fresh(start)
        except BaseException:
            self.counts.num_failed += 1
            self._slots.release_on_behalf_of(slot)
            raise
        self._opened[box] = (slot, since)
        self.counts.num_started += 1
        self.counts.num_open += 1
        return box

    async def _warm_or_fresh(self, start: Start) -> OpenBox:
        while start.image is None and (box := self._take_warm()) is not None:
            try:
                with trio.fail_after(HEALTH_S):
                    await box.run(["true"], timeout_s=HEALTH_S, max_output_bytes=2)
            except (BoxRefused, AgentRLError, trio.TooSlowError):
                self.counts.num_unhealthy += 1
                await stopped(box)
                continue
            except BaseException:
                await stopped(box)
                raise
            try:
                await box.fill(start)
            except BaseException:
                await stopped(box)
                raise
            self.counts.num_warm += 1
            return box
        return await self.maker.start(start)

    def _take_warm(self) -> OpenBox | None:
        if self._num_warm == 0:
            return None
        token = trio.lowlevel.current_trio_token()
        if self._warm is None or self._warm.token is not token:  # the first box in this trio run
            self._warm = WarmBoxes(self.maker, self._num_warm, self._max_warm_s)
            trio.lowlevel.spawn_system_task(self._warm.keep)
        return self._warm.take()


class WarmBoxes:
    """Boxes that are started in the background. Their owner is the trio run: `keep` is one of its system
    tasks, which stops them when the run ends.
    """

    def __init__(self, maker: BoxMaker, number: int, max_age_s: float) -> None:
        self.token = trio.lowlevel.current_trio_token()
        self._maker = maker
        self._number = number
        self._max_age_s = max_age_s
        self._ready: deque[tuple[OpenBox, float]] = deque()
        self._old: list[OpenBox] = []
        self._wanted = trio.Event()

    def take(self) -> OpenBox | None:
        """Return the box that waited longest; None if none is ready."""
        self._wanted.set()
        while self._ready:
            box, since = self._ready.popleft()
            if trio.current_time() - since <= self._max_age_s:
                return box
            self._old.append(box)
        return None

    async def keep(self) -> None:
        """Start boxes while fewer than `number` are ready. Unblocked by `take`."""
        try:
            while True:
                while self._old:
                    await stopped(self._old.pop())
                if len(self._ready) >= self._number:
                    self._wanted = trio.Event()
                    await self._wanted.wait()
                    continue
                try:
                    self._ready.append((await self._maker.start(Start()), trio.current_time()))
                except (BoxRefused, AgentRLError) as error:  # an attempt that needs a box will tell the same
                    log.info("a warm box could not be started: %s", error)
                    await trio.sleep(PAUSE_S)
        finally:
            for box in [*(box for box, _ in self._ready), *self._old]:
                await stopped(box)


async def stopped(box: OpenBox) -> None:
    """Stop a box that nobody needs. If that fails, it is logged."""
    with trio.CancelScope(shield=True):
        try:
            await box.stop()
        except AgentRLError as error:
            log.warning("a box that nobody needs was not stopped: %s", error)
