"""What `tracking.baselines` names is checked before anything starts."""

import re
from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl.extras.research.baselines import check_baselines
from parts.learner import write_tiny_model


@pytest.mark.parametrize(
    ("baselines", "words"),
    [
        (
            {"warm": "nowhere"},
            "tracking.baselines.warm='nowhere' does not exist; use the folder of a model, or remove all "
            "baselines",
        ),
        ({"warm": "modle"}, "did you mean 'model'?"),
        ({"warm": "."}, "is not the folder of a model: it has no config.json"),
        ({"warm": "empty"}, "has no weights: there is no *.safetensors in it"),
        ({"warm": "broken"}, "model.safetensors is not a safetensors file"),
        ({"ok": "model", "warm": "wide"}, "tracking.baselines.warm='wide' cannot replace model.path="),
    ],
)
def test_a_baseline_that_no_server_could_load(tmp_path, monkeypatch, baselines, words):
    monkeypatch.chdir(tmp_path)
    write_tiny_model("model", 40)
    write_tiny_model("wide", 40, hidden_size=64)
    for name in ("empty", "broken"):
        Path(name).mkdir()
        Path(name, "config.json").write_text("{}")
    Path("broken/model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0not json")
    with pytest.raises(ConfigError, match=re.escape(words)) as refused:
        check_baselines(baselines, policy=Path("model"))
    assert "\n" not in str(refused.value)
