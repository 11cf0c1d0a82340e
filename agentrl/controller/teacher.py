"""The teacher of on-policy distillation: checks before the run."""

from __future__ import annotations

from pathlib import Path

from agentrl.chat.codec import load_tokenizer
from agentrl.chat.vocabulary import vocabulary_difference
from agentrl.config.learner import LearnerConfig
from agentrl.config.model import ModelConfig
from agentrl.data.model_source import resolve_model
from agentrl.errors import ConfigError, concerning
from agentrl.learner.architecture import check_policy, check_sees
from agentrl.learner.layout import check_folder
from agentrl.rollout.limits import num_ids_of

KEY = "algorithm.distillation.teacher"


def check_teacher(teacher: ModelConfig, policy: ModelConfig, learner: LearnerConfig) -> None:
    """Check before any rank starts that `teacher` can score the tokens of `policy`, a resolved model.

    Raises:
        ConfigError: the teacher does not exist, is no causal language model, does not see what the policy
            sees, has another tokenizer, has no embedding for an id that the policy may sample, or ranks
            cannot divide it.
    """
    with concerning(KEY):
        teacher = resolve_model(teacher)
        check_policy(teacher)
        check_sees(teacher, policy)
        check_folder(teacher, learner)
        _check_tokenizer(Path(teacher.path), Path(policy.tokenizer_path or policy.path))
    own, its = num_ids_of(policy), num_ids_of(teacher)
    if own is not None and its is not None and its < own:
        raise ConfigError(
            f"{KEY}={teacher.path!r} has a vocabulary of {its:,} ids, and the policy may sample {own:,}; use "
            "a teacher with at least as many"
        )


def _check_tokenizer(teacher: Path, policy: Path) -> None:
    difference = vocabulary_difference(load_tokenizer(teacher), wanted=load_tokenizer(policy))
    if difference is not None:
        raise ConfigError(
            f"{str(teacher)!r} has another tokenizer than the policy: {difference}; use a teacher of the "
            "same family"
        )
