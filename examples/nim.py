"""Nim for two seats: the pile, the agent that lets both sides move, and their rewards (docs/agents.md)."""

from collections.abc import Sequence
from typing import Any, ClassVar

import agentrl.plugins as rl
from agentrl.types import JsonObject, Message, Task

SIDES = ("first", "second")


class Pile(rl.Environment):
    """A pile of stones. Who takes the last stone wins; a wrong move loses at once."""

    name: ClassVar[str] = "pile"

    async def start(self, *, stones: int, **_: Any) -> None:
        self.stones, self.winner = stones, ""

    def move(self, side: str, said: str) -> None:
        """Take the number of stones that a side said."""
        other = SIDES[1 - SIDES.index(side)]
        taken = int(said) if said.strip() in ("1", "2", "3") else 0
        if not 0 < taken <= self.stones:
            self.winner = other
        else:
            self.stones -= taken
            self.winner = "" if self.stones else side

    async def facts(self) -> JsonObject:
        return {"winner": self.winner}


class Nim(rl.AgentLoop):
    """Lets two conversations move in turn. They are the policy's, but for those of the row's `opponent`, a
    frozen model that plays against the row's `side`.
    """

    name: ClassVar[str] = "nim"
    uses_tools: ClassVar[bool] = False

    def opponents(self, task: Task) -> Sequence[str]:
        return [task.extra_info["opponent"]] if "opponent" in task.extra_info else []

    async def run(self, task: Task, session: rl.Session) -> None:
        pile, seats = session.environment, {}
        side, other = SIDES
        while not pile.winner:
            if side in seats:
                seats[side].add_user_message(str(pile.stones))
            else:
                is_own = side == task.extra_info.get("side", side)
                opponent = None if is_own else task.extra_info.get("opponent")
                prompt = [Message("user", str(pile.stones))]
                seats[side] = session.conversation(side, prompt, opponent=opponent)
            turn = await seats[side].generate()
            pile.move(side, turn.message.content)
            side, other = other, side


class Won(rl.Reward):
    """1 for the side that won and -1 for the other one, as far as the policy spoke for them."""

    name: ClassVar[str] = "won"

    def score(self, attempt: rl.Attempted) -> rl.RewardResult:
        winner = attempt.environment.winner
        values = {side: 1.0 if side == winner else -1.0 for side in attempt.spoke}
        own = attempt.task.extra_info.get("side", "first")
        return rl.RewardResult(float(winner == own), by_conversation=values)
