"""Outputs are looked at before the work that is to end in them."""

from __future__ import annotations

import os

import pytest

from agentrl.data.atomic_files import require_new_folder, require_writable_file
from agentrl.errors import ConfigError


@pytest.mark.parametrize("require", [require_writable_file, require_new_folder])
def test_a_place_below_a_file_is_refused(require, tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "new", tmp_path / "a/b/new"):
        require(path)
        assert not path.parent.joinpath("new").exists(), "nothing is made"
    with pytest.raises(ConfigError) as caught:
        require(tmp_path / "file/new")
    assert str(caught.value) == (
        f"'{tmp_path}/file/new' cannot be written: '{tmp_path}/file' is no folder that may be written"
    )


@pytest.mark.parametrize("require", [require_writable_file, require_new_folder])
def test_a_folder_that_may_not_be_written_is_refused(require, tmp_path, monkeypatch):
    # as on a read-only disk: root may write whatever the permissions of a folder say
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match=r"new' cannot be written: .* is no folder that may be written$"):
        require(tmp_path / "new")


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(ConfigError, match="is a folder; name a file in it"):
        require_writable_file(tmp_path)
    require_new_folder(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="exists and is not empty"):
        require_new_folder(tmp_path)
