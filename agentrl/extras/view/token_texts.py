"""Texts of single tokens, from the tokenizer's own files: what a token adds to the text, byte by byte."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Tokenizer

from agentrl.chat.growth import check_growth
from agentrl.data.folder_index import check_folder
from agentrl.errors import CheckpointError, ConfigError
from agentrl.tracking.seals import check_text

FILE = "tokenizer.json"
MAX_CHARS = 200
"""Of one token; a longer one is cut."""


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character with which byte-level tokenizers write bytes (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()


class TokenTexts:
    """Texts of the tokens of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        described: dict[str, Any] = json.loads(tokenizer.to_str())
        decoder = json.dumps(described.get("decoder"))
        self._is_byte_level = '"ByteLevel"' in decoder
        self._marks_spaces = "▁" in decoder
        self._added = {token["id"]: str(token["content"]) for token in described.get("added_tokens", ())}

    @classmethod
    def load(cls, folder: Path) -> TokenTexts:
        """Read `tokenizer.json` of a folder.

        Raises:
            ConfigError: there is none, or it is damaged.
        """
        file = folder / FILE
        try:
            check_growth(file)
            return cls(Tokenizer.from_file(str(file)))
        except Exception as error:
            raise ConfigError(f"{file} cannot be read as a tokenizer: {error}") from error

    def of(self, ids: Sequence[int]) -> list[str]:
        """Return what each token adds to the text; bytes that are no whole character as <0xE2>."""
        return [self._text(self._bytes(one)) for one in ids]

    def joined(self, ids: Sequence[int]) -> str:
        """Return the text of tokens in a row."""
        return b"".join(self._bytes(one) for one in ids).decode(errors="replace")

    def is_special(self, token: int) -> bool:
        """Return whether a token is one that no text is split into, such as the end of a turn."""
        return token in self._added

    def _bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return f"<{token}>".encode()
        if self._is_byte_level and all(char in _BYTES for char in piece):
            return bytes(_BYTES[char] for char in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return str(piece.replace("▁", " ") if self._marks_spaces else piece).encode()

    @staticmethod
    def _text(piece: bytes) -> str:
        try:
            return piece.decode()[:MAX_CHARS]
        except UnicodeDecodeError:
            return "".join(f"<0x{byte:02X}>" for byte in piece[:MAX_CHARS])


def find_tokenizer(run: Path) -> Path | None:
    """Return the folder of a run's tokenizer: its config's, or that of a policy that it wrote; None: none is
    here.

    Raises:
        CheckpointError: it was changed since the run wrote it, or the config is damaged.
    """
    places = [run / "policy"]
    places += [folder / "policy" for folder in sorted((run / "checkpoints").glob("*"), reverse=True)]
    config = read_config(run)
    model = config.get("model") or {}
    places += [Path(str(model[name])) for name in ("tokenizer_path", "path") if model.get(name)]
    found = next((place for place in places if (place / FILE).is_file()), None)
    if found is not None:
        check_folder(found, [FILE])
    return found


def read_config(run: Path) -> dict[str, Any]:
    """Return the run's resolved config as plain values; empty if there is none.

    Raises:
        CheckpointError: it is damaged.
    """
    file = next((run / name for name in ("config.yaml", "results.json") if (run / name).is_file()), None)
    if file is None:
        return {}
    check_text(file)
    try:
        found = _parsed(file.name, file.read_text(encoding="utf-8"))
    except (OSError, ValueError, AttributeError, RecursionError, yaml.YAMLError) as error:
        raise CheckpointError(f"{file} is damaged: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} is damaged: it contains no settings")
    return found


@lru_cache(maxsize=16)
def _parsed(name: str, text: str) -> Any:
    """Return the config in a file's text; a page asks for it at every step, and YAML takes long to read."""
    return (
        yaml.safe_load(text) if name == "config.yaml" else (json.loads(text).get("run") or {}).get("config")
    )
