"""Config of images in rows, tool answers and replies."""

from __future__ import annotations

from pydantic import Field

from agentrl.config.section import Section


class ImagesConfig(Section):
    """Images in conversations, for models that see (docs/models.md)."""

    key: str = Field(
        "images",
        description="Column of a row's images, for the `<image>` in its messages in order; may be absent.",
    )
    max_images: int = Field(
        16, ge=1, description="Most images of one conversation, with those of tool answers and replies."
    )
    max_bytes: int = Field(20 * 2**20, ge=1, description="Largest file of an image, in bytes.")
    max_pixels: int = Field(
        40_000_000,
        ge=1,
        description="Largest image, in pixels before the resize for the model; a larger one is not decoded.",
    )
