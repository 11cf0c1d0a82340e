"""Rows that need tools and a template that shows none: no command plays or learns them, and one line says
what to set.
"""

import json
from pathlib import Path

import pytest
import ray
import torch
import yaml
from transformers import AutoModelForCausalLM, Qwen2Config
from typer.testing import CliRunner

from agentrl.chat.chat import Chat
from agentrl.chat.tiny import write_tiny_tokenizer
from agentrl.cli.app import app
from agentrl.errors import ConfigError
from parts.core_world import PLUGINS, SOURCE
from parts.played_server import played_sglang

PLAIN = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
QUESTION = [{"role": "user", "content": "1+1"}]
ROW = {
    "data_source": SOURCE,
    "prompt": QUESTION,
    "reward_model": {"ground_truth": "2"},
    "extra_info": {"tools_kwargs": {"calculator": {}}},
}
CONVERSATION = {"messages": [*QUESTION, {"role": "assistant", "content": "2"}], "tools": ["calculator"]}
CONFIG = {
    "data": {"train_files": ["rows.jsonl"], "val_files": ["rows.jsonl"]},
    "model": {"path": "model"},
    "reward": {"sources": {SOURCE: f"{PLUGINS}:Number"}},
    "rollout": played_sglang(),
    "trainer": {"run_dir": "run", "steps": 1},
}
CURE = "set model.chat_template=hermes or qwen2_5 or smollm2, or use react_agent"
NEEDED = f"tool_agent offers calculator: the chat template shows no tools; {CURE}"


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
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    (folder / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    (folder / "plain.jsonl").write_text(json.dumps({**ROW, "extra_info": {}}) + "\n")
    (folder / "talks.jsonl").write_text(json.dumps(CONVERSATION) + "\n")
    (folder / "sft.yaml").write_text("{model: {path: model}, data: {train_files: [talks.jsonl]}}")
    return folder


@pytest.fixture(autouse=True)
def here(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)


def refused(*arguments: str) -> str:
    """Run `agentrl ARGUMENTS`, which ends before anything is started; return the error's line."""
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, ConfigError), (result.exception, result.output)
    assert not ray.is_initialized()
    assert "\n" not in str(result.exception)
    return str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        (("train", "config.yaml"), "rows.jsonl: row 0 (line 1): "),
        (("train", "config.yaml", "data.train_files=[plain.jsonl]"), "rows.jsonl: row 0 (line 1): "),
        (
            ("eval", "config.yaml", "--model", "model", "--on", "rows.jsonl", "--out", "out"),
            "rows.jsonl: row",
        ),
    ],
)
def test_a_command_that_plays_does_not_start(arguments, place):
    line = refused(*arguments)
    assert line.startswith(place), line
    assert line.endswith(NEEDED), line
    forced = refused(*arguments[:2], "model.tool_format=hermes", *arguments[2:])
    assert f"shows no tools, so model.tool_format=hermes reads nothing; {CURE}" in forced
