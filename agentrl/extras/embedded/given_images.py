"""The images of a request: read from its body, and put among the tokens of its prompt."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.data.image_files import ImageBounds, check_image
from agentrl.data.image_layout import ImageTokens
from agentrl.errors import UserError
from agentrl.extras.embedded.bodies import MAX_BODY_BYTES, BadRequest
from agentrl.extras.embedded.bounded_repr import shown
from agentrl.servers.protocol import IMAGE_POSITIONS
from agentrl.types import ImageRef, PlacedImage

_BOUNDS = ImageBounds(MAX_BODY_BYTES, max_pixels=100_000_000)
"""Of one image. A client has bounds of its own; these protect the server."""


@dataclass(frozen=True, slots=True)
class GivenImage:
    """An image of a prompt, with the bytes of its file."""

    placed: PlacedImage
    data: bytes


def read_images(
    body: Mapping[str, Any], prompt: Sequence[int], tokens: ImageTokens | None
) -> tuple[list[int], tuple[GivenImage, ...]]:
    """Return the prompt with all placeholders of the images in `image_data`, and these images.

    The prompt of the body has one placeholder per image, as in SGLang. `image_positions` says where; without
    it, each token with the id of the placeholder stands for an image.

    Raises:
        BadRequest: an image is unreadable, they are not as many as their placeholders, or the model does not
            see.
    """
    if tokens is None:
        raise BadRequest("`image_data` needs a model that sees, such as Qwen2.5-VL; this server's does not")
    given = body["image_data"]
    data = [_bytes_of(item) for item in (given if isinstance(given, list) else [given])]
    try:
        refs = [ImageRef(hashlib.sha256(one).hexdigest(), *check_image(one, _BOUNDS)) for one in data]
        placed = _place(prompt, _positions(body, prompt, tokens), refs, tokens)
    except UserError as error:
        raise BadRequest(f"`image_data`: {error}") from error
    expanded = list(prompt)
    for image in placed:
        # One placeholder is there already.
        expanded[image.position : image.position] = [tokens.placeholder] * (image.num_tokens - 1)
    return expanded, tuple(map(GivenImage, placed, data))


def _place(
    prompt: Sequence[int], positions: Sequence[int], refs: Sequence[ImageRef], tokens: ImageTokens
) -> list[PlacedImage]:
    if len(positions) != len(refs):
        raise BadRequest(f"`image_data` has {len(refs)} images for {len(positions)} placeholders")
    placed: list[PlacedImage] = []
    grown = 0
    for position, ref in zip(positions, refs, strict=True):
        placed.append(tokens.layout.place(ref, position + grown))
        grown += placed[-1].num_tokens - 1
    return placed


def _positions(body: Mapping[str, Any], prompt: Sequence[int], tokens: ImageTokens) -> Sequence[int]:
    positions = body.get(IMAGE_POSITIONS)
    if positions is None:
        return [index for index, token in enumerate(prompt) if token == tokens.placeholder]
    is_list = isinstance(positions, list) and all(type(position) is int for position in positions)
    if not is_list or positions != sorted(set(positions)):
        raise BadRequest(f"`{IMAGE_POSITIONS}` must be a list of ascending positions, not {shown(positions)}")
    for position in positions:
        if not 0 <= position < len(prompt) or prompt[position] != tokens.placeholder:
            raise BadRequest(f"`{IMAGE_POSITIONS}` has {position}, where the prompt has no placeholder")
    return list(positions)


def _bytes_of(value: Any) -> bytes:
    if not isinstance(value, str):
        raise BadRequest(f"`image_data` must have images in base64, not {shown(value)}")
    try:
        text = value.partition(",")[2] if value.startswith("data:") else value
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise BadRequest(
            f"`image_data` must have images in base64 or data URIs, not {shown(value)}: the embedded server "
            "fetches nothing"
        ) from error
