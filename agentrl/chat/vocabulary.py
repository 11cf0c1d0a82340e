"""Comparison of two tokenizers by what their ids mean."""

from __future__ import annotations

from tokenizers import Tokenizer


def vocabulary_difference(tokenizer: Tokenizer, wanted: Tokenizer) -> str | None:
    """Return the first id whose token differs, in words; None if every id has the same token in both.

    How text is cut into tokens does not matter here: one model is shown the ids that the other wrote.
    """
    tokens, expected = _by_id(tokenizer), _by_id(wanted)
    for number in sorted(tokens.keys() | expected.keys()):
        token, other = tokens.get(number), expected.get(number)
        if token != other:
            return f"token {number} is {_shown(token)} instead of {_shown(other)}"
    return None


def _by_id(tokenizer: Tokenizer) -> dict[int, str]:
    return {number: token for token, number in tokenizer.get_vocab(with_added_tokens=True).items()}


def _shown(token: str | None) -> str:
    return "undefined" if token is None else repr(token)
