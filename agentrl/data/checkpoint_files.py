"""Files of a checkpoint: hashing them while they are written, the manifest, and verification in parts.

Each process hashes the files that it writes. A shard that is larger than a block also has a hash per block,
in a file beside it (`__0_0.distcp.blocks`, 32 bytes per block). With them, parts of a shard can be verified,
and several processes can share one shard.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from pydantic import BaseModel, Field

from agentrl.config.model import ModelConfig
from agentrl.config.trainer import Verify
from agentrl.data.atomic_files import sync
from agentrl.errors import CheckpointError
from agentrl.tracking.seals import CHECKSUM, check_document, sealed_document

FORMAT = 2
MANIFEST = "manifest.json"
MODEL = "model.json"
"""File in a checkpoint with the learner's `model` config."""
SHARD = ".distcp"
"""Suffix of the files that hold tensors: the only ones of which a sample is verified."""
BLOCKS = ".blocks"
"""Suffix of the file with a shard's hashes per block."""
BLOCK_BYTES = 4 << 20
SAMPLE_BYTES = 64 << 20
"""At most so much of a shard is read by `sample`: 16 blocks, 0.03 s of hashing."""

_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file as its writer hashed it. path: relative to the folder of the save."""

    path: str
    num_bytes: int
    sha256: str

    def below(self, folder: str) -> StoredFile:
        """Return the same file with a path relative to the parent of `folder`."""
        return replace(self, path=f"{folder}/{self.path}")


class HashingFile:
    """A file opened for writing that hashes what is written to it, as a whole and per block."""

    def __init__(self, file: BinaryIO, *, block_bytes: int = BLOCK_BYTES) -> None:
        self._file = file
        self._block_bytes = block_bytes
        self._whole, self._block = hashlib.sha256(), hashlib.sha256()
        self._num_bytes = 0
        self._blocks: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> int:
        view = memoryview(data).cast("B")
        self._file.write(view)
        self._whole.update(view)
        start = 0
        while start < len(view):
            end = min(len(view), start + self._block_bytes - self._num_bytes % self._block_bytes)
            self._block.update(view[start:end])
            self._num_bytes += end - start
            start = end
            if self._num_bytes % self._block_bytes == 0:
                self._end_block()
        return len(view)

    def tell(self) -> int:
        return self._num_bytes

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        self._file.flush()  # who asks for the descriptor syncs it
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()

    def stored_as(self, name: str) -> StoredFile:
        """Return size and hash of what was written."""
        return StoredFile(name, self._num_bytes, self._whole.hexdigest())

    def block_digests(self) -> bytes:
        """Return the concatenated hashes of all blocks; the last block may be shorter."""
        rest = [self._block.digest()] if self._num_bytes % self._block_bytes else []
        return b"".join([*self._blocks, *rest])

    def _end_block(self) -> None:
        self._blocks.append(self._block.digest())
        self._block = hashlib.sha256()


def stored_file(folder: Path, path: Path) -> StoredFile:
    """Sync the file at `path` to disk and hash it; `folder` is the folder of the save."""
    sync(path)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return StoredFile(str(path.relative_to(folder)), file.tell(), digest)


class Manifest(BaseModel):
    """The content of manifest.json.

    files: path -> (bytes, sha256).
    block_bytes: size of the blocks whose hashes are beside large shards; None: there are none (a checkpoint
    of an older version).
    checksum: of the other fields; None in a checkpoint of an older version.
    """

    format: int
    step: int = Field(ge=0)
    version: int
    metric: float | None
    files: dict[str, tuple[int, str]]
    block_bytes: int | None = Field(None, ge=1)
    checksum: str | None = None

    def to_json(self) -> str:
        return sealed_document(self.model_dump(exclude={CHECKSUM}))


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of the checkpoint in `folder`.

    Raises:
        CheckpointError: it cannot be read, or is of another format.
    """
    path = folder / MANIFEST
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return parse_manifest(content, str(folder))


def parse_manifest(content: bytes, folder: str) -> Manifest:
    """Return the manifest in `content`. folder: of its checkpoint, for errors.

    Raises:
        CheckpointError: it is damaged, or of another format.
    """
    try:
        data = json.loads(content.decode("utf-8"))
        if isinstance(data, dict) and data.get("format") != FORMAT:
            raise CheckpointError(f"{folder} has format {data.get('format')!r}, this version reads {FORMAT}")
        if isinstance(data, dict):
            check_document(data, f"checkpoint {folder}: {MANIFEST}")
        return Manifest.model_validate(data)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or other fields
        raise CheckpointError(
            f"checkpoint {folder} is damaged: {MANIFEST}: {' '.join(str(error).split())[:200]}"
        ) from error


