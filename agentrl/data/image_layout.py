"""How many placeholders an image takes, by the settings of the model's image processor.

An image is resized to a multiple of `cell_pixels` in both directions, and each cell is one token.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.errors import ConfigError, DataError
from agentrl.types import ImageRef, PlacedImage

SETTINGS_FILE = "preprocessor_config.json"
PLACEHOLDER = "<|image_pad|>"
"""Token that stands for a cell of an image, in the tokenizers of Qwen's models."""

_PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
_MAX_ASPECT = 200
"""Largest ratio of an image's sides, in transformers and in SGLang."""
_SIDES = ("shortest_edge", "longest_edge")
"""Names of the smallest and the largest number of pixels in newer settings."""


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """The grid of an image's placeholders.

    cell_pixels: width and height of the part of an image that is one token.
    min_pixels, max_pixels: of a resized image, except that it has at least one cell.
    """

    cell_pixels: int
    min_pixels: int
    max_pixels: int

    @classmethod
    def read(cls, folder: Path) -> ImageLayout | None:
        """Read the settings in a model's folder; None if it has none.

        Raises:
            ConfigError: they are malformed, or those of another processor.
        """
        file = folder / SETTINGS_FILE
        if not file.is_file():
            return None
        try:
            settings = json.loads(file.read_text(encoding="utf-8"))
            named = str(settings.get("image_processor_type"))
            if named not in _PROCESSORS:
                raise ConfigError(
                    f"{file} is of the image processor {named}, which is not supported; supported are "
                    f"models with {_PROCESSORS[0]}, such as Qwen2.5-VL"
                )
            return cls._of(settings)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{file} cannot be read as settings of an image processor: {error}") from error

    @classmethod
    def _of(cls, settings: Mapping[str, Any]) -> ImageLayout:
        size = settings.get("size") or {}
        smallest, largest = (
            int(settings.get(name) or size[side])
            for name, side in zip(("min_pixels", "max_pixels"), _SIDES, strict=True)
        )
        return cls(int(settings["patch_size"]) * int(settings["merge_size"]), smallest, largest)

    @property
    def max_tokens(self) -> int:
        """The most placeholders that an image of moderate proportions takes."""
        return max(1, self.max_pixels // self.cell_pixels**2)

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return rows and columns of placeholders of an image of `width` x `height` pixels.

        Raises:
            DataError: one side is too long for the other.

        Source: `smart_resize` of transformers' Qwen2VLImageProcessor.
        """
        if max(width, height) > _MAX_ASPECT * min(width, height):
            raise DataError(
                f"an image of {width} x {height} pixels has a side more than {_MAX_ASPECT} times as long as "
                "the other; cut it"
            )
        cell = self.cell_pixels
        rows, columns = round(height / cell), round(width / cell)
        if rows * columns * cell**2 > self.max_pixels:
            scale = math.sqrt(height * width / self.max_pixels)
            rows = max(1, math.floor(height / scale / cell))
            columns = max(1, math.floor(width / scale / cell))
        elif rows * columns * cell**2 < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width))
            rows, columns = math.ceil(height * scale / cell), math.ceil(width * scale / cell)
        return rows, columns

    def place(self, image: ImageRef, position: int) -> PlacedImage:
        """Return an image at a position.

        Raises:
            DataError: see `grid`.
        """
        return PlacedImage(image, position, *self.grid(image.width, image.height), self.cell_pixels)


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """The placeholders of images among a model's tokens. placeholder: their id."""

    layout: ImageLayout
    placeholder: int

    def expand(self, ids: Sequence[int], images: Sequence[ImageRef]) -> tuple[list[int], list[PlacedImage]]:
        """Return rendered `ids`, in which one placeholder stands for each image, with all placeholders of
        the images, and where the images are.

        Raises:
            ConfigError: the chat template shows another number of images.
            DataError: an image has no grid.
        """
        found = [index for index, token in enumerate(ids) if token == self.placeholder]
        if len(found) != len(images):
            raise ConfigError(
                f"the chat template shows {len(found)} of {len(images)} images; set model.chat_template to "
                "one that writes an image for each part {type: image} of a message's content"
            )
        expanded: list[int] = []
        placed: list[PlacedImage] = []
        start = 0
        for index, image in zip(found, images, strict=True):
            expanded += ids[start:index]
            placed.append(self.layout.place(image, len(expanded)))
            expanded += [self.placeholder] * placed[-1].num_tokens
            start = index + 1
        return expanded + list(ids[start:]), placed


def collapse(ids: Sequence[int], images: Iterable[PlacedImage]) -> tuple[list[int], list[int]]:
    """Return `ids` with one placeholder per image, and where these placeholders are."""
    collapsed: list[int] = []
    starts: list[int] = []
    start = 0
    for image in images:
        collapsed += [int(token) for token in ids[start : image.position + 1]]
        starts.append(len(collapsed) - 1)
        start = image.position + image.num_tokens
    return collapsed + [int(token) for token in ids[start:]], starts


def rope_positions(images: Sequence[PlacedImage], start: int, stop: int) -> NDArray[np.int64]:
    """Return the positions of tokens `start` to `stop` of a segment for rotary embeddings with three axes.

    i64[3, stop - start]: time, row and column. They are equal for text. The tokens of an image share one
    time; their rows and columns count from it. Text after the image goes on behind its longer side.

    Args:
        images: of the segment, in order.

    Source: Wang et al. 2024, arXiv:2409.12191, section 2.1 (M-RoPE); `get_rope_index` of transformers.
    """
    positions = np.tile(np.arange(start, stop, dtype=np.int64), (3, 1))
    behind = 0  # how much further on the tokens are than their positions
    for image in images:
        first, last = (min(max(p, start), stop) for p in (image.position, image.position + image.num_tokens))
        places = np.arange(first, last) - image.position
        base = image.position - behind
        positions[0, first - start : last - start] = base
        positions[1, first - start : last - start] = base + places // image.columns
        positions[2, first - start : last - start] = base + places % image.columns
        behind += image.num_tokens - max(image.rows, image.columns)
        after = max(image.position + image.num_tokens, start)
        if after < stop:
            positions[:, after - start :] = np.arange(after, stop) - behind
    return positions
