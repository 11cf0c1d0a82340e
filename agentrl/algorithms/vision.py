"""Images in the forward of a model that sees: its tower computes an embedding for each placeholder, and the
language model gets these embeddings and positions with three axes.

Server and learner use the same two steps. The model's own code finds placeholders by their id, so it would
take a placeholder that the policy sampled for an image; here images are found by their positions.

Legend: T packed tokens, K of them placeholders of images, H columns, N patches of images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from agentrl.data.image_files import resized
from agentrl.types import PlacedImage

if TYPE_CHECKING:  # takes seconds to import; the controller needs only the names of other modules
    from transformers import PreTrainedModel

TEXT_CONFIG = "text_config"
"""Key of the language model's part in the config of a model that sees."""


def attention_of_parts(name: str) -> dict[str, str]:
    """Return the attention of a model's parts: `name` for language, torch's own for images."""
    return {"": name, TEXT_CONFIG: name, "vision_config": "sdpa"}


def find_vision(module: nn.Module) -> Vision | None:
    """Return the vision of a model; None if it is not one that sees."""
    inner = getattr(module, "model", None)
    tower, language = getattr(inner, "visual", None), getattr(inner, "language_model", None)
    return None if tower is None or language is None else Vision(tower, language)


@dataclass(frozen=True, slots=True, eq=False)
class Patches:
    """Preprocessed images. values: f[N, D]; grids: i64[images, 3], time, rows and columns of patches."""

    values: Tensor
    grids: Tensor


class PatchReader:
    """Cuts images into patches, with the settings in a model's folder."""

    def __init__(self, folder: Path) -> None:
        # Not the class that transformers chooses: with torchvision, it is one that rounds differently.
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        self._processor = Qwen2VLImageProcessorPil.from_pretrained(folder)

    def read(self, images: Sequence[tuple[PlacedImage, bytes]]) -> Patches:
        """Return the patches of images, given with the bytes of their files."""
        pictures = [resized(data, width=placed.width, height=placed.height) for placed, data in images]
        found = self._processor(images=pictures, return_tensors="np")
        return Patches(
            torch.from_numpy(np.ascontiguousarray(found["pixel_values"])),
            torch.from_numpy(found["image_grid_thw"]),
        )


@dataclass(frozen=True, slots=True, eq=False)
class ShownInForward:
    """What the next forward shows.

    positions: i64[3 or 4, 1, T]; with 4, the first axis counts within packed segments and marks their starts.
    places: i64[K], where embeddings of images replace those of tokens.
    embeddings: f[K, H], computed before; None: the forward computes them from `patches`.
    patches: of the images; in a forward with K = 0 their embeddings are not used.
    sources: i64[K], which embedding is for which place; None: they are in the order of places.
    """

    positions: Tensor
    places: Tensor
    embeddings: Tensor | None = None
    patches: Patches | None = None
    sources: Tensor | None = None


class Vision:
    """The two parts of a model that sees. The tower is never trained.

    tower: maps patches to embeddings of placeholders.
    """

    def __init__(self, tower: PreTrainedModel, language: nn.Module) -> None:
        self.tower = tower
        self._shown: ShownInForward | None = None
        language.register_forward_pre_hook(self._show, with_kwargs=True)

    def expect(self, shown: ShownInForward | None) -> None:
        """Set what the next forwards show; None: only text, with the positions that the forward is given."""
        self._shown = shown

    @torch.no_grad()
    def embed(self, patches: Patches) -> Tensor:
        """Return the embeddings of the placeholders of all images in order, f[K, H]."""
        output = self.tower(patches.values, grid_thw=patches.grids, return_dict=True)
        embeddings: Tensor = output.pooler_output
        return embeddings

    def no_patches(self, device: torch.device) -> Patches:
        """Return the patches of a black image of one placeholder: for ranks that must compute with others."""
        config: Any = self.tower.config
        merged = int(config.spatial_merge_size)
        width = int(config.in_channels) * int(config.temporal_patch_size) * int(config.patch_size) ** 2
        return Patches(
            torch.zeros(merged**2, width, device=device),
            torch.tensor([[1, merged, merged]], device=device),
        )

    def _show(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        shown = self._shown
        if shown is None:
            return None
        embeds = kwargs["inputs_embeds"]
        embeddings = shown.embeddings
        if shown.patches is not None:
            embeddings = self.embed(shown.patches)
        if embeddings is not None and len(shown.places):
            embeddings = embeddings if shown.sources is None else embeddings[shown.sources]
            embeds = embeds.index_copy(1, shown.places, embeddings.to(embeds.dtype)[None])
        return args, {**kwargs, "inputs_embeds": embeds, "position_ids": shown.positions}
