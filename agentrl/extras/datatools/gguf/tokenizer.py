"""The tokenizer of a GGUF file: its own vocabulary and merges, and the splitting that its name stands for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.pre_tokenizers import PreTokenizer

from agentrl.errors import ConfigError
from agentrl.extras.datatools.gguf.file import GGUFFile


@dataclass(frozen=True, slots=True)
class Splitting:
    """What a tokenizer does to a text before its merges.

    Attributes:
        pre_tokenizer: makes the pieces that no token crosses.
        is_normalized: texts are put into the normal form NFC.
        ignores_merges: a piece that is a token is that token, whatever the merges make of it.
        adds_bos: a text begins with the bos token, unless the file says otherwise.
    """

    pre_tokenizer: Callable[[], PreTokenizer]
    is_normalized: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False


def _gpt2() -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _words(digits: str) -> Callable[[], PreTokenizer]:
    """Split as Qwen 2 and Llama 3 do, which differ in how many digits a piece has."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_LLAMA3 = Splitting(_words(r"\p{N}{1,3}"), ignores_merges=True, adds_bos=True)

SPLITTINGS = {
    "gpt-2": Splitting(_gpt2),
    "smollm": Splitting(_single_digits),
    "starcoder": Splitting(_single_digits),
    "qwen2": Splitting(_words(r"\p{N}"), is_normalized=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}
"""By `tokenizer.ggml.pre`. llama.cpp knows more names; a wrong splitting would go unnoticed, so that only
those are known whose originals could be compared.
"""

_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Name in transformers: name in the file."""

_MORE_ENDS = ("eot", "eom")
"""Tokens that end a turn or a message, besides eos."""

_TEMPLATE_KEY = re.compile(r"tokenizer\.chat_template(?:\.(\w+))?")


@dataclass(frozen=True, slots=True)
class ImportedTokenizer:
    """A tokenizer with what transformers stores beside it.

    Attributes:
        special_ids: ids by name (`bos`, `eos`, `unk`, `pad`); names that the file does not have are missing.
        end_ids: ids that end a generation, eos first.
        templates: chat templates by name; the main one is `default`.
        splitting: its name.
    """

    tokenizer: Tokenizer
    special_ids: dict[str, int]
    end_ids: list[int]
    templates: dict[str, str]
    splitting: str
    num_merges: int


def read_tokenizer(file: GGUFFile) -> ImportedTokenizer:
    """Build the tokenizer of a file, and compare every token id and merge with the file.

    Raises:
        ConfigError: the kind of tokenizer or its splitting is unknown, or its parts contradict each other.
    """
    model = file.required("tokenizer.ggml.model", str)
    if model != "gpt2":
        raise ConfigError(
            f"{file.path}: tokenizer.ggml.model {model!r} cannot be imported; known: gpt2 (byte-level BPE)"
        )
    name = file.required("tokenizer.ggml.pre", str)
    if name not in SPLITTINGS:
        raise ConfigError(
            f"{file.path}: tokenizer.ggml.pre {name!r} cannot be imported; known: {', '.join(SPLITTINGS)}"
        )
    tokens, merges = _list(file, "tokens", str), _list(file, "merges", str)
    kinds = _list(file, "token_type", int)
    if len(kinds) != len(tokens):
        raise ConfigError(f"{file.path} has {len(tokens)} tokens, but {len(kinds)} token types")
    tokenizer = _build(file, SPLITTINGS[name], tokens, kinds, merges)
    special_ids = {
        short: id for short, long in _NAMED.items() if (id := _token_id(file, long, len(tokens))) is not None
    }
    if "eos" not in special_ids:
        raise ConfigError(f"{file.path} has no tokenizer.ggml.eos_token_id")
    _add_ends(file, SPLITTINGS[name], tokenizer, special_ids)
    more = (_token_id(file, end, len(tokens)) for end in _MORE_ENDS)
    end_ids = list(dict.fromkeys([special_ids["eos"], *(id for id in more if id is not None)]))
    return ImportedTokenizer(tokenizer, special_ids, end_ids, _templates(file), name, len(merges))


def _build(
    file: GGUFFile, splitting: Splitting, tokens: list[str], kinds: list[int], merges: list[str]
) -> Tokenizer:
    # A converter fills the vocabulary up to the rows of the embedding; the model's own tokenizer ends before.
    num_fill = sum(
        1
        for _ in takewhile(
            lambda id: kinds[id] == TokenType.UNUSED and tokens[id] == f"[PAD{id}]",
            reversed(range(len(tokens))),
        )
    )
    vocab = {token: id for id, token in enumerate(tokens[: len(tokens) - num_fill])}
    if len(vocab) != len(tokens) - num_fill:
        raise ConfigError(f"{file.path} has {len(tokens) - num_fill - len(vocab)} tokens twice")
    added = {id for id in vocab.values() if kinds[id] in (TokenType.CONTROL, TokenType.USER_DEFINED)}
    # Tokens added behind the vocabulary are no part of it: no merge and no splitting may make one.
    num_own = 1 + max((id for id in vocab.values() if id not in added), default=-1)
    pairs = [_pair(file, merge) for merge in merges]
    try:
        bpe = models.BPE(
            vocab={token: id for token, id in vocab.items() if id < num_own},
            merges=pairs,
            ignore_merges=splitting.ignores_merges,
        )
    except Exception as error:  # boundary: the library raises bare Exception for a merge of unknown tokens
        raise ConfigError(f"{file.path}: vocabulary and merges contradict each other: {error}") from error
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = splitting.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    if splitting.is_normalized:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens(
        [
            AddedToken(tokens[id], special=kinds[id] == TokenType.CONTROL, normalized=False)
            for id in sorted(added)
        ]
    )
    _check(file, tokenizer, vocab, pairs)
    return tokenizer


def _pair(file: GGUFFile, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right) or " " in right:
        raise ConfigError(f"{file.path}: merge {merge!r} must be two tokens with a space between them")
    return left, right


def _check(file: GGUFFile, tokenizer: Tokenizer, vocab: dict[str, int], pairs: list[tuple[str, str]]) -> None:
    """Raise ConfigError if the tokenizer has other ids or merges than the file."""
    built = tokenizer.get_vocab(with_added_tokens=True)
    for token, id in vocab.items():
        if built.get(token) != id:
            raise ConfigError(
                f"{file.path}: token {token!r} has id {id}; transformers would use {built.get(token)}"
            )
    written = json.loads(tokenizer.to_str())["model"]["merges"]
    if [tuple(pair) for pair in written] != pairs:
        raise ConfigError(f"{file.path}: the merges contain a pair twice")


def _add_ends(
    file: GGUFFile, splitting: Splitting, tokenizer: Tokenizer, special_ids: dict[str, int]
) -> None:
    """Have the tokenizer begin and end texts as the file says."""
    ends = {}
    for end, default in (("bos", splitting.adds_bos), ("eos", False)):
        asked = file.optional(f"tokenizer.ggml.add_{end}_token", bool)
        if (default if asked is None else asked) and end in special_ids:
            ends[end] = str(tokenizer.id_to_token(special_ids[end]))
    if ends:
        single = [*([ends["bos"]] if "bos" in ends else []), "$A", *([ends["eos"]] if "eos" in ends else [])]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single,
            special_tokens=[(token, special_ids[end]) for end, token in ends.items()],
        )


def _list(file: GGUFFile, name: str, kind: type) -> list[Any]:
    key = f"tokenizer.ggml.{name}"
    values = file.required(key, list)
    if any(type(value) is not kind for value in values):
        raise ConfigError(f"{file.path}: {key} must be a list of {kind.__name__}")
    return values


def _token_id(file: GGUFFile, name: str, num_tokens: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    id = file.optional(key, int)
    if id is not None and not 0 <= id < num_tokens:
        raise ConfigError(f"{file.path}: {key} must be less than the number of tokens, {num_tokens}: {id}")
    return id


def _templates(file: GGUFFile) -> dict[str, str]:
    """Return {name: template}; each becomes a file of that name."""
    return {
        match[1] or "default": file.required(key, str)
        for key in file.metadata
        if (match := _TEMPLATE_KEY.fullmatch(key))
    }
