"""Which server gets which trajectory, and what that costs it, counted in tokens still to be computed.

1. A trajectory stays on the server that has its prefix.
2. One that begins goes where the first prompt like its own went: the members of a group share theirs. Unless that server is
   clearly busier than the least busy one: by more than MAX_IMBALANCE of the mean load, plus the prompt that it saves.
3. Else to the server with the least left to do.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.rollout.server import Server
from agentrl.types import NO_VERSION, Generation

MAX_IMBALANCE = 0.25
"""Of the mean load. docs/log.md has the simulation that chose it."""
NUM_REMEMBERED_TURNS = 512


class TurnLengths:
    """Lengths of the turns that ended last, in tokens, and what they let expect of one under way."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def add(self, length: int) -> None:
        if len(self._recent) == NUM_REMEMBERED_TURNS:
            oldest = self._recent.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
        self._recent.append(length)
        insort(self._sorted, length)

    def expected_rest(self, done: int, *, limit: int) -> int:
        """Return how many tokens a turn of `done` tokens is likely to go on, `limit` at most.

        The mean of what the longer ones had left; before a longer one is known, as much as may come.
        """
        longer = self._sorted[bisect_right(self._sorted, done) :]
        return limit if not longer else min(limit, max(1, round(sum(longer) / len(longer)) - done))


@dataclass(slots=True)
class _Prompt:
    """A first prompt, and the server to which it went last; kept while a trajectory that began with it lives."""

    server: Server
    num_tokens: int
    num_trajectories: int = 0


@dataclass(slots=True, eq=False)
class Prefix:
    """What is known of one trajectory's tokens: `num_tokens` of them were computed, by `server`, under `version`.

    shared_tokens: how many another trajectory brought to the server before. is_lost: it was interrupted or moved since.
    """

    prompt_key: int
    server: Server
    shared_tokens: int
    num_tokens: int = 0
    version: int = NO_VERSION
    is_lost: bool = False


class Affinity:
    """Homes of trajectories, from their first turn until they are forgotten."""

    def __init__(self) -> None:
        self._prefixes: dict[str, Prefix] = {}
        self._prompts: dict[int, _Prompt] = {}

    def __len__(self) -> int:
        return len(self._prefixes)

    def place(self, key: str, prompt: Sequence[int], up: Sequence[Server]) -> Prefix:
        """Return the trajectory's prefix with the server to ask, one of `up`."""
        prefix = self._prefixes.get(key)
        if prefix is None:
            prompt_key = hash(np.asarray(prompt, np.int32).tobytes())
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
        """Forget a trajectory that is over."""
        prefix = self._prefixes.pop(key, None)
        if prefix is None:
            return
        prompt = self._prompts[prefix.prompt_key]
        prompt.num_trajectories -= 1
        if not prompt.num_trajectories:
            del self._prompts[prefix.prompt_key]

    def _follow(self, prompt_key: int, up: Sequence[Server]) -> tuple[Server, int]:
        """Return where a trajectory with this first prompt goes, and how many of its tokens are there already."""
        least = min(up, key=lambda server: server.outstanding_tokens)
        known = self._prompts.get(prompt_key)
        if known is None or not known.server.is_up:
            return least, 0
        mean = sum(server.outstanding_tokens for server in up) / len(up)
        busier = known.server.outstanding_tokens - least.outstanding_tokens
        return (known.server, known.num_tokens) if busier <= MAX_IMBALANCE * mean + known.num_tokens else (least, 0)


def uncached(prefix: Prefix, prompt_tokens: int, *, version: int) -> int:
    """Return how many tokens of the prompt the server is likely to compute: an update empties its cache."""
    has_own = prefix.num_tokens and not prefix.is_lost and prefix.version == version
    return max(1, prompt_tokens - (prefix.num_tokens if has_own else prefix.shared_tokens))


@dataclass(slots=True)
class Work:
    """Tokens of prompts that servers computed, and those among them that had been computed before.

    Redone is what was computed again because the generation was interrupted, the trajectory went to another server, or an update
    emptied the cache. A server without a prefix cache computes each turn from the start: that is prefilled, and not redone.
    """

    prefilled_tokens: int = 0
    redone_tokens: int = 0

    def count(self, prefix: Prefix, prompt_tokens: int, piece: Generation) -> None:
        """Count an answered piece, and note in `prefix` what is computed of it. One without a token did not get to run."""
        if not len(piece.token_ids):
            return
        prefilled = prompt_tokens - piece.num_cached_tokens
        is_lost = prefix.is_lost or prefix.version != piece.versions[0]
        again = min(prefilled, prefix.num_tokens) if is_lost else 0
        if piece.num_retractions:
            # A retracted request is computed anew where the version changes, and its prompt with it.
            boundaries = np.flatnonzero(np.diff(piece.versions)) + 1
            again += (retracted := sum(prompt_tokens + int(position) for position in boundaries))
            prefilled += retracted
        self.prefilled_tokens += prefilled
        self.redone_tokens += again
        # The last token is sampled, but nothing was computed of it yet.
        prefix.num_tokens = prompt_tokens + len(piece.token_ids) - 1
        prefix.version = int(piece.versions[-1])
        prefix.is_lost = piece.finish_reason == "abort"
