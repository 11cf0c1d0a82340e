"""Files of images: checked before they are stored, and stored once."""

import base64
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image as Pillow

from agentrl.data.image_files import ImageBounds, ImageFolder, as_sent, resized
from agentrl.errors import DataError
from parts.vision import BOUNDS, noise


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP"])
def test_an_image_is_stored_once_under_its_hash(tmp_path, kind):
    data = noise(30, 20, kind=kind)
    refs = [ImageFolder(BOUNDS, tmp_path).add(data) for _ in range(2)]
    assert refs[0] == refs[1]
    assert (refs[0].width, refs[0].height) == (30, 20)
    assert [file.name for file in tmp_path.iterdir()] == [refs[0].sha256]
    assert refs[0].read() == data


def test_without_a_folder_it_is_only_checked(tmp_path):
    ref = ImageFolder(BOUNDS).add(noise(30, 20))
    assert ref == ImageFolder(BOUNDS, tmp_path).add(noise(30, 20))
    assert ref.path == ""
    with pytest.raises(OSError, match="No such file"):
        ref.read()


def test_a_file_with_other_bytes_is_noticed(tmp_path):
    ref = ImageFolder(BOUNDS, tmp_path).add(noise(30, 20))
    (tmp_path / ref.sha256).write_bytes(noise(30, 20, seed=1))
    with pytest.raises(OSError, match="does not match its checksum"):
        ref.read()


def bomb(side):
    """Return a PNG that says it has side x side pixels, and has no data."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "cannot be read"),
        (b"no image", r"cannot be read \(UnidentifiedImageError"),
        (noise(30, 20)[:-40], "cannot be read"),
        (noise(30, 20, kind="GIF"), "must be an undamaged PNG, JPEG, WEBP or BMP file"),
        (noise(200, 200), r"12\d,\d+ bytes exceeds data.images.max_bytes=100,000"),
        (bomb(10_000), r"10000 x 10000 pixels exceeds data.images.max_pixels=1,000,000"),
        (bomb(60_000), r"millions of pixels exceeds data.images.max_pixels=1,000,000"),
    ],
    ids=["empty", "text", "cut", "gif", "bytes", "pixels", "bomb"],
)
def test_what_is_too_large_or_damaged_is_refused_in_one_line(tmp_path, data, problem):
    with pytest.raises(DataError, match=problem) as caught:
        ImageFolder(ImageBounds(100_000, 1_000_000), tmp_path).add(data)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_what_is_sent_has_the_pixels_that_the_learner_sees(tmp_path):
    data = noise(61, 47, kind="JPEG")
    ref = ImageFolder(BOUNDS, tmp_path).add(data)
    sent = Pillow.open(io.BytesIO(base64.b64decode(as_sent(ref, 56, 84))))
    own = resized(data, width=56, height=84)
    assert own.size == (56, 84)
    assert np.array_equal(np.asarray(sent), np.asarray(own))
    again = resized(base64.b64decode(as_sent(ref, 56, 84)), width=56, height=84)
    assert np.array_equal(np.asarray(again), np.asarray(own))
