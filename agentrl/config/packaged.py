"""The packaged configs: their names and descriptions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

PACKAGE = "agentrl.configs"
WHOLE = ("", "recipes")
"""Folders of complete configs. All other folders contain parts, which a `defaults` list selects."""


@dataclass(frozen=True, slots=True)
class PackagedConfig:
    """One packaged config.

    Attributes:
        name: as commands accept it, `recipes/gsm8k_grpo`.
        is_whole: the config can be run by itself.
        text: the first line of its leading comment.
    """

    name: str
    is_whole: bool
    text: str

    @property
    def folder(self) -> str:
        return self.name.rpartition("/")[0]


def packaged_folder() -> Path:
    return Path(str(files(PACKAGE)))


def packaged_configs() -> list[PackagedConfig]:
    """Return all packaged configs: complete ones first, then the parts by folder."""
    folder = packaged_folder()
    found = [
        _read(path, path.relative_to(folder).with_suffix("").as_posix()) for path in folder.rglob("*.yaml")
    ]
    return sorted(found, key=lambda config: (not config.is_whole, config.folder, config.name))


def _read(path: Path, name: str) -> PackagedConfig:
    comment = _leading_comment(path.read_text(encoding="utf-8"))
    return PackagedConfig(name, name.rpartition("/")[0] in WHOLE, next(comment, ""))


def _leading_comment(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if not line.startswith("#"):
            return
        if not line.startswith("# @package"):
            yield line.lstrip("# ").rstrip()
