"""A plugin that imports a module of an extra by its former name is told the new one."""

import pytest

from agentrl.errors import PluginError
from agentrl.plugins import load_plugins


@pytest.mark.parametrize(
    ("former", "now"),
    [
        ("agentrl.boxes.pool", "agentrl.extras.boxes"),
        ("agentrl.rewards.gsm8k", "agentrl.extras.answers.gsm8k"),
        ("agentrl.tools.python", "agentrl.extras.sandbox.python_tool"),
    ],
)
def test_a_former_name_is_answered_with_the_new_one(tmp_path, former: str, now: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"import {former}\n")
    with pytest.raises(PluginError, match=rf"; it is {now} now \(.*mine.py:1\)$"):
        load_plugins([str(file)])
