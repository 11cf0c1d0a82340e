"""A package that an extra of pip brings and that is missing is answered when it is used, with the extra."""

import subprocess
import sys

import pytest

LOADS = """
import sys
sys.modules[{module!r}] = None
from agentrl.errors import ConfigError
from agentrl.registered import registered
try:
    registered({group!r})[{name!r}].load()
except ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("group", "name", "module", "line"),
    [
        ("agentrl.tools", "search", "bm25s", "'search' needs bm25s: pip install 'agentrl[search]'"),
        ("agentrl.tools", "search", "Stemmer", "'search' needs PyStemmer: pip install 'agentrl[search]'"),
        ("agentrl.trackers", "wandb", "wandb", "'wandb' needs wandb: pip install 'agentrl[wandb]'"),
        (
            "agentrl.trackers",
            "tensorboard",
            "tensorboard",
            "'tensorboard' needs tensorboard: pip install 'agentrl[tensorboard]'",
        ),
        (
            "agentrl.plugin_sources",
            "mcp_servers",
            "mcp",
            "'mcp_servers' needs mcp: pip install 'agentrl[mcp]'",
        ),
    ],
)
def test_the_extra_is_named(group: str, name: str, module: str, line: str) -> None:
    code = LOADS.format(module=module, group=group, name=name)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == line


def test_a_command_names_it_too(tmp_path) -> None:
    code = (
        "import sys; sys.modules['textual'] = None; sys.argv = ['agentrl', 'view', '--tui', sys.argv[1]]; "
        "sys.stdin = type('Terminal', (), {'isatty': lambda self: True})(); "
        "import agentrl.tracking.terminal as t; t.is_terminal = lambda *a: True; "
        "from agentrl.cli import main; main()"
    )
    (tmp_path / "metrics.jsonl").write_text("")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.strip().endswith("needs textual: pip install 'agentrl[tui]'")
