"""Servers with frozen models are checked before a run: they answer, and have the policy's tokenizer."""

import pytest
from agentrl.controller.frozen_servers import check_opponents, check_teacher_servers

from agentrl.chat.tiny import write_tiny_tokenizer
from agentrl.config.agent import AgentConfig
from agentrl.config.distillation import DistillationConfig
from agentrl.config.model import ModelConfig
from agentrl.errors import ConfigError

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
    given = {"urls": [NOWHERE], **servers}
    return {
        "algorithm.distillation.servers": lambda policy: check_teacher_servers(
            DistillationConfig(servers=given), policy
        ),
        "agent.opponents.old": lambda policy: check_opponents(AgentConfig(opponents={"old": given}), policy),
    }


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
    with pytest.raises(ConfigError, match=f"{key}: the server {NOWHERE} does not answer .*start it first"):
        checks()[key](policy)
    with pytest.raises(ConfigError, match=f"no tokenizer.json here; set {key}.tokenizer to a folder"):
        checks(tokenizer=str(tmp_path / "none"))[key](policy)
    monkeypatch.delenv("FROZEN_KEY", raising=False)
    with pytest.raises(ConfigError, match=f"{key}.api_key_env='FROZEN_KEY'"):
        checks(api_key_env="FROZEN_KEY")[key](policy)


def test_without_servers_nothing_is_asked(policy):
    check_teacher_servers(DistillationConfig(), policy)
    check_opponents(AgentConfig(), policy)
