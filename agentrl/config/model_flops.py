"""Floating-point operations that a model needs for packed segments, from its sizes alone.

Only what the model needs is counted, as for model-flops utilisation (MFU): two operations for each pair of
numbers that a matrix product multiplies and adds. Softmaxes, norms and rotary embeddings are not counted, nor
is anything that is computed again.

Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B; attention here counts what a causal mask allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat

from agentrl.config.model import LoRAConfig
from agentrl.config.model_size import ModelSize

HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """Counts the operations of forwards and updates of a model.

    lora: the adapter that is trained; without one (rank 0), all weights are.
    head_width: columns of the head; None: the vocabulary, 1: a critic or a reward model.
    """

    size: ModelSize
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    head_width: int | None = None

    def forward(
        self,
        segment_lengths: Sequence[int],
        *,
        num_scored: int,
        prefix_lengths: Sequence[int] | None = None,
        with_adapter: bool = True,
    ) -> int:
        """Return the operations of one forward.

        Args:
            segment_lengths: tokens of each segment; a segment attends causally to itself.
            num_scored: tokens whose logits are computed.
            prefix_lengths: tokens of the prompt that each segment continues and attends to; None: there are
                none.
            with_adapter: False for the reference of a model with an adapter.
        """
        matrices, attention, adapters = self._parts(segment_lengths, num_scored, prefix_lengths)
        return matrices + attention + (adapters if with_adapter else 0)

    def update(
        self, segment_lengths: Sequence[int], *, num_scored: int, prefix_lengths: Sequence[int] | None = None
    ) -> int:
        """Return the operations of a forward and its backward.

        A backward has a product for the gradient of the input and another for that of the weight. Frozen
        weights below an adapter have only the first.
        """
        matrices, attention, adapters = self._parts(segment_lengths, num_scored, prefix_lengths)
        return (2 if self.lora.rank else 3) * matrices + 3 * (attention + adapters)

    @property
    def num_adapter_parameters(self) -> int:
        """Parameters of the adapters of all layers and of the head; 0 without any."""
        return self._adapter + self._head_adapter

    def per_token(self, length: int) -> int:
        """Return the operations of an update per token, for segments of `length` tokens, all scored."""
        return self.update([length], num_scored=length) // length

    def _parts(
        self, segment_lengths: Sequence[int], num_scored: int, prefix_lengths: Sequence[int] | None
    ) -> tuple[int, int, int]:
        """Return the operations of a forward in matrices, attention and adapters."""
        size, num_tokens = self.size, sum(segment_lengths)
        head = size.num_head_parameters if self.head_width is None else size.hidden_size * self.head_width
        prefixes = repeat(0) if prefix_lengths is None else prefix_lengths
        pairs = [
            (count_pairs(length, prefix, None), count_pairs(length, prefix, size.window))
            for length, prefix in zip(segment_lengths, prefixes, strict=False)
        ]
        full_layers = size.num_layers - size.num_window_layers
        attended = sum(full_layers * full + size.num_window_layers * near for full, near in pairs)
        # The products of a query with its keys, and of their weights with the values.
        attention = 2 * 2 * size.attention_width * attended
        matrices = 2 * (num_tokens * size.num_active_parameters + num_scored * head)
        return matrices, attention, 2 * (num_tokens * self._adapter + num_scored * self._head_adapter)

    @property
    def _adapter(self) -> int:
        """Parameters of the adapters of all layers, those of roles included: all compute all tokens."""
        named = self.lora.target_modules
        sides = [
            columns + rows
            for name, (columns, rows) in self.size.linears.items()
            if not named or name in named
        ]
        return (1 + len(self.lora.roles)) * self.size.num_layers * self.lora.rank * sum(sides)

    @property
    def _head_adapter(self) -> int:
        has_one = HEAD in self.lora.target_modules
        return self.lora.rank * (self.size.hidden_size + self.size.vocab_size) if has_one else 0


def count_pairs(length: int, prefix: int, window: int | None) -> int:
    """Return the pairs of query and key of a segment under a causal mask.

    prefix: tokens before the segment that it attends to too.
    window: most keys that a query sees, itself included; None: all before it.
    """
    unclipped = length if window is None else min(length, max(0, window - prefix))
    clipped = (length - unclipped) * (window or 0)
    return unclipped * prefix + unclipped * (unclipped + 1) // 2 + clipped
