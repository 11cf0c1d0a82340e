"""Reading of the policy (or reward model) of a checkpoint in one process without ranks, for export.

The model is whole and on the CPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedModel,
)

from agentrl.algorithms.vision import find_vision
from agentrl.chat.template import read_json
from agentrl.config.model import ModelConfig
from agentrl.config.model_kind import sees_images
from agentrl.errors import CheckpointError
from agentrl.learner.checkpoint import DESCRIPTION, FAILURES, reason
from agentrl.learner.lora import add_adapter
from agentrl.learner.model import Policy, as_policy, outline_module
from agentrl.learner.score_head import ScoreHead, attach_score_head
from agentrl.learner.stored_state import PlainPlanner, PlainReader
from agentrl.plugins.sources import import_source
from agentrl.servers.weight_names import find_pieces

_ATTENTION = "sdpa"


def needs_base(model: ModelConfig, folder: Path) -> bool:
    """Return whether what `Learner.save` wrote into `folder` lacks the weights that were not trained: those
    below a LoRA adapter, or the tower for images.
    """
    return model.lora.rank > 0 or sees_images(folder / DESCRIPTION)


def read_policy(model: ModelConfig, folder: Path) -> Policy:
    """Return the policy that `Learner.save` wrote into `folder`; a reward model with its head.

    Args:
        model: the learner's config. `model.path` is read only if `needs_base`.

    Raises:
        ConfigError: the base model cannot be loaded.
        CheckpointError: the checkpoint is of another model, or damaged.
    """
    dtype = getattr(torch, model.dtype)
    if model.lora.rank > 0:
        head = _score_head(folder / DESCRIPTION)
        found = outline_module(model, _ATTENTION, dtype, from_scratch=None, has_score_head=head is not None)
        module = found.module
        class_name, pieces = type(module).__name__, find_pieces(module)
        add_adapter(module, model.lora, dtype=torch.float32)
        if head is not None:
            attach_score_head(module, head, dtype=torch.float32)
        found.fill(torch.device("cpu"))
    elif needs_base(model, folder):
        found = outline_module(model, _ATTENTION, dtype, from_scratch=None)
        module = found.module
        class_name, pieces = type(module).__name__, find_pieces(module)
        vision = find_vision(module)
        assert vision is not None, "a model that sees"
        vision.tower.requires_grad_(False)
        found.fill(torch.device("cpu"))
    else:
        module = _empty_module(model, folder / DESCRIPTION, dtype)
        class_name, pieces = type(module).__name__, find_pieces(module)
    _read(_trained(module), folder)
    return as_policy(module, class_name, _ATTENTION, torch.device("cpu"), dtype, pieces)


def _empty_module(model: ModelConfig, description: Path, dtype: torch.dtype) -> PreTrainedModel:
    if model.external_lib is not None:
        import_source(model.external_lib)
    config = AutoConfig.from_pretrained(description, trust_remote_code=model.trust_remote_code)
    kind = AutoModelForCausalLM if _score_head(description) is None else AutoModelForSequenceClassification
    with torch.device("meta"):
        module = kind.from_config(config, dtype=dtype, trust_remote_code=model.trust_remote_code)
    module.to_empty(device="cpu")
    module.tie_weights()  # to_empty allocated tied weights separately
    if (description / "generation_config.json").is_file():
        module.generation_config = GenerationConfig.from_pretrained(description)
    return module


def _score_head(description: Path) -> ScoreHead | None:
    """Return the head of a reward model; None for a policy."""
    config = read_json(description / "config.json")
    is_classifier = any(
        name.endswith("ForSequenceClassification") for name in config.get("architectures") or []
    )
    return ScoreHead(config.get("pad_token_id")) if is_classifier else None


def _trained(module: PreTrainedModel) -> Mapping[str, Tensor]:
    """Return the tensors that a checkpoint contains: all but frozen ones, tied weights under every name."""
    frozen = {
        name for name, weight in module.named_parameters(remove_duplicate=False) if not weight.requires_grad
    }
    return {name: tensor for name, tensor in module.state_dict().items() if name not in frozen}


def _read(tensors: Mapping[str, Tensor], folder: Path) -> None:
    try:
        with warnings.catch_warnings():
            # The warning is expected: this is a single process.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(
                {"model": dict(tensors)},
                storage_reader=PlainReader(folder),
                planner=PlainPlanner(),
                no_dist=True,
            )
    except FAILURES as error:
        raise CheckpointError(f"the policy in {folder} could not be read: {reason(error)}") from error
