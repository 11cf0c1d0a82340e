"""Checks of a model by its config alone, before any weight is read: its head, and whether it can be
trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.chat.template import read_json
from agentrl.config.learner import LearnerConfig
from agentrl.config.model import ModelConfig
from agentrl.config.model_kind import find_refused, has_experts, sees_images
from agentrl.errors import ConfigError

_CLASSIFIER = "Classification"
_TOKEN_CLASSIFIER = "ForTokenClassification"
_UNNAMED_LABELS = (0, 1)
"""transformers' default labels of a classifier whose config names none."""


def find_own_head(model: ModelConfig) -> str | None:
    """Return the architecture of a folder with a classifier (a trained head); None for a causal model."""
    return next(
        (name for name in _description(model).get("architectures") or [] if name.endswith(_CLASSIFIER)), None
    )


def check_policy(model: ModelConfig) -> None:
    """Raise if a policy cannot be trained, or if no server could load its weights.

    Raises:
        ConfigError: it is a classifier, an untested mixture of experts, or quantized.
    """
    if classifier := find_own_head(model):
        raise ConfigError(
            f"model.path={model.path!r} is a {classifier}, which has no head over the vocabulary; a policy "
            "is a causal language model"
        )
    check_kind(model)


def check_kind(model: ModelConfig) -> None:
    """Raise if the learner would publish the model's weights in a form that nothing can load.

    Raises:
        ConfigError: it is an untested mixture of experts, or quantized.
    """
    description = _description(model)
    for problem in find_refused(description):
        raise ConfigError(
            f"model.path={model.path!r} ({description.get('model_type')}) is {problem}; use one of these or "
            "a dense model, unquantized"
        )


def check_experts(model: ModelConfig, learner: LearnerConfig) -> None:
    """Raise if a mixture of experts is combined with something that is not tested with experts.

    Raises:
        ConfigError: an adapter, compilation, or tensor parallelism with undivided experts is configured.
    """
    if not has_experts(_description(model)):
        return
    refused = [
        (model.lora.rank > 0, f"model.lora.rank={model.lora.rank}", "use model.lora.rank=0 (full weights)"),
        (
            learner.tensor_parallel > 1 and learner.expert_parallel == 1,
            f"learner.tensor_parallel={learner.tensor_parallel} without learner.expert_parallel",
            f"use learner.expert_parallel={learner.tensor_parallel} as well, which divides experts",
        ),
        (learner.compile, "learner.compile=true", "use learner.compile=false"),
    ]
    for is_set, key, instead in refused:
        if is_set:
            raise ConfigError(
                f"{key} is not tested with a mixture of experts (model.path={model.path!r}); {instead}"
            )


def check_vision(model: ModelConfig, learner: LearnerConfig) -> None:
    """Raise if a model that sees is combined with something that is not tested with images.

    Raises:
        ConfigError: it is.
    """
    if not (model.path and sees_images(Path(model.path))):
        return
    refused = [
        (model.lora.rank > 0, f"model.lora.rank={model.lora.rank}", "use model.lora.rank=0 (full weights)"),
        *(
            (getattr(learner, name) > 1, f"learner.{name}={getattr(learner, name)}", f"use learner.{name}=1")
            for name in ("sequence_parallel", "tensor_parallel", "expert_parallel")
        ),
        (learner.compile, "learner.compile=true", "use learner.compile=false"),
        (learner.activation_offload, "learner.activation_offload=true", "use false"),
    ]
    for is_set, key, instead in refused:
        if is_set:
            raise ConfigError(
                f"{key} is not tested with a model that sees (model.path={model.path!r}); {instead}"
            )


def check_sees(model: ModelConfig, policy: ModelConfig) -> None:
    """Raise if the policy sees images, and a model that scores its tokens does not.

    Raises:
        ConfigError: so it is.
    """
    if not all(one.path for one in (model, policy)):
        return
    if sees_images(Path(policy.path)) and not sees_images(Path(model.path)):
        raise ConfigError(
            f"model.path={model.path!r} does not see images, and the policy does; use a model that sees"
        )


def check_replay(model: ModelConfig) -> None:
    """Raise if there are no experts for `rollout.replay_experts`.

    Raises:
        ConfigError: the model is dense.
    """
    if not has_experts(_description(model)):
        raise ConfigError(
            f"rollout.replay_experts=true needs a mixture of experts, and model.path={model.path!r} is "
            "dense; remove it"
        )


def check_head_on_sglang(model: ModelConfig) -> None:
    """Raise if SGLang would serve the model without an output head.

    Raises:
        ConfigError: it is a mixture of experts whose head is tied to its embeddings.
    """
    description = _description(model)
    if has_experts(description) and description.get("tie_word_embeddings"):
        raise ConfigError(
            f"model.path={model.path!r} ties its output head to its embeddings, and SGLang does not for "
            "mixtures of experts: every token would be equally likely; use rollout.backend=embedded, or a "
            "model with tie_word_embeddings=false"
        )


def check_balance(model: ModelConfig, *, has_routers: bool, has_score_head: bool) -> None:
    """Raise if `learner.balance_coefficient` has nothing to balance.

    Raises:
        ConfigError: the model is dense, or is trained on pairs.
    """
    if has_score_head:
        why = "reward models and critics are trained without it"
    elif not has_routers:
        why = f"model.path={model.path!r} is no mixture of experts"
    else:
        return
    raise ConfigError(f"learner.balance_coefficient cannot be used: {why}; remove it")


def check_value_head(model: ModelConfig) -> None:
    """Raise if a model cannot be a critic or a reward model: its head is to be one linear score.

    Raises:
        ConfigError: it sees images, classifies tokens, or has several labels.
    """
    if model.path and sees_images(Path(model.path)):
        raise ConfigError(
            f"model.path={model.path!r} sees images, which critics and reward models may not; use a text "
            "model"
        )
    classifier = find_own_head(model)
    if classifier is None:
        return
    if classifier.endswith(_TOKEN_CLASSIFIER):
        raise ConfigError(
            f"model.path={model.path!r} is a {classifier}, whose head has a bias, which is not "
            "supported; use a ...ForSequenceClassification, such as `agentrl rm` trains, or a "
            "causal model"
        )
    num_labels = len(_description(model).get("id2label") or _UNNAMED_LABELS)
    if num_labels > 1:
        raise ConfigError(
            f"model.path={model.path!r} has {num_labels} labels; a score or value needs exactly one"
        )


def check_dtype(model: ModelConfig) -> None:
    """Raise for a training dtype in which gradients underflow.

    Raises:
        ConfigError: it is float16.
    """
    if model.dtype == "float16":
        raise ConfigError(
            "model.dtype=float16 cannot be trained: small gradients underflow to 0; use bfloat16 or float32"
        )


def _description(model: ModelConfig) -> Mapping[str, Any]:
    return read_json(Path(model.path) / "config.json") if model.path else {}
