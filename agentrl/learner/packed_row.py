"""A microbatch as the forward of one rank takes it: the whole packed row, or with sequence parallelism the rank's part of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from agentrl.learner.attention import packed_arguments
from agentrl.learner.batch import Microbatch
from agentrl.learner.sequence_parallel import RowPart


@dataclass(frozen=True, slots=True, eq=False)
class PackedRow:
    """What this rank computes of a row, and which of the P positions to read.

    arguments: of the model's forward. positions: i64[P'], where to read in what the forward returns; all P without sequence parallelism.
    """

    arguments: dict[str, Any]
    positions: Tensor
    part: RowPart | None

    @classmethod
    def of(
        cls, microbatch: Microbatch, positions_P: Tensor, *, attention: str, device: torch.device, group: ProcessGroup | None
    ) -> PackedRow:
        """Lay out a microbatch of which `positions_P` (i64[P], on `device`) are read; `group` shares the row, None: it is whole."""
        token_ids = torch.tensor(microbatch.token_ids, device=device)
        position_ids = torch.tensor(microbatch.position_ids, device=device)
        lengths = microbatch.segment_lengths.tolist()
        part = None
        if group is not None:
            part = RowPart.of(positions_P, num_tokens=len(token_ids), group=group)
            token_ids, position_ids, positions_P = part.cut(token_ids), part.cut(position_ids), part.positions
            lengths += [part.padding] if part.padding else []  # a segment of its own, which nobody reads
        arguments = {
            "input_ids": token_ids[None],
            "position_ids": position_ids[None],
            # A cache would make transformers ignore the restarts of the position ids in eval mode: sequences would see each other.
            "use_cache": False,
            **packed_arguments(
                attention, lengths, device=device, sequence_group=group, prefix_segments=microbatch.prefix_segments.tolist()
            ),
        }
        return cls(arguments, positions_P, part)

    def own(self, column_P: Tensor) -> Tensor:
        """Return what this rank needs of one value per position."""
        return column_P if self.part is None else column_P[self.part.is_own]

    def join(self, values: Tensor) -> Tensor:
        """Return the values of all positions, f[P] with gradient, of those that this rank has read. A collective where they share it."""
        return values if self.part is None else self.part.join(values)
