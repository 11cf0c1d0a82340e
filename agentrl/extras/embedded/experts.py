"""Which experts computed each token, for requests that ask for it.

It is kept per token of the KV cache, because a request may find its prefix computed by an earlier one. Q
tokens of a forward, L layers, K experts per token; 0 for layers without experts, as in SGLang.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl.extras.embedded.attention import Row
from agentrl.servers.expert_routers import find_routers, num_layers


class RecordedExperts:
    """The experts of the first `num_tokens` tokens of one request, prompt and answer."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._parts: list[NDArray[np.int16]] = []

    def add(self, first: int, experts_QLK: NDArray[np.int16]) -> None:
        """Put the experts of the tokens from `first` on in the place of all that were known of them."""
        if first < self.num_tokens:
            self._parts = [np.concatenate(self._parts)[:first]]
        self._parts.append(experts_QLK)
        self.num_tokens = first + len(experts_QLK)

    def between(self, first: int, end: int) -> NDArray[np.int16] | None:
        """Return those of the tokens [first, end), i16[., L, K]; None if not all are known."""
        if not first <= end <= self.num_tokens or not self._parts:
            return None
        return np.concatenate(self._parts)[first:end]


class ExpertLog:
    """Watches the routers of one model. For the engine's thread."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._routers = find_routers(model)
        self._num_layers = num_layers(model)
        self._slots: NDArray[np.int16] | None = None  # [tokens of the cache, L, K]
        self._chosen: dict[int, Tensor] = {}  # by layer
        self._rows: Sequence[tuple[Row, RecordedExperts | None, NDArray[np.int64] | None]] = ()
        for router in self._routers:
            router.module.register_forward_hook(partial(self._see, router.layer))

    @property
    def is_empty(self) -> bool:
        """Whether the model has no routers that can be watched."""
        return not self._routers

    def expect(self, rows: Sequence[Row], wanted: Mapping[str, RecordedExperts], allocator: Any) -> None:
        """Set the packing of the next forward. allocator: of the cache; None if no prefixes are shared.

        wanted: where to put the experts, by request id.
        """
        if self.is_empty:
            return
        self._rows = [(row, wanted.get(row.request_id), _slots_of(row, allocator)) for row in rows]
        if self._slots is None and allocator is not None:
            shape = (_num_slots(allocator), self._num_layers, self._routers[0].top_k)
            self._slots = np.zeros(shape, np.int16)

    def settle(self) -> None:
        """Store what the routers chose in the forward that is over."""
        if not self._chosen:
            return
        num_tokens = sum(row.num_queries for row, *_ in self._rows)
        table_QLK = np.zeros((num_tokens, self._num_layers, self._routers[0].top_k), np.int16)
        # In one transfer: each one waits for the GPU.
        chosen_LQK = torch.stack([experts[:num_tokens] for experts in self._chosen.values()])
        table_QLK[:, list(self._chosen)] = chosen_LQK.transpose(0, 1).cpu().numpy()
        self._chosen = {}
        start = 0
        for row, recorded, slots in self._rows:
            own_QLK = table_QLK[start : start + row.num_queries]
            start += row.num_queries
            first = row.num_keys - row.num_queries
            if slots is not None and self._slots is not None:
                self._slots[slots[first:]] = own_QLK
                if recorded is not None and first > recorded.num_tokens:  # computed for an earlier request
                    recorded.add(recorded.num_tokens, self._slots[slots[recorded.num_tokens : first]])
            if recorded is not None:
                recorded.add(first, own_QLK)

    def _see(self, layer: int, module: nn.Module, inputs: Any, output: Any) -> None:
        self._chosen[layer] = output[2]


def _slots_of(row: Row, allocator: Any) -> NDArray[np.int64] | None:
    """Return i64[num_keys], where the tokens of a request are in the cache."""
    if allocator is None:
        return None
    page = allocator.tokens_per_page
    table = np.array(allocator.block_table[row.request_id][: -(-row.num_keys // page)], np.int64)
    tokens = np.arange(row.num_keys)
    return np.asarray(table[tokens // page] * page + tokens % page)


def _num_slots(allocator: Any) -> int:
    """Return how many tokens the cache has room for; each has keys and values in every layer."""
    of_token = 2 * len(allocator.layer_indices) * allocator.num_key_value_heads * allocator.head_dim
    return int(allocator.cache_tensor.numel() // of_token)
