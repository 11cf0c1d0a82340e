"""Conversion between text and token ids, which keeps control tokens in message content harmless."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from agentrl.chat.growth import check_growth
from agentrl.data.image_layout import PLACEHOLDER, SETTINGS_FILE, ImageLayout, ImageTokens
from agentrl.errors import ConfigError, DataError
from agentrl.types import ImageRef, PlacedImage, Role

SPLIT = "\ufdd0"
"""Inserted into content after the first character of a control token. Encoding cuts the text at this mark, so
the control token's text is encoded as plain text. A Unicode noncharacter: it never occurs in exchanged
text.
"""

TURN = "\ufdd1"
"""Placeholder for the model's text when a history is rendered; another noncharacter."""

THOUGHT = "\ufdd2"
"""Placeholder for the model's thought; another noncharacter."""

CALL = "\ufdd3"
"""Placeholder for the arguments of a call that the model made; another noncharacter."""

_PANIC = "PanicException"
"""Of the tokenizer's library; no Exception. A regular expression that needs too long raises it."""
_LARGE_TEXT = 100_000
"""In characters. Texts of at least this length are encoded as a batch of one."""

# The placeholders and lone surrogates
_UNENCODABLE = re.compile(f"[{SPLIT}{TURN}{THOUGHT}{CALL}\ud800-\udfff]")


