"""Files of images: each is checked before it is stored, and stored once, under the hash of its bytes."""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import os
import uuid
import warnings
from dataclasses import dataclass
from pathlib import Path

from PIL import Image as Pillow

from agentrl.errors import DataError, DiskError
from agentrl.types import ImageRef

FOLDER = "images"
"""Folder of images in the folder of a run, whose trajectories refer to them."""
FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
"""Only these decoders read what a dataset or a tool gives."""
NUM_SENT = 64
"""Images that are kept as they are sent: members of a group show the same ones, in each turn again."""


@dataclass(frozen=True, slots=True)
class ImageBounds:
    """The largest image that is accepted: bytes of its file, and pixels of the decoded image."""

    max_bytes: int
    max_pixels: int


class ImageFolder:
    """Checks images, and stores them in a folder."""

    def __init__(self, bounds: ImageBounds, folder: Path | None = None) -> None:
        """folder: None only checks; nothing can be read back then."""
        self._bounds = bounds
        self._folder = folder

    def add(self, data: bytes) -> ImageRef:
        """Check an image, store it unless it is stored already, and return the reference to it.

        Raises:
            DataError: it is too large or unreadable.
            DiskError: it cannot be written.
        """
        width, height = check_image(data, self._bounds)
        sha256 = hashlib.sha256(data).hexdigest()
        if self._folder is None:
            return ImageRef(sha256, width, height)
        path = self._folder / sha256
        if not path.exists():
            _write(path, data)
        return ImageRef(sha256, width, height, str(path))


def check_image(data: bytes, bounds: ImageBounds) -> tuple[int, int]:
    """Return width and height of an image in pixels.

    The header is read first. So an image of too many pixels, a decompression bomb, is never decoded.

    Raises:
        DataError: it is too large or unreadable.
    """
    if len(data) > bounds.max_bytes:
        raise DataError(
            f"an image of {len(data):,} bytes exceeds data.images.max_bytes={bounds.max_bytes:,}; make it "
            "smaller, or raise it"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Pillow.DecompressionBombWarning)  # the bound below is stricter
        try:
            with Pillow.open(io.BytesIO(data), formats=FORMATS) as image:
                width, height = image.size
                if width * height > bounds.max_pixels:
                    raise _too_many_pixels(f"{width} x {height}", bounds)
                image.load()
        except DataError:
            raise
        except Pillow.DecompressionBombError as error:  # far above any bound
            raise _too_many_pixels("hundreds of millions of", bounds) from error
        except Exception as error:  # boundary: decoders raise anything for a damaged file
            raise DataError(
                f"an image of {len(data):,} bytes cannot be read ({type(error).__name__}: "
                f"{str(error)[:80]}); it must be an undamaged {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file"
            ) from error
    return width, height


def resized(data: bytes, *, width: int, height: int) -> Pillow.Image:
    """Return an image in RGB with `width` x `height` pixels.

    Servers and learner see images only after this resize, so they see the same pixels: libraries differ in
    how they resize.
    """
    with Pillow.open(io.BytesIO(data), formats=FORMATS) as image:
        return image.convert("RGB").resize((width, height), Pillow.Resampling.BICUBIC)


def _too_many_pixels(count: str, bounds: ImageBounds) -> DataError:
    return DataError(
        f"an image of {count} pixels exceeds data.images.max_pixels={bounds.max_pixels:,}; make it "
        "smaller, or raise it"
    )


@functools.lru_cache(NUM_SENT)
def as_sent(image: ImageRef, width: int, height: int) -> str:
    """Return the resized image as servers take it: a PNG file, which loses nothing, in base64.

    Raises:
        OSError: the image cannot be read.
    """
    file = io.BytesIO()
    resized(image.read(), width=width, height=height).save(file, "PNG", compress_level=1)
    return base64.b64encode(file.getvalue()).decode()


def _write(path: Path, data: bytes) -> None:
    # Several processes may store the same image at the same time: each renames a file of its own.
    partial = path.with_name(f"{uuid.uuid4().hex}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(data)
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise DiskError(f"{path} could not be written: {error.strerror}") from error
