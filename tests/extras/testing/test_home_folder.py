"""The home folder is meant in every argument of a command."""

from __future__ import annotations

import os
import subprocess
import sys

from hypothesis import strategies as st

texts = st.text(max_size=8).filter(
    lambda text: text != "???"
)  # how OmegaConf spells a value that must be given
texts |= st.sampled_from(
    [
        "1e3",
        "007",
        "null",
        "no",
        "${a}",
        "\\\\${",
        "\x85",
        " x ",
        "a: b",
        "#",
        "0x1F",
        "1_000",
        "12:30",
        ".5",
        "~",
    ]
)


def test_the_home_folder_is_meant_in_every_argument_of_a_command(tmp_path):
    """Shells leave `~` as it is in `--out=~/x` and within quotes."""
    environment = {**os.environ, "HOME": str(tmp_path)}
    for arguments in (["new", "tool", "first", "--out=~/mine"], ["new", "tool", "second", "--out", "~/mine"]):
        done = subprocess.run(
            [sys.executable, "-m", "agentrl.cli", *arguments],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "mine").glob("*.py")) == [
        "first.py",
        "second.py",
        "test_first.py",
        "test_second.py",
    ]
