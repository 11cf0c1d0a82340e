"""A reward model: a frozen classifier with one label, sharded like the learner, that scores conversations.

It is transformers' `AutoModelForSequenceClassification` or `AutoModelForTokenClassification` on a causal
model. A conversation gets the score that transformers computes for it alone: the output at its last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.config.model import ModelConfig
from agentrl.config.reward_model import RewardModelConfig
from agentrl.errors import ConfigError
from agentrl.learner import sharding
from agentrl.learner.attention import attention_parity, choose_attention, register_attention
from agentrl.learner.batch import Microbatch
from agentrl.learner.dispatch import dispatch
from agentrl.learner.loading import Outline, outline
from agentrl.learner.model import Policy, as_policy
from agentrl.learner.ranks import Device, join_ranks, leave_ranks
from agentrl.learner.score_head import answer_with_scores
from agentrl.plugins.sources import import_source


class RewardModel:
    """One rank of a reward model.

    All ranks call the same methods in the same order, each with its own microbatches.

    Raises:
        ConfigError: the model, the device or the attention is not available, or the model is not a classifier
            with one label.
        LearnerError: the other ranks did not join in time.
    """

    def __init__(
        self, config: RewardModelConfig, device: Device = "auto", *, rank: int, address: str, port: int
    ) -> None:
        learner = config.as_learner
        place = join_ranks(learner, rank=rank, address=address, port=port, on=device)
        attention = choose_attention(
            config.model.attention, device=place.device.type, dtype=config.model.dtype
        )
        found = outline_classifier(config.model, attention)
        module = found.module
        class_name = type(module).__name__
        module.requires_grad_(False)
        sharding.shard(module, place.mesh, learner, compute_dtype=None, has_backward=False)
        found.fill(sharding.home_of_weights(learner, place.device))
        self._model = as_policy(
            module.eval(),
            class_name,
            attention,
            place.device,
            getattr(torch, config.model.dtype),
            pieces={},  # nothing is published
        )

    @dispatch("dp", join="concat")
    @torch.no_grad()
    def score(self, microbatches: Sequence[Microbatch]) -> list[NDArray[np.floating]]:
        """Return per microbatch f[S], the scores in the order of its `sample_indices`. A collective.

        A filler has no scores.
        """
        scores = [score_segments(self._model, microbatch).cpu().numpy() for microbatch in microbatches]
        self._model.reshard()
        return scores

    @dispatch("all")
    def parity_tokens(self) -> float:
        """Return the `parity_tokens` of `pack` for the model's sizes (see `attention_parity`)."""
        return attention_parity(self._model.module)

    def close(self) -> None:
        """Leave the process group."""
        leave_ranks()


def score_segments(model: Policy, microbatch: Microbatch) -> Tensor:
    """Return f[G], the score of each segment by a model with a scalar head.

    For a filler it is empty, and its gradient is 0.
    """
    ends = np.zeros(0, np.int64) if microbatch.is_filler else np.cumsum(microbatch.segment_lengths) - 1
    return scores_at(model, microbatch, ends)


def scores_at(model: Policy, microbatch: Microbatch, positions: NDArray[np.int64]) -> Tensor:
    """Return the scalar head's output at `positions` (i64[any], indices into the microbatch's tokens)."""
    given = model.forward_input(microbatch, torch.tensor(positions, device=model.device))
    return given.join(model.module(positions_G=given.positions, **given.arguments))


def outline_classifier(model: ModelConfig, attention: str) -> Outline:
    """Return the classifier with one label in `model.path`, in `model.dtype`, without its stored weights.

    Its forward returns scores.

    Raises:
        ConfigError: it does not exist, or its files do not fit, for example because the head is missing.
        PluginError: `model.external_lib` cannot be imported.
    """
    kind = find_classifier(model)
    register_attention()
    try:
        found = outline(kind, model, attention=attention, dtype=getattr(torch, model.dtype))
    except ConfigError as error:
        raise ConfigError(f"reward_model.{error}") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{_named(model)} cannot be loaded: {error}") from error
    answer_with_scores(found.module)
    return found


def find_classifier(model: ModelConfig) -> Any:
    """Return transformers' auto class for the classifier in `model.path`, from its config alone.

    Raises:
        ConfigError: it is not a classifier, or does not have exactly one label.
        PluginError: `model.external_lib` cannot be imported.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification

    if model.external_lib is not None:
        import_source(model.external_lib)
    try:
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{_named(model)} cannot be loaded: {error}") from error
    architectures = config.architectures or []
    classifiers = {
        "ForSequenceClassification": AutoModelForSequenceClassification,
        "ForTokenClassification": AutoModelForTokenClassification,
    }
    kind = next(
        (kind for suffix, kind in classifiers.items() for name in architectures if name.endswith(suffix)),
        None,
    )
    if kind is None:
        raise ConfigError(
            f"{_named(model)} is not a reward model: its config names "
            f"{', '.join(architectures) or 'no architecture'}; train one with `agentrl rm`, or "
            "use a ...ForSequenceClassification or ...ForTokenClassification"
        )
    if config.num_labels != 1:
        raise ConfigError(
            f"{_named(model)} has {config.num_labels} labels; a reward model has one, the score"
        )
    return kind


def _named(model: ModelConfig) -> str:
    return f"reward_model.model.path={model.path!r}"
