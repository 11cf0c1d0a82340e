"""A full disk is one line that names the folder, whatever raised it and however deep."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import trio

from agentrl.cli import disk
from agentrl.cli.disk import full_disk

LINE = "disk full: no space is left on the file system{}; free space there, or choose another folder"


def test_an_error_names_its_file() -> None:
    error = OSError(errno.ENOSPC, "No space left on device", "/data/run/rows.parquet")
    assert full_disk(error, []) == LINE.format(" of '/data/run/rows.parquet'")


async def test_it_is_found_in_groups_and_causes() -> None:
    async def write() -> None:
        try:
            with open("/dev/full", "w") as file:
                file.write("a")
        except OSError as error:
            raise RuntimeError("could not") from error

    with pytest.raises(ExceptionGroup) as caught:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
    assert str(full_disk(caught.value, [])).startswith("disk full: ")


@pytest.mark.parametrize(
    "error",
    [ValueError("x"), OSError(errno.EACCES, "no", "/root"), ExceptionGroup("", [KeyError("a")])],
    ids=str,
)
def test_other_errors_are_not_its_business(error: Exception) -> None:
    assert full_disk(error, ["/tmp/x"]) is None


def test_an_error_of_writing_names_the_folders_of_the_command_that_have_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(disk, "_is_full", lambda place: place == tmp_path)
    assert full_disk(error, ["train", "quickstart", f"trainer.run_dir={tmp_path}/not/there"]) == LINE.format(
        f" of {str(tmp_path)!r}"
    )
    monkeypatch.setattr(disk, "_is_full", lambda place: False)
    assert full_disk(error, []) == LINE.format("")
