"""The desk of a hotel, a domain of tau2-bench's kind: bookings and tools (agentrl/extras/hubs/README.md)."""

import json
from pathlib import Path
from typing import Any, ClassVar

import agentrl.plugins as rl
from agentrl.types import JsonObject


class Desk(rl.Environment):
    """The bookings: number -> guest, nights and price. Of each attempt, a copy of its own."""

    name: ClassVar[str] = "desk"

    async def start(self, *, database: str = "{}", **_: Any) -> None:
        self.bookings = json.loads(Path(self.config["database"]).read_text())
        self.bookings.update(json.loads(database))  # what the task says differs

    @rl.tool
    def find_bookings(self, guest: str) -> list[str]:
        """Find the numbers of a guest's bookings."""
        return [number for number, booking in self.bookings.items() if booking["guest"] == guest]

    @rl.tool
    def show_booking(self, number: str) -> JsonObject:
        """Show a booking: guest, nights, price of all nights."""
        return self._booking(number)

    @rl.tool
    def cancel_booking(self, number: str) -> str:
        """Cancel a booking."""
        self._booking(number)
        del self.bookings[number]
        return "cancelled"

    @rl.tool
    def change_nights(self, number: str, nights: int) -> str:
        """Change the nights of a booking, and its price with them."""
        booking = self._booking(number)
        if nights < 1:
            raise rl.WrongCall("a booking has at least one night; cancel it instead")
        price = booking["price"] // booking["nights"] * nights
        booking.update(nights=nights, price=price)
        return f"the price is {price}"

    def _booking(self, number: str) -> dict[str, Any]:
        if number not in self.bookings:
            raise rl.WrongCall(f"there is no booking {number!r}")
        return self.bookings[number]

    async def facts(self) -> JsonObject:
        return {"database": self.bookings}
