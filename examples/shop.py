"""A shop: an environment with a database, its customer, and the reward (docs/tools.md)."""

import sqlite3
from collections.abc import Sequence
from typing import Any, ClassVar

import agentrl.plugins as rl
from agentrl.types import JsonObject, Message


class Shop(rl.Environment):
    """A database with the stock and the orders of one customer."""

    name: ClassVar[str] = "shop"

    async def start(self, *, stock: dict[str, int], **_: Any) -> None:
        self.db = sqlite3.connect(":memory:", check_same_thread=False)
        self.db.execute("CREATE TABLE stock (item TEXT PRIMARY KEY, pieces INTEGER)")
        self.db.execute("CREATE TABLE orders (item TEXT PRIMARY KEY, pieces INTEGER)")
        self.db.executemany("INSERT INTO stock VALUES (?, ?)", stock.items())

    @rl.tool
    def order(self, item: str, pieces: int) -> str:
        """Order pieces of an item, in place of an earlier order of the same item."""
        left = self.db.execute("SELECT pieces FROM stock WHERE item = ?", [item]).fetchone()
        if left is None or not 0 < pieces <= left[0]:
            raise rl.WrongCall(f"{left[0]} left" if left else "no such item")
        self.db.execute("INSERT OR REPLACE INTO orders VALUES (?, ?)", [item, pieces])
        return "ordered"

    def orders(self) -> dict[str, int]:
        return dict(self.db.execute("SELECT item, pieces FROM orders").fetchall())

    async def facts(self) -> JsonObject:
        return {"orders": self.orders()}

    async def close(self) -> None:
        if hasattr(self, "db"):  # it also runs after a `start` that failed
            self.db.close()


class Customer(rl.Interaction):
    """Looks into the shop's orders, and repeats the wish once if it is not there."""

    name: ClassVar[str] = "customer"

    async def start(self, *, wish: dict[str, int], **_: Any) -> None:
        self.wish, self.has_repeated = wish, False

    async def respond(self, messages: Sequence[Message]) -> rl.InteractionReply:
        is_done, self.has_repeated = self.has_repeated or self.environment.orders() == self.wish, True
        return rl.InteractionReply("wrong", is_done=is_done)


class Delivered(rl.Reward):
    name: ClassVar[str] = "delivered"

    def score(self, attempt: rl.Attempted) -> rl.RewardResult:
        return rl.RewardResult(float(attempt.environment.orders() == attempt.task.ground_truth))
