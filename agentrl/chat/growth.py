"""A bound on how much a tokenizer makes of a text, from its `tokenizer.json`, before the library reads it.

A few replacements in sequence double a text each: sixty of them need more memory than there is, and the
library then ends the process. The factors of all parts are multiplied.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError

MAX_GROWTH = 1_000
"""Bytes that a byte of text may become. Published tokenizers stay below 100."""
MAX_TOKEN = 10_000
"""Characters of one token. The longest ones of published tokenizers are runs of a thousand spaces."""
_PARTS = ("normalizer", "pre_tokenizer", "decoder")
_ANCHOR = re.compile(r"\(\?|\\[bBAzZGK]|[\^$]")
_SEQUENCES = ("normalizers", "pretokenizers", "decoders")


def check_growth(path: Path) -> None:
    """Raise if the tokenizer at `path` may make very much of a text.

    Raises:
        ConfigError: it may, or the file is no JSON object.
    """
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
        growth = max(math.prod(_factors(described.get(part))) for part in _PARTS)
        longest = max(map(len, _tokens(described)), default=0)
    except (ValueError, RecursionError, AttributeError, TypeError, LookupError) as error:
        raise ConfigError(f"{path} is not a tokenizer: {error}") from error
    if growth > MAX_GROWTH:
        raise ConfigError(
            f"{path}: its normalizer, pre-tokenizer or decoder may make a text {growth:.3g} times as long; "
            f"at most {MAX_GROWTH:,}"
        )
    if longest > MAX_TOKEN:
        raise ConfigError(f"{path}: a token has {longest:,} characters; at most {MAX_TOKEN:,}")


def _factors(part: Mapping[str, Any] | None) -> Iterator[float]:
    """Yield for each step of a part how many bytes a byte may become, at least 1."""
    if part is None:
        return
    for key in _SEQUENCES:
        for inner in part.get(key, ()):
            yield from _factors(inner)
    match part["type"]:
        case "Replace":
            yield _of_replacement(part["pattern"], len(part["content"].encode()))
        case "Prepend":
            yield 1 + len(part["prepend"].encode())
        case "Precompiled":
            yield 1 + _longest_mapped(part["precompiled_charsmap"])
        case "ByteLevel":
            yield 2  # a byte beyond ASCII is written as a character of two bytes
        case "Metaspace":
            yield 4
        case _:
            yield 1


def _of_replacement(pattern: Mapping[str, str], num_bytes: int) -> float:
    if "Regex" in pattern:
        return 1 + num_bytes if _may_be_empty(pattern["Regex"]) else max(1, num_bytes)
    replaced = len(pattern["String"].encode())
    return max(1, num_bytes / replaced) if replaced else 1 + num_bytes


def _may_be_empty(pattern: str) -> bool:
    """Return whether a regular expression may match between two characters."""
    if _ANCHOR.search(pattern):
        return True
    try:
        return re.search(pattern, "") is not None
    except (re.error, OverflowError, RecursionError):  # the library has another dialect
        return True


def _longest_mapped(charsmap: str) -> int:
    """Return the bytes of the longest text in SentencePiece's map of characters."""
    data = base64.b64decode(charsmap)
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return max(map(len, texts.split(b"\0")), default=0)


def _tokens(described: Mapping[str, Any]) -> Iterator[str]:
    vocabulary = described["model"].get("vocab", ())
    yield from vocabulary if isinstance(vocabulary, dict) else (piece for piece, _ in vocabulary)
    yield from (token["content"] for token in described.get("added_tokens", ()))
