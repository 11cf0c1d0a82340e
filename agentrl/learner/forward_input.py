"""The input of one rank's forward: the whole microbatch or, with sequence parallelism, the rank's part of
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup

from agentrl.learner.attention import packed_arguments
from agentrl.learner.batch import Microbatch
from agentrl.learner.sequence_parallel import TokenShard


@dataclass(frozen=True, slots=True, eq=False)
class ForwardInput:
    """The forward arguments of this rank, and which of the P positions to read from its output.

    arguments: of the model's forward.
    positions: i64[P'], where to read the forward's output; without sequence parallelism all P.
    shard: this rank's part of the microbatch; None without sequence parallelism.
    lengths: of the microbatch's segments, without the padding.
    num_real: tokens of this rank before the padding; 0 for a filler.
    is_filler: see `Microbatch`.
    experts: [T', ...], this rank's part of the `experts` given; None: none were.
    """

    arguments: dict[str, Any]
    positions: Tensor
    shard: TokenShard | None
    lengths: list[int]
    num_real: int
    is_filler: bool
    experts: Tensor | None = None

    @classmethod
    def of(
        cls,
        microbatch: Microbatch,
        positions_P: Tensor,
        *,
        attention: str,
        device: torch.device,
        group: ProcessGroup | None,
        experts: NDArray[np.int64] | None = None,
    ) -> ForwardInput:
        """Lay out a microbatch, of which `positions_P` (i64[P], on `device`) are read.

        group: the ranks that share the microbatch; None: this rank computes all of it.
        experts: of all tokens, [T, ...]; None: none.
        """
        token_ids = torch.tensor(microbatch.token_ids, device=device)
        position_ids = torch.tensor(microbatch.position_ids, device=device)
        own_lengths = lengths = microbatch.segment_lengths.tolist()
        experts_T = None if experts is None else torch.from_numpy(experts).to(device)
        num_real = microbatch.num_tokens
        shard = None
        if group is not None:
            shard = TokenShard.of(positions_P, num_tokens=len(token_ids), group=group)
            token_ids, position_ids, positions_P = (
                shard.cut(token_ids),
                shard.cut(position_ids),
                shard.positions,
            )
            experts_T = None if experts_T is None else shard.cut(experts_T)
            num_real = min(max(num_real - shard.start, 0), shard.length)
            # The padding is a segment of its own, and its output is never read.
            lengths = [*lengths, shard.padding] if shard.padding else lengths
        arguments = {
            "input_ids": token_ids[None],
            "position_ids": position_ids[None],
            # With a cache, transformers in eval mode ignores the restarts of the position ids, and sequences
            # would attend to each other.
            "use_cache": False,
            **packed_arguments(
                attention,
                lengths,
                device=device,
                sequence_group=group,
                prefix_segments=microbatch.prefix_segments.tolist(),
            ),
        }
        return cls(arguments, positions_P, shard, own_lengths, num_real, microbatch.is_filler, experts_T)

    @property
    def segments(self) -> Tensor:
        """i64[num_real], the segment of each of this rank's tokens."""
        device = self.positions.device
        lengths_S = torch.tensor(self.lengths, device=device)
        segments_T = torch.repeat_interleave(torch.arange(len(lengths_S), device=device), lengths_S)
        first = 0 if self.shard is None else self.shard.start
        return segments_T[first : first + self.num_real]

    def own(self, column_P: Tensor) -> Tensor:
        """Return this rank's part of `column_P`, one value per position read."""
        return column_P if self.shard is None else column_P[self.shard.is_own]

    def join(self, values: Tensor) -> Tensor:
        """Return f[P] with gradient, the values of all positions from those that each rank has read.

        A collective if ranks share the microbatch.
        """
        return values if self.shard is None else self.shard.join(values)
