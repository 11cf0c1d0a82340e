"""What is said of a teacher before a run."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from agentrl.config.model import ModelConfig
from agentrl.config.schema import Config
from agentrl.extras.plan.explain import explain
from parts.learner import tiny_sizes

VOCABULARY = 23


# ------------------------------------------------------------------------------------------ log-probabilities


def write_model(folder, seed, **changes):
    torch.manual_seed(seed)
    sizes = tiny_sizes(VOCABULARY, **changes)
    AutoModelForCausalLM.from_config(Qwen2Config(**sizes), dtype=torch.float32).save_pretrained(folder)
    return ModelConfig(path=str(folder))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "-1 x log(policy / teacher) of the token, added to the advantage"),
        ({"gamma": 0.5}, "times 0.5 each, of later ones"),
        ({"with_rewards": False}, "the teacher's alone; rewards are only reported"),
    ],
)
def test_explain_says_what_the_teacher_does(changes, said):
    config = Config.model_validate({"algorithm": {"distillation": {"teacher": "t", **changes}}})
    assert said in explain(config)


def test_explain_counts_the_teachers_memory_and_warns_of_keys_without_effect(tmp_path):
    write_model(tmp_path / "policy", 0)
    large = write_model(tmp_path / "teacher", 0, hidden_size=512, num_hidden_layers=6, intermediate_size=4096)
    base = {"model": {"path": str(tmp_path / "policy")}}
    taught = Config.model_validate({**base, "algorithm": {"distillation": {"teacher": large.path}}})
    assert "the teacher's weights" in explain(taught)
    assert "the teacher's weights" not in explain(Config.model_validate(base))
    unused = Config.model_validate({"algorithm": {"distillation": {"gamma": 0.5}}})
    assert "algorithm.distillation have no effect without a teacher" in explain(unused)
