"""The images of a row: of a column, as in verl's datasets, and of content parts of its messages."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.data.image_files import ImageFolder
from agentrl.data.row_place import RowPlace
from agentrl.errors import DataError
from agentrl.types import IMAGE_MARK, ImageRef

_FORMS = "{bytes: ...} or {path: ...}"


class RowImages:
    """Hands out the images of a row's column to its messages, in order."""

    def __init__(
        self,
        column: Any,
        place: RowPlace | None,
        field: str,
        folder: ImageFolder | None,
        *,
        max_images: int,
    ) -> None:
        """column: of the row, None if it has none. folder: checks and stores images; None: the reader of
        these rows takes none.

        Raises:
            DataError: the column is no list.
        """
        if column is not None and not isinstance(column, list):
            assert place is not None
            raise place.error(field, f"must be a list of images {_FORMS}, is {repr(column)[:80]}")
        self._column: list[Any] | None = column or None
        self._place = place
        self._field = field
        self._folder = folder
        self._max_images = max_images
        self._num_taken = 0
        self._num_images = 0

    def at_marks(self, text: str, field: str) -> tuple[ImageRef, ...]:
        """Return the images at the `<image>` in a text; () if the row has no column of images.

        Raises:
            DataError: an image is missing, unreadable or too large.
        """
        if self._column is None:
            return ()
        return tuple(self._next(field) for _ in range(text.count(IMAGE_MARK)))

    def of_part(self, part: Mapping[str, Any], field: str) -> ImageRef:
        """Return the image of a content part: its own, else the next one of the column.

        Raises:
            DataError: an image is missing, unreadable or too large.
        """
        own = next((part[key] for key in ("image", "image_url", "bytes", "path") if part.get(key)), None)
        return self._next(field) if own is None else self._add(own, field)

    def check_all_taken(self, field: str) -> None:
        """Check that the messages have as many marks as the column has images.

        Raises:
            DataError: they have fewer.
        """
        if self._column is not None and self._num_taken < len(self._column):
            raise self._error(
                self._field,
                f"has {len(self._column)} images, but {field!r} has {IMAGE_MARK} {self._num_taken} times",
            )

    def _next(self, field: str) -> ImageRef:
        column = self._column or []
        if self._num_taken == len(column):
            raise self._error(
                field, f"has {IMAGE_MARK} more often than {self._field!r} has images ({len(column)})"
            )
        index = self._num_taken
        self._num_taken += 1
        return self._add(column[index], f"{self._field}[{index}]")

    def _add(self, value: Any, field: str) -> ImageRef:
        if self._folder is None:
            raise self._error(field, "images are not supported in these rows; remove them")
        self._num_images += 1
        if self._num_images > self._max_images:
            raise self._error(
                field,
                f"is image {self._num_images} of the row; data.images.max_images is {self._max_images}: "
                "raise it, or remove images",
            )
        try:
            return self._folder.add(_bytes_of(value))
        except DataError as error:
            raise self._error(field, str(error)) from error

    def _error(self, field: str, problem: str) -> DataError:
        return DataError(f"{field}: {problem}") if self._place is None else self._place.error(field, problem)


NO_IMAGES = RowImages(None, None, "images", None, max_images=1)
"""Of readers that take no images. It hands out none, so all may share it."""


def _bytes_of(value: Any) -> bytes:
    """Return the bytes of an image in one of the forms of datasets.

    Raises:
        DataError: it has another form, or its file cannot be read.
    """
    if isinstance(value, bytes):
        return value
    if isinstance(value, Mapping):
        given = next((value[key] for key in ("bytes", "path", "image", "url") if value.get(key)), None)
        if given is not None:
            return _bytes_of(given)
    if not isinstance(value, str):
        raise DataError(f"must be an image {_FORMS}, is {repr(value)[:80]}")
    if value.startswith("data:"):
        try:
            return base64.b64decode(value.partition(",")[2], validate=True)
        except binascii.Error as error:
            raise DataError(f"its data URI is not base64: {error}") from error
    if value.startswith(("http:", "https:")):
        raise DataError(f"{value[:80]!r} is on the web; store its bytes in the row, or name a local file")
    try:
        return Path(value.removeprefix("file://")).read_bytes()
    except OSError as error:
        raise DataError(f"{value[:200]!r} cannot be read: {error.strerror}") from error
