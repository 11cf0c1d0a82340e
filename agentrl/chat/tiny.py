"""The tokenizer of the quickstart's policy, with its short chat template.

The tokenizer has bytes, single digits and a few whole words; the template supports tools.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

TEMPLATE_FILE = Path(__file__).with_name("tiny.jinja")

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"
START = "<|im_start|>"
SPECIAL_TOKENS = (END_OF_TEXT, START, END_OF_TURN)
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Tokens that are not special, as in Qwen's tokenizers: a decoded response shows them."""

MAX_CONTEXT_TOKENS = 1024

SPACE = "Ġ"
"""Spelling of a space in byte-level BPE."""

WORDS = (
    *(
        "assistant",
        "system",
        "user",
        "calculator",
        "arguments",
        "arithmetic",
        "expression",
        "Compute",
        "string",
        "name",
    ),
    *("Tools", "Call", "Wrong", "again", "What", "Try", "an", "is", "##", '{"', '":', '",', '"}}', "):"),
)
"""Fragments of the template, of calls and of the arithmetic rows. Each is one token,
which halves the number of sampled tokens. If two fragments share letters, the
earlier one wins. Digits stay single, so that a sum can be learned digit by digit.
"""

JOINED = (
    ("##", "##"),
    *(
        (" ", word)
        for word in ("an", "arithmetic", "expression", "string", "again", "name", "Try", "is", '{"', '"')
    ),
)
"""Pairs of fragments that become one token when adjacent."""


SPLITS = (
    *("(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n]*"),
    *(r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
)
"""Pieces of a text that are tokenized separately: an ending after an apostrophe; a word with the character
before it; a digit; punctuation; line breaks; spaces. These patterns and the normal form (NFC) are those of
Qwen 2, because `transformers` takes both from the `model_type` of the model, not from `tokenizer.json`.
"""


def write_tiny_tokenizer(folder: Path) -> None:
    """Write `tokenizer.json`, its configs and the chat template, for `transformers.AutoTokenizer`.

    Deterministic.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tiny_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"), pretty=True)
    named = {"eos_token": END_OF_TURN, "pad_token": END_OF_TEXT}
    _write_json(folder / "special_tokens_map.json", {**named, "additional_special_tokens": [START]})
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": MAX_CONTEXT_TOKENS,
            "clean_up_tokenization_spaces": False,
            "additional_special_tokens": [START],
            **named,
        },
    )
    ends = [tokenizer.token_to_id(END_OF_TURN), tokenizer.token_to_id(END_OF_TEXT)]
    _write_json(
        folder / "generation_config.json",
        {"eos_token_id": ends, "pad_token_id": tokenizer.token_to_id(END_OF_TEXT)},
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE_FILE.read_text(encoding="utf-8"), encoding="utf-8")


def build_tiny_tokenizer() -> Tokenizer:
    """Return byte-level BPE whose merges spell WORDS from left to right, then join JOINED.

    The special tokens and the tags come last.
    """
    vocab = {letter: id for id, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    spelled = [(word[:end], word[end]) for word in WORDS for end in range(1, len(word))]
    merges: dict[tuple[str, str], None] = {}
    for left, right in [*spelled, *JOINED]:
        pair = (left.replace(" ", SPACE), right.replace(" ", SPACE))
        merges[pair] = None
        vocab.setdefault("".join(pair), len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex("|".join(SPLITS)), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in TAGS])
    return tokenizer


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
