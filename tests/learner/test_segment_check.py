"""Models whose packed segments the learner would compute otherwise than transformers are refused before
anything starts.
"""

import pytest
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    FalconH1Config,
    Gemma3TextConfig,
    GPT2Config,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    OlmoeConfig,
    OPTConfig,
    Qwen3Config,
    StableLmConfig,
)
from transformers.models.qwen3_5 import Qwen3_5TextConfig
from transformers.models.recurrent_gemma import RecurrentGemmaConfig
from typer.testing import CliRunner

from agentrl.chat.tiny import write_tiny_tokenizer
from agentrl.cli.app import app
from agentrl.config.learner import LearnerConfig
from agentrl.config.model import ModelConfig
from agentrl.config.schema import Config
from agentrl.controller.specs import check_critic
from agentrl.controller.teacher import check_teacher
from agentrl.errors import ConfigError
from agentrl.learner import attention
from agentrl.learner.segment_check import check_segments
from parts.learner import learner_spec, lone_learner

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
LFM2 = Lfm2Config(**SIZES, layer_types=["conv", "full_attention"] * 2)
STATE = "its layers carry state over from one packed row into the next"
REFUSED = [
    (LFM2, STATE),
    (
        FalconH1Config(
            **SIZES, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=16
        ),
        STATE,
    ),
    (
        Qwen3_5TextConfig(
            **SIZES,
            head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
        ),
        STATE,
    ),
    (RecurrentGemmaConfig(**SIZES, head_dim=16, lru_width=64, attention_window_size=8), STATE),
    (StableLmConfig(**SIZES), "StableLmAttention does not pass segments on"),
    (BertConfig(**SIZES), "BertSelfAttention is not causal"),
]
ALLOWED = [
    LlamaConfig(**SIZES),
    Qwen3Config(**SIZES),
    GPT2Config(vocab_size=300, n_embd=64, n_layer=2, n_head=4),
    MistralConfig(**SIZES, sliding_window=8),
    OPTConfig(vocab_size=300, hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4),
    Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=8),
    OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2),
    # As large as a model of a user's: the check takes no memory for its weights.
    Qwen3Config(hidden_size=8192, intermediate_size=29_568, num_hidden_layers=80, num_attention_heads=64),
]


@pytest.mark.parametrize(("config", "reason"), REFUSED, ids=lambda value: getattr(value, "model_type", ""))
def test_a_model_with_a_mixer_that_is_no_causal_attention_is_refused(config, reason):
    with pytest.raises(ConfigError, match=reason) as refusal:
        check_segments(config, ModelConfig(path="m"))
    assert str(refusal.value).startswith(f"model.path='m' ({config.model_type}) cannot be trained: ")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("config", ALLOWED, ids=lambda config: config.model_type)
def test_models_of_causal_attention_alone_are_allowed(config):
    check_segments(config, ModelConfig(path="m"))


def test_attention_that_the_learner_computes_otherwise_is_noticed(monkeypatch):
    monkeypatch.setattr(attention, "_causal", lambda *_: {"is_causal": True})  # forgets the window
    with pytest.raises(ConfigError, match="its attention is not what the learner computes"):
        check_segments(MistralConfig(**SIZES, sliding_window=8), ModelConfig(path="m"))


def test_code_of_a_model_that_raises_anything_is_one_line():
    with pytest.raises(ConfigError, match="does not run with the learner's attention"):
        check_segments(LlamaConfig(**SIZES | {"num_key_value_heads": 3}), ModelConfig(path="m"))


@pytest.fixture
def hybrid(tmp_path):
    folder = tmp_path / "hybrid"
    write_tiny_tokenizer(folder)
    LFM2.architectures = ["Lfm2ForCausalLM"]
    AutoModelForCausalLM.from_config(LFM2).save_pretrained(folder)
    return folder


@pytest.fixture
def plain(tmp_path):
    folder = tmp_path / "plain"
    write_tiny_tokenizer(folder)
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(folder)
    return folder


def test_every_role_refuses_it_before_ranks_start(hybrid, plain):
    of_hybrid, of_plain = ModelConfig(path=str(hybrid)), ModelConfig(path=str(plain))
    with pytest.raises(ConfigError, match=f"^critic: .*{STATE}"):
        check_critic(of_hybrid, of_plain, LearnerConfig())
    with pytest.raises(ConfigError, match=f"teacher: .*{STATE}"):
        check_teacher(of_hybrid, of_plain, LearnerConfig())
    with pytest.raises(ConfigError, match=STATE), lone_learner(learner_spec(of_hybrid)):
        pass


def test_a_run_refuses_it(hybrid, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1", "ground_truth": "2"}\n')
    keys = [f"model.path={hybrid}", "data.train_files=[rows.jsonl]"]
    (tmp_path / "run.yaml").write_text("{}\n")
    started = CliRunner().invoke(app, ["train", "run.yaml", *keys])
    assert isinstance(started.exception, ConfigError), started.output
    assert f"(Lfm2ForCausalLM) cannot be trained: {STATE}" in str(started.exception)


def test_models_of_all_roles_are_explained(hybrid):
    config = Config.model_validate(
        {
            "model": {"path": "m"},
            "algorithm": {"advantage": "gae"},
            "critic": {"model": {"path": str(hybrid)}},
        }
    )
    assert {role: model.path for role, model in config.learner_models.items()} == {
        "actor": "m",
        "critic": str(hybrid),
    }
