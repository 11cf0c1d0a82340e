"""A model with a scalar head: one number per packed segment, read at its last token.

It is transformers' `AutoModelForSequenceClassification` with one label, so an exported model gives the same
scores there. The forward of transformers only supports padded batches; here segments are read where they end.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from agentrl.errors import ConfigError

if TYPE_CHECKING:  # takes seconds to import; the controller needs only the names of this module
    from transformers import PreTrainedModel

SCORE_HEAD = "score"
"""transformers' name for the head of a sequence classifier on a causal model."""


@dataclass(frozen=True, slots=True)
class ScoreHead:
    """Settings of a scalar head.

    pad_token_id: written into the exported config. transformers pools at the last token that is not this one,
    so no sequence may end in it. None: keep the model's own, for a head that is read at many tokens.
    """

    pad_token_id: int | None


def attach_score_head(module: PreTrainedModel, head: ScoreHead, *, dtype: torch.dtype) -> None:
    """Make a sequence classifier return scores, and train its head in `dtype`.

    The head is trained even with an adapter, because it is new.

    Raises:
        ConfigError: see `answer_with_scores`.
    """
    answer_with_scores(module)
    module.score.to(dtype).requires_grad_(True)
    if head.pad_token_id is not None:
        module.config.get_text_config().pad_token_id = head.pad_token_id


def answer_with_scores(module: PreTrainedModel) -> None:
    """Make a classifier's forward return the scores at given positions.

    Call it before sharding: FSDP's hooks must wrap the new forward.

    Raises:
        ConfigError: the architecture keeps its head under another name.
    """
    if not hasattr(module, SCORE_HEAD):
        raise ConfigError(
            f"{type(module).__name__} has no scalar head {SCORE_HEAD!r} on a causal model; use a decoder "
            "such as Llama or Qwen"
        )
    module.forward = partial(_scores_at, module)


def _scores_at(module: Any, *, input_ids: Tensor, positions_G: Tensor, **arguments: Any) -> Tensor:
    """Return f32[G], the scores at the given positions of one microbatch i64[1, T]; f64 in float64."""
    hidden_TD = module.base_model(input_ids=input_ids, **arguments).last_hidden_state[0]
    # FSDP's backward hook would be lost on a view.
    scores_G: Tensor = module.score(hidden_TD[positions_G])[:, 0].clone()
    # The loss uses differences of scores, and bfloat16 has only about three digits.
    return scores_G if scores_G.dtype == torch.float64 else scores_G.float()
