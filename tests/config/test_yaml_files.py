"""Little text that stands for more than memory holds is refused, wherever YAML is read."""

import pytest

from agentrl.config.compose import load_config
from agentrl.errors import ConfigError
from parts.yaml_bombs import BOMB, TEXTS


@pytest.mark.parametrize("text", TEXTS)
def test_a_bomb_is_refused_in_one_line(tmp_path, text):
    content, words = TEXTS[text]
    (tmp_path / "run.yaml").write_text(content)
    with pytest.raises(ConfigError, match=words) as caught:
        load_config(str(tmp_path / "run.yaml"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "picked", ["- base", "- trainer: base", "- trainer@critic: base", "- override /trainer: base"]
)
def test_a_bomb_in_a_file_that_the_config_picks_is_refused(tmp_path, picked):
    for place in (tmp_path, tmp_path / "trainer"):
        place.mkdir(exist_ok=True)
        (place / "base.yaml").write_text(BOMB)
    (tmp_path / "run.yaml").write_text(f"defaults:\n  {picked}\n  - _self_\n")
    with pytest.raises(ConfigError, match=r"base\.yaml:\d+: invalid YAML: its aliases expand to"):
        load_config(str(tmp_path / "run.yaml"))


def test_aliases_of_a_usual_size_are_read(tmp_path):
    (tmp_path / "run.yaml").write_text("trainer: &t {seed: 7}\ncritic: {}\n")
    assert load_config(str(tmp_path / "run.yaml")).trainer.seed == 7
