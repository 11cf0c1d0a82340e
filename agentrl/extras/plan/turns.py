"""`Turns`: what a modelled server must know of the turns that it samples, and the router must not."""

from __future__ import annotations


class Turns:
    """The turns that are being sampled, by the key of their attempt.

    limit: `max_new_tokens` of every turn. A continued turn asks for fewer, which tells how many it has.
    most: largest number of attempts that were played at the same time.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.most = 0
        self._turns: dict[str, tuple[int, int]] = {}

    def begin(self, key: str, tokens: int, value: int) -> None:
        """Begin a turn of `tokens` tokens, each of which is `value`."""
        assert tokens <= self.limit, "a turn is within its limit"
        self._turns[key] = (tokens, value)
        self.most = max(self.most, len(self._turns))

    def end(self, key: str) -> None:
        """Forget an attempt that is over. Until then it is in flight, also between two turns."""
        self._turns.pop(key, None)

    def rest(self, key: str, max_new_tokens: int) -> tuple[int, int]:
        """Return how many tokens a turn lacks whose request asks for `max_new_tokens`, and its token."""
        tokens, value = self._turns[key]
        return tokens - (self.limit - max_new_tokens), value
