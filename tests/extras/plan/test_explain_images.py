"""What `agentrl config explain` says of images, by the settings in the model's folder."""

import json

import pytest

from agentrl.config.schema import Config
from agentrl.extras.plan.explain import explain, find_warnings

SETTINGS = {"patch_size": 14, "merge_size": 2, "size": {"longest_edge": 1280 * 28 * 28}}


def config(folder, *, prompt=4096, **rollout):
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    model = {"path": str(folder)}
    return Config.model_validate({"model": model, "data": {"max_prompt_tokens": prompt}, "rollout": rollout})


def test_the_largest_image(tmp_path):
    lines = [" ".join(line.split()) for line in explain(config(tmp_path)).splitlines()]
    [line] = [line for line in lines if line.startswith("images ")]
    # 1280 * 28 * 28 pixels of three colors in float32, twice
    assert "at most 1,280 tokens (28 x 28 pixels each), and 24 MB of pixels" in line


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"prompt": 1279}, "an image may take 1,280 tokens, and data.max_prompt_tokens is 1,279"),
        ({"urls": ["http://127.0.0.1:1"]}, "SGLang keeps what the tower of the model it began with made"),
    ],
    ids=["a short prompt", "attached servers"],
)
def test_warnings(tmp_path, changes, warning):
    def found(**changes):
        return [line for line in find_warnings(config(tmp_path, **changes)) if "image" in line]

    assert found() == []
    [line] = found(**changes)
    assert line.startswith(warning)
