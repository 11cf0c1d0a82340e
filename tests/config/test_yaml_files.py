"""Little text that stands for more than memory holds is refused, wherever YAML is read."""

import pytest

from agentrl.config.compose import load_config
from agentrl.errors import ConfigError, PluginError
from agentrl.extras.testing.one_row.models import read_script
from agentrl.extras.verl.importing.source import read_source
from agentrl.extras.verl.loading import read_entries

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
TEXTS = {
    "aliases": (BOMB, "expand to more than 1,000,000 characters"),
    "long texts": (
        f"a: &a {'x' * 10_000}\nb: [{', '.join(['*a'] * 200)}]\n",
        "expand to more than 1,000,000 characters",
    ),
    "itself": ("a: &a [*a]\n", "an anchor contains an alias of itself"),
    "depth": ("a: " + "[" * 20_000 + "]" * 20_000 + "\n", "nested too deeply"),
    "less depth": ("a: " + "[" * 100 + "]" * 100 + "\n", "nested too deeply, at most 50 levels"),
}
READERS = {
    "config": (load_config, ConfigError),
    "import": (lambda path: read_source(path, []), ConfigError),
    "tools": (lambda path: read_entries(path, "tools", option="verl_tools"), PluginError),
    "script": (read_script, ConfigError),
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("reader", READERS)
def test_a_bomb_is_refused_in_one_line(tmp_path, reader, text):
    content, words = TEXTS[text]
    (tmp_path / "run.yaml").write_text(content)
    read, kind = READERS[reader]
    with pytest.raises(kind, match=words) as caught:
        read(str(tmp_path / "run.yaml"))
    if reader != "script":
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
