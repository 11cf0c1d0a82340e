"""`agentrl play` of rows with tools that no template shows."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config
from typer.testing import CliRunner

from agentrl.chat.chat import Chat
from agentrl.chat.tiny import write_tiny_tokenizer
from agentrl.cli.app import app
from agentrl.errors import ConfigError
from cli.test_tools_shown import NEEDED

PLAIN = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
QUESTION = [{"role": "user", "content": "1+1"}]
ROW = {
    "data_source": "arithmetic",
    "prompt": QUESTION,
    "reward_model": {"ground_truth": "2"},
    "extra_info": {"tools_kwargs": {"calculator": {}}},
}
CONVERSATION = {"messages": [*QUESTION, {"role": "assistant", "content": "2"}], "tools": ["calculator"]}
CONFIG = """
data: {train_files: [rows.jsonl], val_files: [rows.jsonl]}
model: {path: model}
trainer: {run_dir: run, steps: 1}
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    write_tiny_tokenizer(folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(PLAIN)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    vocab_size = Chat.load(str(folder / "model")).vocab_size
    config = Qwen2Config(vocab_size=vocab_size, max_position_embeddings=512, **sizes, **heads)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    (folder / "plain.jsonl").write_text(json.dumps({**ROW, "extra_info": {}}) + "\n")
    (folder / "talks.jsonl").write_text(json.dumps(CONVERSATION) + "\n")
    (folder / "sft.yaml").write_text("{model: {path: model}, data: {train_files: [talks.jsonl]}}")
    return folder


@pytest.fixture(autouse=True)
def here(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)


def test_the_cure_cures(project):
    result = CliRunner().invoke(
        app, ["play", "config.yaml", "model.chat_template=smollm2"], input="#### 2\n\n#### 2\n\n"
    )
    assert result.exit_code == 0, (result.exception, result.output)
    assert "Tools: calculator(expression)" in result.output


def test_rows_without_tools_need_no_template_that_shows_them():
    result = CliRunner().invoke(
        app, ["play", "config.yaml", "data.train_files=[plain.jsonl]"], input="#### 2\n\n"
    )
    assert result.exit_code == 0, (result.exception, result.output)


@pytest.mark.parametrize("options", [(), ("--val",)])
def test_play_does_not_start(options):
    result = CliRunner().invoke(app, ["play", "config.yaml", *options])
    assert isinstance(result.exception, ConfigError), (result.exception, result.output)
    assert str(result.exception).startswith("rows:0: ")
    assert str(result.exception).endswith(NEEDED)
