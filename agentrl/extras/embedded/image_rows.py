"""Images of served requests: their embeddings, and which of them a forward shows.

Requests share the KV cache of a prefix only if their images are equal: the images are a part of a request's
key (`prefixes.py`), because equal placeholders stand for different images.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.algorithms.vision import Patches, PatchReader, ShownInForward, Vision, find_vision
from agentrl.data.image_layout import SETTINGS_FILE, rope_positions
from agentrl.extras.embedded.attention import Row
from agentrl.extras.embedded.given_images import GivenImage
from agentrl.types import PlacedImage

_NUM_KEPT = 128
"""Embeddings of images that are kept: the members of a group show the same ones, in each turn again."""


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddedImage:
    """An image of a request with the embeddings of its placeholders, f[num_tokens, H]."""

    placed: PlacedImage
    embeddings: Tensor


class ImageRows:
    """The images of one model's requests. `expect` is for the engine's thread."""

    def __init__(self, model: PreTrainedModel, vision: Vision, folder: Path) -> None:
        self._model = model
        self._vision = vision
        self._reader = PatchReader(folder)
        self._kept: OrderedDict[tuple[str, int, int], Tensor] = OrderedDict()

    @classmethod
    def of(cls, model: PreTrainedModel, folder: Path) -> ImageRows | None:
        """Return the images of a model that sees; None if it does not, or has no settings for images."""
        vision = find_vision(model)
        if vision is None or not (folder / SETTINGS_FILE).is_file():
            return None
        return cls(model, vision, folder)

    def forget(self) -> None:
        """Forget all embeddings: the weights change."""
        self._kept.clear()

    @torch.inference_mode()
    def embed(self, images: Sequence[GivenImage]) -> list[EmbeddedImage]:
        """Return the images with their embeddings. The engine must be parked."""
        return [EmbeddedImage(image.placed, self._embedding(image)) for image in images]

    def _embedding(self, image: GivenImage) -> Tensor:
        placed = image.placed
        key = (placed.image.sha256, placed.rows, placed.columns)
        if key not in self._kept:
            patches = self._reader.read([(placed, image.data)])
            device = self._model.device
            moved = Patches(patches.values.to(device), patches.grids.to(device))
            self._kept[key] = self._vision.embed(moved)
            if len(self._kept) > _NUM_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def expect(self, rows: Sequence[Row], images: Mapping[str, Sequence[EmbeddedImage]]) -> None:
        """Set what the next forward shows. images: of the requests that have some."""
        if not any(row.request_id in images for row in rows):
            self._vision.expect(None)
            return
        positions, places, embeddings = [], [torch.empty(0, dtype=torch.int64)], []
        start = 0
        for row in rows:
            own = images.get(row.request_id, ())
            first = row.num_keys - row.num_queries
            placed = [image.placed for image in own]
            positions.append(torch.from_numpy(rope_positions(placed, first, row.num_keys)))
            for image in own:
                begin = max(image.placed.position, first)
                end = min(image.placed.position + image.placed.num_tokens, row.num_keys)
                if begin < end:
                    places.append(torch.arange(begin, end) - first + start)
                    offset = image.placed.position
                    embeddings.append(image.embeddings[begin - offset : end - offset])
            start += row.num_queries
        device = self._model.device
        self._vision.expect(
            ShownInForward(
                torch.cat(positions, dim=1).unsqueeze(1).to(device),
                torch.cat(places).to(device),
                torch.cat(embeddings) if embeddings else None,
            )
        )

    def expect_text(self) -> None:
        """Let the next forward show no images."""
        self._vision.expect(None)


def key_of(images: Sequence[GivenImage]) -> str:
    """Return a key that requests share only if their images are equal and at the same places; "" for none."""
    if not images:
        return ""
    told = repr([(i.placed.image.sha256, i.placed.position, i.placed.rows) for i in images])
    return hashlib.blake2b(told.encode(), digest_size=12).hexdigest()
