"""Images in the learner's forward: pixels are read where a microbatch refers to them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from agentrl.algorithms.vision import Patches, PatchReader, ShownInForward, Vision
from agentrl.data.image_layout import SETTINGS_FILE
from agentrl.errors import DiskError, LearnerError
from agentrl.learner.batch import Microbatch
from agentrl.learner.forward_input import ForwardInput
from agentrl.types import PlacedImage

_NUM_KEPT = 256
"""Images whose patches are kept: a step reads them once to score, and once per epoch to update."""
_Key = tuple[str, int, int]


class ImageInput:
    """The images of one model's forwards."""

    def __init__(self, vision: Vision, folder: Path, device: torch.device, *, computes_always: bool) -> None:
        """folder: of the settings for images; without them there can be none. computes_always: run the tower
        for microbatches without images too, because other ranks run it with this one.
        """
        self._vision = vision
        self._device = device
        self._computes_always = computes_always
        self._reader = PatchReader(folder) if (folder / SETTINGS_FILE).is_file() else None
        self._kept: OrderedDict[_Key, Patches] = OrderedDict()

    @contextmanager
    def shown(self, microbatch: Microbatch, given: ForwardInput) -> Iterator[None]:
        """Let the forward inside show the microbatch's images. `given`: its input.

        Raises:
            DiskError: an image cannot be read.
        """
        self._vision.expect(self._forward(microbatch, given.arguments["position_ids"]))
        try:
            yield
        finally:
            self._vision.expect(None)

    def _forward(self, microbatch: Microbatch, position_ids: Tensor) -> ShownInForward:
        """position_ids: i64[1, T]."""
        axes = position_ids.expand(3, 1, -1)
        if microbatch.rope_positions is not None:
            axes = torch.from_numpy(microbatch.rope_positions).to(self._device)[:, None]
        positions = torch.cat([position_ids[None], axes])
        if microbatch.images:
            return self._with_images(positions, microbatch.images)
        nothing = torch.empty(0, dtype=torch.int64, device=self._device)
        patches = self._vision.no_patches(self._device) if self._computes_always else None
        return ShownInForward(positions, nothing, patches=patches)

    def _with_images(self, positions: Tensor, images: Sequence[PlacedImage]) -> ShownInForward:
        """Members of a group show the same images: each is computed once."""
        unique: dict[_Key, PlacedImage] = {_key(image): image for image in images}
        starts, end = {}, 0
        for key, image in unique.items():
            starts[key] = end
            end += image.num_tokens
        places = [torch.arange(i.num_tokens) + i.position for i in images]
        sources = [torch.arange(i.num_tokens) + starts[_key(i)] for i in images]
        read = [self._read(image) for image in unique.values()]
        patches = Patches(
            torch.cat([one.values for one in read]).to(self._device),
            torch.cat([one.grids for one in read]).to(self._device),
        )
        return ShownInForward(
            positions,
            torch.cat(places).to(self._device),
            patches=patches,
            sources=torch.cat(sources).to(self._device),
        )

    def _read(self, placed: PlacedImage) -> Patches:
        if self._reader is None:
            raise LearnerError(f"the model's folder has no {SETTINGS_FILE}, and a trajectory shows an image")
        key = _key(placed)
        if key not in self._kept:
            try:
                data = placed.image.read()
            except OSError as error:
                raise DiskError(
                    f"image {placed.image.sha256} of a trajectory cannot be read: {error}"
                ) from error
            self._kept[key] = self._reader.read([(placed, data)])
            if len(self._kept) > _NUM_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]


def _key(placed: PlacedImage) -> _Key:
    return placed.image.sha256, placed.rows, placed.columns
