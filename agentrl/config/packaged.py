"""The configs that come with the package: their names, and what each says of itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

PACKAGE = "agentrl.configs"
WHOLE = ("", "recipes")
"""Folders of configs that a command runs as they are; the others hold parts, of which a `defaults` list picks one."""


@dataclass(frozen=True, slots=True)
class PackagedConfig:
    """name: as commands take it, `recipes/gsm8k_grpo`; is_whole: it runs as it is; text: the first line of its comment."""

    name: str
    is_whole: bool
    text: str

    @property
    def folder(self) -> str:
        return self.name.rpartition("/")[0]


def packaged_folder() -> Path:
    return Path(str(files(PACKAGE)))


def packaged_configs() -> list[PackagedConfig]:
    """Return all packaged configs: whole ones first, then the parts by folder."""
    folder = packaged_folder()
    found = [_read(path, path.relative_to(folder).with_suffix("").as_posix()) for path in folder.rglob("*.yaml")]
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
