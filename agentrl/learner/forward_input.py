"""The input of one rank's forward: the whole microbatch or, with sequence parallelism, the rank's part of
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
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
    """

    arguments: dict[str, Any]
    positions: Tensor
    shard: TokenShard | None

    @classmethod
    def of(
        cls,
        microbatch: Microbatch,
        positions_P: Tensor,
        *,
        attention: str,
        device: torch.device,
        group: ProcessGroup | None,
    ) -> ForwardInput:
        """Lay out a microbatch, of which `positions_P` (i64[P], on `device`) are read.

        group: the ranks that share the microbatch; None: this rank computes all of it.
        """
        token_ids = torch.tensor(microbatch.token_ids, device=device)
        position_ids = torch.tensor(microbatch.position_ids, device=device)
        lengths = microbatch.segment_lengths.tolist()
        shard = None
        if group is not None:
            shard = TokenShard.of(positions_P, num_tokens=len(token_ids), group=group)
            token_ids, position_ids, positions_P = (
                shard.cut(token_ids),
                shard.cut(position_ids),
                shard.positions,
            )
            # The padding is a segment of its own, and its output is never read.
            lengths += [shard.padding] if shard.padding else []
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
        return cls(arguments, positions_P, shard)

    def own(self, column_P: Tensor) -> Tensor:
        """Return this rank's part of `column_P`, one value per position read."""
        return column_P if self.shard is None else column_P[self.shard.is_own]

    def join(self, values: Tensor) -> Tensor:
        """Return f[P] with gradient, the values of all positions from those that each rank has read.

        A collective if ranks share the microbatch.
        """
        return values if self.shard is None else self.shard.join(values)
