"""Little text that stands for more than memory holds is refused by the readers of extras, too."""

import pytest

from agentrl.errors import ConfigError, PluginError
from agentrl.extras.testing.one_row.models import read_script
from agentrl.extras.verl.importing.source import read_source
from agentrl.extras.verl.loading import read_entries
from parts.yaml_bombs import TEXTS

READERS = {
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
