"""What supervised training cannot learn is refused with one line, before anything starts."""

import json
from pathlib import Path

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, Lfm2Config, Qwen2Config
from typer.testing import CliRunner

from agentrl.chat.chat import Chat
from agentrl.chat.tiny import write_tiny_tokenizer
from agentrl.cli.app import app
from agentrl.errors import ConfigError
from agentrl.extras.supervised.config import SFTConfig
from agentrl.extras.supervised.loop import model_with_tokenizer

PLAIN = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}"""
QUESTION = [{"role": "user", "content": "1+1"}]
CONVERSATION = {"messages": [*QUESTION, {"role": "assistant", "content": "2"}], "tools": ["calculator"]}
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
HYBRID = Lfm2Config(
    **SIZES, vocab_size=300, num_hidden_layers=2, pad_token_id=0, layer_types=["conv", "full_attention"]
)
EXPERTS = GptOssConfig(
    **SIZES, vocab_size=300, num_hidden_layers=1, head_dim=8, num_local_experts=2, num_experts_per_tok=1
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(json.dumps(CONVERSATION) + "\n")
    Path("run.yaml").write_text("{model: {path: model}, data: {train_files: [rows.jsonl]}}")


def write_model(config: object) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained("model")
    write_tiny_tokenizer(Path("model"))


def refused(*words: str) -> str:
    """Run `agentrl WORDS`, which ends before anything is started; return the error's line."""
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, ConfigError), (result.exception, result.output)
    assert not ray.is_initialized()
    assert not list(Path().rglob("metrics.jsonl"))
    return str(result.exception)


@pytest.mark.parametrize("command", ["sft", "rm"])
@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (EXPERTS, "is a mixture of experts"),
        (HYBRID, "(Lfm2ForCausalLM) cannot be trained: its layers carry state over from one packed row"),
    ],
    ids=["experts", "hybrid"],
)
def test_models_that_would_learn_something_else(config, reason, command):
    write_model(config)
    assert reason in refused(command, "run.yaml")


@pytest.mark.parametrize("command", ["train", "sft", "rm"])
def test_their_explanation_refuses_them_too(command):
    write_model(HYBRID)
    line = refused("config", "explain", "run.yaml", f"--for={command}")
    assert "(Lfm2ForCausalLM) cannot be trained: its layers carry state over" in line


def test_float16():
    with pytest.raises(ConfigError, match=r"^model.dtype=float16 cannot be trained: "):
        model_with_tokenizer(SFTConfig.model_validate({"model": {"path": "anything", "dtype": "float16"}}))


def test_calls_that_the_prompt_does_not_show():
    write_tiny_tokenizer(Path("model"))
    vocab_size = Chat.load("model").vocab_size
    write_model(Qwen2Config(**SIZES, vocab_size=vocab_size, num_hidden_layers=1, max_position_embeddings=512))
    Path("model/chat_template.jinja").write_text(PLAIN)
    cure = "set model.chat_template=hermes or qwen2_5 or smollm2, or use react_agent"
    assert refused("sft", "run.yaml").endswith(f"the chat template shows no tools; {cure}")
