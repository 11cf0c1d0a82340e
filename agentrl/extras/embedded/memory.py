"""Memory of a served model that is given back for a while, for the learner on the same GPU.

Only storages are freed. All tensors on them, views included, stay as they are and are valid again
afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class LentMemory:
    """The memory of tensors, from its release until `take_back`. Nothing may read or write them meanwhile."""

    def __init__(self, kept: Iterable[Tensor], scratch: Iterable[Tensor]) -> None:
        """Release the memory of `kept`, whose values are saved in host memory, and of `scratch`, whose values
        are not.
        """
        storages = {_key(tensor): tensor.untyped_storage() for tensor in kept}
        self._kept = [(storage, _on_host(storage)) for storage in storages.values()]
        self._scratch = [
            (storage, storage.nbytes())
            for storage in {_key(t): t.untyped_storage() for t in scratch if _key(t) not in storages}.values()
        ]
        for storage, _ in self._kept:
            storage.resize_(0)
        for storage, _ in self._scratch:
            storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # without it, the memory stays this process's own

    @property
    def num_bytes(self) -> int:
        """Bytes released."""
        return sum(len(host) for _, host in self._kept) + sum(size for _, size in self._scratch)

    @torch.no_grad()
    def take_back(self) -> None:
        """Allocate the memory again: kept tensors have their values, and scratch is zero."""
        for storage, host in self._kept:
            storage.resize_(len(host))
            _bytes_of(storage).copy_(host)
        for storage, size in self._scratch:
            storage.resize_(size)
            _bytes_of(storage).zero_()


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _on_host(storage: torch.UntypedStorage) -> Tensor:
    return _bytes_of(storage).to("cpu", copy=True)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
