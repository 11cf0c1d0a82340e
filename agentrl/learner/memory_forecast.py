"""The memory that an update should need, for comparison with its measured peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.config.learner import LearnerConfig
from agentrl.config.model import ModelConfig
from agentrl.config.model_size import ModelSize
from agentrl.config.rank_memory import PROCESS_BYTES, trained_memory
from agentrl.learner.batch import Microbatch

if TYPE_CHECKING:  # takes seconds to import; the controller needs only the names of this module
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class MemoryForecast:
    """Predicts the peak of a rank from the sizes of its model (see `trained_memory`).

    size: None for an unknown architecture.
    has_reference: a frozen copy of the model is kept as well.
    has_logits: False for a head of one column.
    teacher: the size of the frozen teacher that is kept as well; None without one.
    """

    size: ModelSize | None
    model: ModelConfig
    learner: LearnerConfig
    is_gpu: bool
    has_reference: bool = False
    has_logits: bool = True
    teacher: ModelSize | None = None

    def peak_bytes(self, microbatches: Sequence[Microbatch]) -> float:
        """Return the peak of an update in bytes: of the GPU's memory, or of the whole process on a CPU.

        0.0: not known.
        """
        if self.size is None:
            return 0.0
        memory = trained_memory(
            self.size,
            self.model,
            self.learner,
            tokens=max((len(m.token_ids) for m in microbatches), default=0),
            is_gpu=self.is_gpu,
            has_reference=self.has_reference,
            has_logits=self.has_logits,
            teacher=self.teacher,
        )
        return memory.peak_bytes + (0.0 if self.is_gpu else PROCESS_BYTES)


def size_of(module: PreTrainedModel) -> ModelSize | None:
    """Return the size of a model; None for an unknown architecture."""
    return ModelSize.of(module.config.get_text_config().to_dict())
