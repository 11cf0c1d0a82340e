"""The work of a rank: floating-point operations that its model needs for microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from agentrl.config.model import ModelConfig
from agentrl.config.model_flops import ModelFlops
from agentrl.learner.batch import Microbatch, ScoredMicrobatch
from agentrl.learner.memory_forecast import size_of
from agentrl.learner.prefix_tree import prefix_lengths

if TYPE_CHECKING:  # takes seconds to import; the controller needs only the names of this module
    from transformers import PreTrainedModel


class WorkCounter:
    """Counts the operations of microbatches; all are 0 if the model's architecture is not known.

    A microbatch that several ranks share counts as a whole on each of them, as tokens do.
    """

    def __init__(self, flops: ModelFlops | None) -> None:
        self._flops = flops

    @classmethod
    def of(cls, module: PreTrainedModel, model: ModelConfig, *, head_width: int | None = None) -> WorkCounter:
        """Return the counter of a model (see `ModelFlops`)."""
        size = size_of(module)
        return cls(None if size is None else ModelFlops(size, model.lora, head_width))

    def forward(self, microbatches: Sequence[Microbatch], *, with_adapter: bool = True) -> float:
        """Return the operations of a forward that scores all action tokens."""
        flops = self._flops
        if flops is None:
            return 0.0
        return float(
            sum(
                flops.forward(
                    m.segment_lengths.tolist(),
                    num_scored=m.num_computed(np.ones(m.num_action_tokens, np.bool_)),
                    prefix_lengths=_prefixes(m),
                    with_adapter=with_adapter,
                )
                for m in microbatches
                if not m.is_filler
            )
        )

    def update(self, items: Sequence[Microbatch | ScoredMicrobatch]) -> float:
        """Return the operations of forward and backward over the tokens of the loss."""
        flops, total = self._flops, 0
        if flops is None:
            return 0.0
        for item in items:
            if isinstance(item, ScoredMicrobatch):
                microbatch, in_loss = item.microbatch, item.correction.accepted
            else:
                microbatch, in_loss = item, item.loss_mask
            if not microbatch.is_filler:
                total += flops.update(
                    microbatch.segment_lengths.tolist(),
                    num_scored=microbatch.num_computed(in_loss),
                    prefix_lengths=_prefixes(microbatch),
                )
        return float(total)


def _prefixes(microbatch: Microbatch) -> list[int]:
    found: list[int] = prefix_lengths(microbatch.segment_lengths, microbatch.prefix_segments).tolist()
    return found
