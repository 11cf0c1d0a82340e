"""Reuse of the keys and values of a prefix: between the turns of an attempt, and between members of a group.

Full blocks of the cache are shared and never written again, so nothing is copied. transformers counts their
references and keeps those without one until the memory is needed. Three things are added here:

- The hash of a block covers all tokens up to its end and the *key* of its request. So a request never finds a
  prefix of other weights.
- A request waits for a prefix that another is computing.
- The least recently used blocks are evicted first.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

from transformers.generation.continuous_batching.cache import ATTN_TYPE_TO_ALLOCATOR
from transformers.generation.continuous_batching.cache_allocators import (
    FULL_ATTENTION,
    FullAttentionCacheAllocator,
)
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import compute_block_hash
from transformers.generation.continuous_batching.requests import RequestStatus
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler


def request_id(key: str, number: int) -> str:
    """Return the id of a request. Requests share prefixes only if their keys are equal."""
    return f"{key}/{number}"


def block_hashes(request: str, token_ids: Sequence[int], block_tokens: int) -> list[int]:
    """Return the hash of each full block of the tokens of a request, by its id."""
    key = request.rpartition("/")[0].encode()
    parent = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    hashes = []
    for end in range(block_tokens, len(token_ids) + 1, block_tokens):
        parent = compute_block_hash(parent, list(token_ids[end - block_tokens : end]))
        hashes.append(parent)
    return hashes


class SharingAllocator(FullAttentionCacheAllocator):
    """Blocks of a cache with full attention. `wanted` are the hashes of the prompt that is matched next."""

    wanted: Sequence[int] = ()

    def match_prefix_blocks(self, prompt_ids: list[int]) -> list[int]:
        return [
            self.ledger.hash_to_block[block_hash] for block_hash in self.wanted[: self.num_known(self.wanted)]
        ]

    def num_known(self, hashes: Sequence[int]) -> int:
        """Return how many blocks from the first one on are in the cache."""
        known = self.ledger.hash_to_block
        return next((i for i, block_hash in enumerate(hashes) if block_hash not in known), len(hashes))

    def mark_complete_blocks(self, request_id: str, token_ids: list[int], new_new_blocks: int) -> None:
        """Make the blocks that the last forward completed known; drop those that are known already."""
        table = self.block_table[request_id]
        first = next(
            (i for i, block in enumerate(table) if block not in self.ledger.block_to_hash), len(table)
        )
        hashes = block_hashes(request_id, token_ids, self.tokens_per_page)[first : first + new_new_blocks]
        for i, block_hash in enumerate(hashes, start=first):
            known = self.ledger.register_new_hash(table[i], block_hash)
            if known is not None:
                self.ledger.acquire(known)
                own, table[i] = table[i], known
                if self.ledger.release(own):
                    self.pool.free_blocks(self.index, [own])

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        # In reverse: of unused blocks, the end of a prefix goes before its beginning.
        self.block_table.get(request_id, []).reverse()
        super().free_blocks(request_id, no_cache)

    def evict_oldest(self, num_free_wanted: int) -> None:
        """Forget the least recently used blocks until so many are free, or all are in use."""
        num_free = self.pool.num_free_sectors * self.blocks_per_sector + self.pool.count_free_blocks(
            self.index
        )
        oldest = list(self.ledger.cached_blocks)[: max(0, num_free_wanted - num_free)]
        for block in oldest:
            del self.ledger.cached_blocks[block]
            del self.ledger.hash_to_block[self.ledger.block_to_hash.pop(block)]
        self.pool.free_blocks(self.index, oldest)


class PrefixScheduler(FIFOScheduler):
    """First in, first out, except for requests whose prefix is being computed for another one.

    It avoids a deadlock of transformers' scheduler. Once the cache is full, that one admits no request until
    a running one finishes. If all running requests are cancelled instead, the waiting ones would wait
    forever. So they are admitted also when nothing runs.
    """

    def reset(self) -> None:
        super().reset()
        self._hashes: dict[str, list[int]] = {}  # of requests that wait or whose prompt is being computed

    def schedule_batch(self, token_budget: int, cache_budget: int) -> tuple[list[Any] | None, bool, int, int]:
        self.block_new_requests &= bool(self.active_requests)
        return super().schedule_batch(token_budget, cache_budget)

    @property
    def _allocator(self) -> SharingAllocator | None:
        allocator = self.cache.cache_allocators.get(FULL_ATTENTION)
        if self.cache.use_prefix_sharing and isinstance(allocator, SharingAllocator):
            return allocator
        return None  # a model with a sliding window

    def _get_waiting_candidates(self) -> list[Any]:
        candidates, allocator = super()._get_waiting_candidates(), self._allocator
        if allocator is None:
            return candidates
        computing = [s for s in self.active_requests.values() if s.status == RequestStatus.PREFILLING]
        self._hashes = {s.request_id: self._hashes_of(s, allocator) for s in [*computing, *candidates]}
        coming = {block_hash for s in computing for block_hash in self._hashes[s.request_id]}
        ready = []
        for state in candidates:
            missing = self._hashes[state.request_id]
            missing = missing[allocator.num_known(missing) :]
            if missing and missing[0] in coming:
                continue
            coming.update(missing)
            ready.append(state)
        return ready

    def _hashes_of(self, state: Any, allocator: SharingAllocator) -> list[int]:
        known = self._hashes.get(state.request_id)
        if known is not None:
            return known
        # Without the last token: one is left to compute, whose logits are sampled from.
        return block_hashes(state.request_id, state.initial_tokens[:-1], allocator.tokens_per_page)

    def _infer_request_tokens(self, state: Any, request_ids_to_remove_from_waiting: set[str]) -> list[int]:
        allocator = self._allocator
        if allocator is not None:
            allocator.wanted = self._hashes.get(state.request_id, [])
        tokens: list[int] = super()._infer_request_tokens(state, request_ids_to_remove_from_waiting)
        return tokens

    def _try_to_meet_safety_margin(self) -> bool:
        allocator = self._allocator
        if allocator is not None:
            allocator.evict_oldest(math.ceil(self.safety_margin * allocator.num_blocks))
        return bool(super()._try_to_meet_safety_margin())


SCHEDULER = "agentrl_prefixes"
SCHEDULER_MAPPING[SCHEDULER] = PrefixScheduler
ATTN_TYPE_TO_ALLOCATOR[FULL_ATTENTION] = SharingAllocator
