"""Prefix affinity: chooses the server of each attempt. Load is measured in tokens still to be computed.

1. An attempt stays on the server that has its prefix cached.
2. A new attempt goes to the server that last received the same first prompt (the members of a group share
   it), unless that server is too busy: its load exceeds the least load by more than MAX_IMBALANCE times the
   mean load, plus the prompt tokens that the cache saves.
3. Otherwise it goes to the server with the least load.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.servers.server import Server
from agentrl.types import NO_VERSION, Generation

MAX_IMBALANCE = 0.25
"""Fraction of the mean load, chosen by simulation."""
NUM_REMEMBERED_TURNS = 512


class TurnLengths:
    """Lengths in tokens of the latest finished turns, used to predict how long a running turn will be."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self._total = 0

    def add(self, length: int) -> None:
        if len(self._recent) == NUM_REMEMBERED_TURNS:
            oldest = self._recent.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
            self._total -= oldest
        self._recent.append(length)
        insort(self._sorted, length)
        self._total += length

    def expected_rest(self, done: int, *, limit: int) -> int:
        """Return the expected number of further tokens of a turn that has `done` tokens, at most `limit`.

        This is the mean remainder of the remembered turns longer than `done`; `limit` if there are none.
        """
        first = bisect_right(self._sorted, done)
        num_longer = len(self._sorted) - first
        if not num_longer:
            return limit
        total = sum(self._sorted[first:]) if first else self._total  # a turn that begins: all are longer
        return min(limit, max(1, round(total / num_longer) - done))


@dataclass(slots=True)
class _Prompt:
    """A first prompt and the server to which it went last.

    Kept while an attempt that began with it is alive.
    """

    server: Server
    num_tokens: int
    num_trajectories: int = 0


@dataclass(slots=True, eq=False)
class Prefix:
    """The cached prefix of one attempt: `server` computed its first `num_tokens` tokens under `version`.

    shared_tokens: prompt tokens that another attempt had already brought to the server.
    is_lost: the attempt was interrupted or moved since then.
    """

    prompt_key: int
    server: Server
    shared_tokens: int
    num_tokens: int = 0
    version: int = NO_VERSION
    is_lost: bool = False


class Affinity:
    """The server of each attempt, from its first turn until it is forgotten."""

    def __init__(self) -> None:
        self._prefixes: dict[str, Prefix] = {}
        self._prompts: dict[int, _Prompt] = {}

    def __len__(self) -> int:
        return len(self._prefixes)

    def place(self, key: str, prompt: Sequence[int], up: Sequence[Server]) -> Prefix:
        """Return the attempt's prefix; its `server` is the one to ask, one of `up`."""
        prefix = self._prefixes.get(key)
        if prefix is None:
            prompt_key = hash(tuple(prompt))
            server, shared_tokens = self._follow(prompt_key, up)
            prefix = self._prefixes[key] = Prefix(prompt_key, server, shared_tokens)
            first = self._prompts.setdefault(prompt_key, _Prompt(server, len(prompt)))
            first.num_trajectories += 1
            first.server = server
        elif not prefix.server.is_up:
            prefix.server, prefix.shared_tokens = self._follow(prefix.prompt_key, up)
            prefix.is_lost = True
            self._prompts[prefix.prompt_key].server = prefix.server
        return prefix

    def forget(self, key: str) -> None:
        """Forget an attempt that is over."""
        prefix = self._prefixes.pop(key, None)
        if prefix is None:
            return
        prompt = self._prompts[prefix.prompt_key]
        prompt.num_trajectories -= 1
        if not prompt.num_trajectories:
            del self._prompts[prefix.prompt_key]

    def _follow(self, prompt_key: int, up: Sequence[Server]) -> tuple[Server, int]:
        """Return the server for an attempt with this first prompt, and how many of its tokens are cached
        there.
        """
        least = min(up, key=lambda server: server.outstanding_tokens)
        known = self._prompts.get(prompt_key)
        if known is None or not known.server.is_up:
            return least, 0
        mean = sum(server.outstanding_tokens for server in up) / len(up)
        busier = known.server.outstanding_tokens - least.outstanding_tokens
        return (
            (known.server, known.num_tokens)
            if busier <= MAX_IMBALANCE * mean + known.num_tokens
            else (least, 0)
        )


def uncached(prefix: Prefix, prompt_tokens: int, *, version: int) -> int:
    """Return how many prompt tokens the server must probably compute. A new version empties its cache."""
    has_own = prefix.num_tokens and not prefix.is_lost and prefix.version == version
    return max(1, prompt_tokens - (prefix.num_tokens if has_own else prefix.shared_tokens))


@dataclass(slots=True)
class Work:
    """Tokens that servers sampled, prompt tokens that they computed, and how many were computed again.

    sampled_tokens: counted when a server answers: at the end of a turn, or where a publish or a lost server
        interrupts it. Tokens that never reach the router (a server died) are not counted.
    redone_tokens: computed again because the generation was interrupted, the attempt moved to another server,
    or an update emptied the cache. A server without a prefix cache recomputes every turn; that counts as
    prefilled, not as redone.
    """

    sampled_tokens: int = 0
    prefilled_tokens: int = 0
    redone_tokens: int = 0

    def count(self, prefix: Prefix, prompt_tokens: int, piece: Generation) -> None:
        """Count an answered piece and update `prefix`.

        A piece without tokens never ran and is not counted.
        """
        if not len(piece.token_ids):
            return
        self.sampled_tokens += len(piece.token_ids)
        prefilled = prompt_tokens - piece.num_cached_tokens
        is_lost = prefix.is_lost or prefix.version != piece.versions[0]
        again = min(prefilled, prefix.num_tokens) if is_lost else 0
        if piece.num_retractions:
            # A retracted request, including its prompt, is recomputed at each change of version.
            boundaries = np.flatnonzero(np.diff(piece.versions)) + 1
            again += (retracted := sum(prompt_tokens + int(position) for position in boundaries))
            prefilled += retracted
        self.prefilled_tokens += prefilled
        self.redone_tokens += again
        # The last token was sampled, but its KV entries are not computed yet.
        prefix.num_tokens = prompt_tokens + len(piece.token_ids) - 1
        prefix.version = int(piece.versions[-1])
        prefix.is_lost = piece.finish_reason == "abort"
