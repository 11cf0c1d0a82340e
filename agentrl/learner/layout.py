"""Checks of whether ranks can compute a model, and divide it as the config says, without its weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.config.learner import LearnerConfig
from agentrl.config.model import ModelConfig
from agentrl.config.model_kind import sees_images
from agentrl.errors import ConfigError
from agentrl.learner.architecture import check_experts, check_vision
from agentrl.learner.attention import SEGMENT_SDPA
from agentrl.learner.experts import check_expert_parallel
from agentrl.learner.sequence_parallel import check_sequence_parallel
from agentrl.learner.tensor_parallel import check_tensor_parallel
from agentrl.plugins.sources import import_source

if TYPE_CHECKING:  # takes seconds to import; the controller needs only the names of this module
    from transformers import PretrainedConfig


def check_layout(config: PretrainedConfig, model: ModelConfig, learner: LearnerConfig) -> None:
    """Raise if ranks cannot divide the model's microbatches, matrices or experts as `learner` says.

    Raises:
        ConfigError: its heads, layers or experts cannot be divided evenly, or another option conflicts.
    """
    check_experts(model, learner)
    check_vision(model, learner)
    check_expert_parallel(config, model.path, learner.expert_parallel)
    check_tensor_parallel(config, learner.tensor_parallel, divides_experts=learner.expert_parallel > 1)
    check_sequence_parallel(config, learner.sequence_parallel, tensor_parallel=learner.tensor_parallel)
    if learner.sequence_parallel > 1 and model.attention not in ("auto", SEGMENT_SDPA):
        raise ConfigError(
            f"learner.sequence_parallel={learner.sequence_parallel} has its own attention, and "
            f"model.attention={model.attention} needs whole microbatches; use model.attention=auto"
        )
    if learner.tensor_parallel > 1 and model.lora.rank > 0 and model.lora.dropout > 0:
        raise ConfigError(
            f"model.lora.dropout={model.lora.dropout:g} draws other numbers on each of the ranks that "
            f"learner.tensor_parallel={learner.tensor_parallel} lets compute one adapter; use "
            "model.lora.dropout=0"
        )


def check_folder(model: ModelConfig, learner: LearnerConfig) -> None:
    """Run all checks of the model in `model.path`, before any rank starts and without reading a weight.

    Raises:
        ConfigError: the model does not exist, its architecture cannot be trained, or ranks cannot divide it.
    """
    check_experts(model, learner)
    check_vision(model, learner)
    config = check_architecture(model)
    if learner.num_replicas > 1 or learner.expert_parallel > 1:
        check_layout(config, model, learner)


def check_architecture(model: ModelConfig) -> PretrainedConfig:
    """Return the config of the model in `model.path`, of which the learner computes packed segments.

    Raises:
        ConfigError: the model does not exist, or its architecture cannot be trained (see `check_segments`).
        PluginError: `model.external_lib` cannot be imported.
    """
    from transformers import AutoConfig

    from agentrl.learner.segment_check import check_segments

    if model.external_lib is not None:
        import_source(model.external_lib)
    try:
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.path={model.path!r} has no config that transformers reads: {error}"
        ) from error
    if not sees_images(Path(model.path)):
        check_segments(config, model)
    return config
