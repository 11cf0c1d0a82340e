"""Pools: warm boxes are used first, replaced when they are old or ill, and none is left at the end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import trio
import trio.testing

from agentrl.errors import SandboxError
from agentrl.extras.boxes import BoxEnded, BoxMaker, Executed, OpenBox, Start
from agentrl.extras.boxes.pool import BoxPool


class NumberedBox(OpenBox):
    """Remembers what it started from, and whether it was stopped."""

    def __init__(self, number: int, start: Start) -> None:
        self.number, self.started, self.is_ill, self.is_stopped = number, start, False, False
        self.restored: bytes | None = None

    async def run(self, command: Sequence[str], **_: object) -> Executed:
        if self.is_ill:
            raise BoxEnded("the box is over")
        return Executed(0, "", "", False, False, 0.0)

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        return b""

    async def write(self, path: str, content: bytes) -> None:
        return

    async def snapshot(self, *, max_bytes: int) -> bytes:
        return b""

    async def restore(self, snapshot: bytes) -> None:
        self.restored = snapshot

    async def stop(self) -> None:
        await trio.lowlevel.checkpoint()
        self.is_stopped = True


class NumberedBoxes(BoxMaker):
    def __init__(self) -> None:
        self.made: list[NumberedBox] = []
        self.is_broken = False

    def check(self) -> None:
        return

    async def start(self, start: Start) -> NumberedBox:
        await trio.lowlevel.checkpoint()
        if self.is_broken:
            raise SandboxError("it broke")
        self.made.append(NumberedBox(len(self.made), start))
        return self.made[-1]


def test_a_warm_box_is_filled_and_another_one_takes_its_place() -> None:
    maker = NumberedBoxes()
    pool = BoxPool(maker, max_boxes=2, num_warm=2)

    async def main() -> None:
        first = await pool.open(Start())  # nothing is ready yet
        await trio.testing.wait_all_tasks_blocked()
        assert len(maker.made) == 3
        second = await pool.open(Start(snapshot=b"files"))
        assert (second.number, second.started.snapshot, second.restored) == (1, None, b"files")
        await trio.testing.wait_all_tasks_blocked()
        assert len(maker.made) == 4
        other = await pool.replace(second, Start(image="another"))  # no box of another image is ready
        assert (other.number, second.is_stopped) == (4, True)
        await pool.close(first)
        await pool.close(other)
        await pool.close(other)
        counts = pool.counts
        assert (counts.num_started, counts.num_warm, counts.num_open) == (3, 1, 0)

    trio.run(main)
    assert all(box.is_stopped for box in maker.made)


def test_a_warm_box_that_is_ill_or_old_is_not_used(mock_clock: trio.testing.MockClock) -> None:
    maker = NumberedBoxes()
    pool = BoxPool(maker, max_boxes=9, num_warm=2, max_warm_s=100.0)

    async def main() -> None:
        await pool.open(Start())
        await trio.testing.wait_all_tasks_blocked()
        maker.made[1].is_ill = True
        assert (await pool.open(Start())).number == 2
        await trio.testing.wait_all_tasks_blocked()
        await trio.sleep(101)
        assert (await pool.open(Start())).number == 5
        await trio.testing.wait_all_tasks_blocked()
        assert maker.made[3].is_stopped
        assert maker.made[4].is_stopped
        assert (pool.counts.num_unhealthy, pool.counts.num_warm) == (1, 1)

    trio.run(main, clock=mock_clock)


def test_a_start_that_fails_frees_its_place(mock_clock: trio.testing.MockClock) -> None:
    maker = NumberedBoxes()
    pool = BoxPool(maker, max_boxes=1, num_warm=1)

    async def main() -> None:
        maker.is_broken = True
        for _ in range(2):
            with pytest.raises(SandboxError, match="it broke"):
                await pool.open(Start())
        maker.is_broken = False
        box = await pool.open(Start())
        maker.is_broken = True
        with pytest.raises(SandboxError):
            await pool.replace(box, Start(image="another"))
        maker.is_broken = False
        with trio.fail_after(1):
            await pool.close(await pool.open(Start()))
        assert (pool.counts.num_failed, pool.counts.num_open) == (3, 0)

    trio.run(main, clock=mock_clock)