class Codec:
    """A tokenizer that knows which of its tokens control a conversation.

    A message's content is data. `<|im_end|>` in a web page that a tool returned must not end the tool's turn,
    so control tokens in content are encoded as plain text. Which tokens count as control tokens depends on
    the role:

    - system, user: the tokenizer's special tokens (a prompt may well mention `<think>` and mean the token);
    - tool: also the other added tokens that the template itself writes, such as `<tool_response>`;
    - assistant: only those that end a turn.

    Content without control tokens is encoded as `apply_chat_template` would encode it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template_text: str,
        eos_token_ids: Sequence[int],
        images: ImageTokens | None = None,
    ) -> None:
        """`eos_token_ids` end an assistant turn; the first is the one that the template writes. `images`: of
        a model that sees; None: it does not.
        """
        self.images = images
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._added = frozenset(added)
        special = [token.content for token in added.values() if token.special and _is_markup(token)]
        written = [
            token.content for token in added.values() if _is_markup(token) and token.content in template_text
        ]
        turn_ends = [str(tokenizer.id_to_token(id)) for id in eos_token_ids]
        self.end_of_turn: str = turn_ends[0]
        self.turn_ends = dict(zip(turn_ends, eos_token_ids, strict=True))
        self._turn_ends = turn_ends
        self.turn_end = _any_of(turn_ends)
        self.special_tokens = tuple(sorted(special))
        self._special = _any_of(special)
        # Only the template writes placeholders: each stands for an image.
        placeholders = [] if images is None else [str(tokenizer.id_to_token(images.placeholder))]
        self._control: dict[Role, re.Pattern[str]] = {
            "system": self._special,
            "user": self._special,
            "tool": _any_of([*special, *written]),
            "assistant": _any_of([*turn_ends, *placeholders]),
        }

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str) -> list[int]:
        """Encode text unchanged. Control tokens are recognised; none is added.

        Raises:
            DataError: the tokenizer fails on the text.
        """
        try:
            if len(text) < _LARGE_TEXT:
                return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
            # The batch method releases the GIL and skips offsets: five times as fast on a large text, slower
            # on a short one.
            return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        except BaseException as error:
            if type(error).__name__ != _PANIC:
                raise
            reason = str(error).splitlines()[0]
            raise DataError(f"the tokenizer fails on a text of {len(text):,} characters: {reason}") from error

    def encode_rendered(self, text: str, *, after: str | None = None) -> list[int]:
        """Encode rendered text that may contain SPLIT marks, as if it followed the added token `after`.

        The preceding token matters: some tokenizers insert a space mark at the start of a text, and some
        tokens absorb the spaces that follow them.
        """
        first, *rest = text.split(SPLIT)
        ids = self.encode(first) if after is None else self.encode(after + first)[1:]
        for piece in rest:
            ids += self.encode(self.end_of_turn + piece)[1:]
        return ids

    def place_images(self, ids: list[int], images: Sequence[ImageRef]) -> tuple[list[int], list[PlacedImage]]:
        """Return rendered ids with the placeholders of all images, and where the images are.

        Raises:
            ConfigError: the template does not show all images.
            DataError: the model does not see, or an image has no grid.
        """
        return self.seeing().expand(ids, images) if images else (ids, [])

    def seeing(self) -> ImageTokens:
        """Return how images become tokens.

        Raises:
            DataError: the model does not see.
        """
        if self.images is None:
            raise DataError(
                f"messages contain images, and the model's folder has no {SETTINGS_FILE}: it does not see; "
                "use a model such as Qwen2.5-VL, or remove the images"
            )
        return self.images

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special))

    def is_same_text(self, left: Sequence[int], right: Sequence[int]) -> bool:
        """Return whether two token sequences have the same text and the same added tokens.

        The tokens themselves may differ where a text was cut: a model continues after a prompt, whereas a
        tokenizer would merge across that boundary. Added tokens must be the same, because plain text can
        spell them.
        """
        if list(left) == list(right):
            return True
        added = [[id for id in ids if id in self._added] for ids in (left, right)]
        return added[0] == added[1] and self.decode(left) == self.decode(right)

    def token_spans(self, text: str) -> list[tuple[int, int]]:
        """Return the character range of each token of `text`."""
        return list(
            self._tokenizer.encode(_UNENCODABLE.sub("\ufffd", text), add_special_tokens=False).offsets
        )

    def protect(self, content: str, role: Role) -> str:
        """Return `content` with its control tokens split and unencodable characters replaced by U+FFFD."""
        content = _UNENCODABLE.sub("\ufffd", content)
        return self._control[role].sub(lambda match: match[0][0] + SPLIT + match[0][1:], content)

    def frame(self, written: str) -> re.Pattern[str]:
        """Return a pattern for the special tokens around the text of a turn: those in `written`, a turn
        without calls as the template writes it, and those that end a turn.
        """
        return _any_of([*self._turn_ends, *self._special.findall(written)])

    def strip_special(self, text: str) -> str:
        return self._special.sub("", text)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read `tokenizer.json` of a folder, with its padding and truncation disabled.

    Raises:
        ConfigError: the file is missing or malformed, or may make very much of a text.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"no tokenizer.json in {str(folder)!r}; transformers' save_pretrained writes one")
    check_growth(path)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # boundary: the library raises bare Exception for a malformed file
        raise ConfigError(f"{path} is not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def find_image_tokens(folder: Path, tokenizer: Tokenizer) -> ImageTokens | None:
    """Return how images become tokens of the model in `folder`; None if it does not see.

    Raises:
        ConfigError: its settings are malformed, or the tokenizer has no placeholder.
    """
    layout = ImageLayout.read(folder)
    if layout is None:
        return None
    placeholder = tokenizer.token_to_id(PLACEHOLDER)
    if placeholder is None:
        raise ConfigError(
            f"{folder / SETTINGS_FILE} is of a model that sees, but the tokenizer has no {PLACEHOLDER}; use "
            "the model's own tokenizer"
        )
    return ImageTokens(layout, placeholder)


def added_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of the added tokens in `text`, in order."""
    added = {
        token.content: id for id, token in tokenizer.get_added_tokens_decoder().items() if _is_markup(token)
    }
    return [added[match[0]] for match in _any_of(added).finditer(text)]


def _is_markup(token: AddedToken) -> bool:
    """Return whether a token is markup.

    Runs of spaces are not: some tokenizers add tokens for them, but templates write them as ordinary text.
    """
    return len(token.content) > 1 and not token.content.isspace()


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of `texts`, longest first; without texts it matches nothing."""
    choices = sorted(set(texts), key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, choices)) if choices else r"(?!)")