# ----------------------------------------------------------------------------------------------------- verify


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes of a file that one hash covers. block: index of the block; None: the whole file."""

    path: str
    start: int
    num_bytes: int
    block: int | None


@dataclass(frozen=True, slots=True)
class Verification:
    """What a verification of the checkpoint in `folder` reads: files whose path begins with `below`.

    The pieces of all files form one sequence of bytes. A part is a range of it: all parts are equally large,
    to within a block, or a file that has no hashes of blocks.
    """

    folder: Path
    manifest: Manifest
    how: Verify
    below: str = ""
    sample_bytes: int = SAMPLE_BYTES

    @property
    def num_bytes(self) -> int:
        """How much all parts together read, without the hashes of blocks."""
        return sum(self._num_bytes_of(path) for path in self._paths)

    def damage(self, part: int, num_parts: int) -> list[str]:
        """Read part `part` of `num_parts` and return a line for each damage, empty if there is none."""
        total = self.num_bytes
        first, end = (total * index // num_parts for index in (part, part + 1))
        # An empty file reads no bytes, and belongs to the part that begins where it is. After the last byte
        # no part begins.
        end += part == num_parts - 1
        reader = _Reader(self.folder, self.manifest)
        lines = (reader.damage(piece) for piece in self._pieces(first, end))
        return [line for line in lines if line is not None]

    @property
    def _paths(self) -> list[str]:
        return sorted(path for path in self.manifest.files if path.startswith(self.below))

    def _pieces(self, first: int, end: int) -> Iterator[_Piece]:
        """Yield the pieces that begin in [first, end) of the sequence."""
        position = 0
        for path in self._paths:
            size, begin = self._num_bytes_of(path), position
            position += size
            if position < first or begin >= end:
                continue
            for piece in self._pieces_of(path):
                if first <= begin < end:
                    yield piece
                begin += piece.num_bytes

    def _num_bytes_of(self, path: str) -> int:
        size, _ = self.manifest.files[path]
        if not self._is_sampled(path):
            return size
        return sum(piece.num_bytes for piece in self._pieces_of(path))

    def _is_sampled(self, path: str) -> bool:
        return (
            self.how == "sample" and path.endswith(SHARD) and self.manifest.files[path][0] > self.sample_bytes
        )

    def _pieces_of(self, path: str) -> Iterator[_Piece]:
        size, sha256 = self.manifest.files[path]
        block_bytes = self.manifest.block_bytes
        is_sampled = self._is_sampled(path)
        if block_bytes is None or path + BLOCKS not in self.manifest.files:
            if not is_sampled:
                yield _Piece(path, 0, size, None)
            return
        num_blocks = -(-size // block_bytes)
        blocks = (
            _sample(num_blocks, self.sample_bytes // block_bytes, seed=sha256)
            if is_sampled
            else range(num_blocks)
        )
        for block in blocks:
            start = block * block_bytes
            yield _Piece(path, start, min(block_bytes, size - start), block)


def _sample(num_blocks: int, num_chosen: int, *, seed: str) -> list[int]:
    """Return the indices of the blocks to read: the first, the last, and others chosen by `seed`.

    The seed is the hash of the shard: a verdict does not depend on who asks or how often, and each checkpoint
    of a run is read at other places.
    """
    ends = sorted({0, num_blocks - 1})[:num_chosen]
    between = range(1, num_blocks - 1)
    others = random.Random(seed).sample(between, min(len(between), max(0, num_chosen - len(ends))))
    return sorted([*ends, *others])


class _Reader:
    """Compares pieces of files with their hashes."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._manifest = manifest
        self._digests: dict[str, bytes | None] = {}

    def damage(self, piece: _Piece) -> str | None:
        """Return what is wrong with a piece, None if nothing is."""
        if piece.block is None:
            return damage_of_file(self._folder, piece.path, self._manifest.files[piece.path])
        try:
            return self._damage_of_block(piece, piece.block)
        except OSError as error:
            return f"{piece.path} cannot be read: {error.strerror}"

    def _damage_of_block(self, piece: _Piece, block: int) -> str | None:
        digests = self._block_digests(piece.path)
        if digests is None:
            return None  # the file of the hashes is damaged, and is reported as a file of its own
        with (self._folder / piece.path).open("rb") as file:
            file.seek(piece.start)
            found = hashlib.sha256(file.read(piece.num_bytes)).digest()
        if found == digests[block * _DIGEST_BYTES : (block + 1) * _DIGEST_BYTES]:
            return None
        return f"{piece.path} was changed between bytes {piece.start} and {piece.start + piece.num_bytes}"

    def _block_digests(self, path: str) -> bytes | None:
        """Return the verified hashes of a shard's blocks, None if they are damaged."""
        if path not in self._digests:
            content = (self._folder / (path + BLOCKS)).read_bytes()
            is_whole = hashlib.sha256(content).hexdigest() == self._manifest.files[path + BLOCKS][1]
            self._digests[path] = content if is_whole else None
        return self._digests[path]


def damage_of_file(folder: Path, path: str, expected: tuple[int, str]) -> str | None:
    """Hash a whole file; return what is wrong with it, None if nothing is. expected: bytes and sha256."""
    try:
        with (folder / path).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return None if digest == expected[1] else f"{path} was changed"


def damage_of_sizes(folder: Path, files: Mapping[str, tuple[int, str]]) -> str | None:
    """Return the first file that is missing or of another size, None if there is none; nothing is opened."""
    for path, (size, _) in files.items():
        try:
            found = (folder / path).stat().st_size
        except OSError:
            return f"{path} is missing"
        if found != size:
            return f"{path} has {found} bytes instead of {size}"
    return None


def read_model_config(folder: Path) -> ModelConfig:
    """Return the `model` config of the learner that wrote `folder`.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    path = folder / MODEL
    try:
        model = ModelConfig.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # not UTF-8, not JSON, or wrong fields
        raise CheckpointError(f"{path} is damaged: {' '.join(str(error).split())[:200]}") from error
    # The adapter's values are in the checkpoint: the one that training continued is not needed any more.
    return model.model_copy(update={"lora": model.lora.model_copy(update={"path": ""})})
