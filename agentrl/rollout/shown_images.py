"""Images that tools and partners show: checked, stored, and put into messages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import trio

from agentrl.config.images import ImagesConfig
from agentrl.data.image_files import ImageBounds, ImageFolder
from agentrl.errors import DataError, DiskError, ToolError
from agentrl.types import IMAGE_MARK, Image, ImageRef, Message

OMITTED = "[image omitted]"


class ShownImages:
    """The images of a process's attempts."""

    def __init__(self, config: ImagesConfig, folder: Path) -> None:
        """folder: where images are stored."""
        self._folder = ImageFolder(ImageBounds(config.max_bytes, config.max_pixels), folder)
        self._max_images = config.max_images

    async def show(
        self, text: str, images: Sequence[Image], *, by: str, said: Sequence[Message]
    ) -> tuple[str, tuple[ImageRef, ...]]:
        """Store images and return the content of a message that shows them before `text`, and the references.

        Args:
            by: the plugin that gave them, for errors.
            said: the messages of the conversation so far.

        Raises:
            ToolError: an image is unreadable or too large, they are too many, or `text` has their mark.
        """
        if not images:
            return text, ()
        if IMAGE_MARK in text:
            raise ToolError(f"{by} shows images with a text that contains {IMAGE_MARK}; write it differently")
        total = len(images) + sum(len(message.images) for message in said)
        if total > self._max_images:
            raise ToolError(
                f"{by} shows image {total} of the conversation; data.images.max_images is "
                f"{self._max_images}: raise it, or show fewer"
            )
        refs = [await self._store(image, by) for image in images]
        return IMAGE_MARK * len(refs) + text, tuple(refs)

    async def _store(self, image: Image, by: str) -> ImageRef:
        if not isinstance(image, Image):
            raise ToolError(f"{by} shows {type(image).__name__}; return agentrl.types.Image(data)")
        try:
            return await trio.to_thread.run_sync(self._folder.add, image.data)
        except (DataError, DiskError) as error:
            raise ToolError(f"{by} shows {error}") from error


def without_images(text: str, images: Sequence[Image]) -> str:
    """Return a text with a note for each image, for a model that does not see."""
    return "\n".join([*([text] if text or not images else []), *([OMITTED] * len(images))])
