"""Frozen models are checked before a run: they exist, their servers answer, and they have the policy's
tokenizer.
"""

import json
import struct

import pytest

from agentrl.chat.tiny import write_tiny_tokenizer
from agentrl.config.agent import AgentConfig
from agentrl.config.distillation import DistillationConfig
from agentrl.config.model import ModelConfig
from agentrl.errors import ConfigError
from agentrl.rollout.frozen_models import resolve_opponents, resolve_teacher

NOWHERE = "http://127.0.0.1:9"
"""Nobody listens on the port of `discard`."""


@pytest.fixture
def policy(tmp_path):
    write_tiny_tokenizer(tmp_path / "policy")
    return ModelConfig(path=str(tmp_path / "policy"))


def other_tokenizer(folder):
    write_tiny_tokenizer(folder)
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace("<|im_end|>", "<|end|>"))
    return str(folder)


def checks(**servers):
    """Return the check of a teacher and of an opponent with these servers, with the key that errors name."""
    given = servers if "model" in servers else {"urls": [NOWHERE], **servers}
    return {
        "algorithm.distillation.servers": lambda policy: (
            resolve_teacher(DistillationConfig(servers=given), policy).servers
        ),
        "agent.opponents.old": lambda policy: resolve_opponents(
            AgentConfig(opponents={"old": given}), policy
        ).opponents["old"],
    }


def write_model(folder, *, vocab_size=300):
    write_tiny_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": vocab_size}))
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    return str(folder)


@pytest.mark.parametrize("key", checks())
def test_a_model_to_start_is_found_and_compared(policy, tmp_path, key, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "old")
    resolved = checks(model={"path": "old"}, num_servers=2)[key](policy)
    assert (resolved.model.path, resolved.num_started) == (str(tmp_path / "old"), 2)

    (tmp_path / "policy" / "config.json").write_text(json.dumps({"vocab_size": 400}))
    with pytest.raises(ConfigError) as small:
        checks(model={"path": "old"})[key](policy)
    assert str(small.value).startswith(
        f"{key}: 'old' has a vocabulary of 300 ids, and the policy may sample 400"
    )

    (tmp_path / "other").mkdir()
    write_model(tmp_path / "other", vocab_size=400)
    other_tokenizer(tmp_path / "other")
    with pytest.raises(ConfigError, match=f"{key}: 'other' has another tokenizer than the policy: token"):
        checks(model={"path": "other"})[key](policy)
    with pytest.raises(ConfigError, match=f"{key}: model.path='/no/where' cannot be loaded: no such folder"):
        checks(model={"path": "/no/where"})[key](policy)


@pytest.mark.parametrize("key", checks())
def test_another_tokenizer_is_refused_and_the_same_is_not(policy, tmp_path, key):
    write_tiny_tokenizer(tmp_path / "same")
    checks(tokenizer=str(tmp_path / "same"))[key](policy)
    with pytest.raises(ConfigError) as caught:
        checks(tokenizer=other_tokenizer(tmp_path / "other"))[key](policy)
    assert str(caught.value).startswith(
        f"{key}: the server {NOWHERE} has another tokenizer than the policy: token"
    )
    assert "'<|end|>' instead of '<|im_end|>'; use a model of the same family" in str(caught.value)


@pytest.mark.parametrize("key", checks())
def test_what_cannot_be_compared_is_one_line_with_the_cure(policy, tmp_path, key, monkeypatch):
    with pytest.raises(ConfigError, match=rf"{key}\.urls: .* {NOWHERE} does not answer .*start it first"):
        checks()[key](policy)
    with pytest.raises(ConfigError, match=f"no tokenizer.json here; set {key}.tokenizer to a folder"):
        checks(tokenizer=str(tmp_path / "none"))[key](policy)
    monkeypatch.delenv("FROZEN_KEY", raising=False)
    with pytest.raises(ConfigError, match=f"{key}.api_key_env='FROZEN_KEY'"):
        checks(api_key_env="FROZEN_KEY")[key](policy)


def test_without_servers_nothing_is_asked(policy):
    assert resolve_teacher(DistillationConfig(), policy) == DistillationConfig()
    assert resolve_opponents(AgentConfig(), policy) == AgentConfig()
