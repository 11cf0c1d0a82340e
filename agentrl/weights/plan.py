"""Division of a model's tensors into buckets with a byte budget."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.types import TensorSpec


def plan_buckets(specs: Sequence[TensorSpec], *, max_bytes: int) -> list[list[TensorSpec]]:
    """Cut `specs`, in order, into buckets of at most `max_bytes`; a larger tensor gets a bucket of its own.

    A bucket has one dtype, because it is sent as one flat byte buffer that the receiver views in that dtype.
    """
    buckets: list[list[TensorSpec]] = []
    size = 0
    for spec in specs:
        fits = buckets and size + spec.num_bytes <= max_bytes and buckets[-1][-1].dtype == spec.dtype
        if not fits:
            buckets.append([])
            size = 0
        buckets[-1].append(spec)
        size += spec.num_bytes
    return buckets
