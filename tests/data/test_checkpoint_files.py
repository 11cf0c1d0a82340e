"""Hashes of a checkpoint's files are those of the bytes on disk; verification finds what it promises, and
reads no more.
"""

import hashlib
import json
import random
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.data.checkpoint_files import (
    BLOCK_BYTES,
    BLOCKS,
    FORMAT,
    SAMPLE_BYTES,
    HashingFile,
    Manifest,
    Verification,
    read_manifest,
    stored_file,
)
from agentrl.errors import CheckpointError
from agentrl.tracking.seals import sealed_document

BLOCK = 8
SHARD_BYTES = 101
FILES = {"buffer.bin": 5, "learner/.metadata": 40, "learner/empty": 0, "learner/critic/__0_0.distcp": 9}
LARGE = "learner/__0_0.distcp"


def write(folder: Path, sizes: dict[str, int], *, seed: int = 0, block_bytes: int | None = BLOCK) -> Manifest:
    """Write a checkpoint whose shards have hashes of blocks, computed here by other means."""
    files = {}
    for name, size in sizes.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = random.Random(f"{seed} {name}").randbytes(size)
        path.write_bytes(content)
        if block_bytes is not None and name.endswith(".distcp"):
            blocks = [content[i : i + block_bytes] for i in range(0, size, block_bytes)]
            (folder / (name + BLOCKS)).write_bytes(b"".join(hashlib.sha256(b).digest() for b in blocks))
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        content = path.read_bytes()
        files[str(path.relative_to(folder))] = (len(content), hashlib.sha256(content).hexdigest())
    return Manifest(format=FORMAT, step=1, version=1, metric=None, files=files, block_bytes=block_bytes)


def damage(folder: Path, manifest: Manifest, how: str, *, num_parts: int = 1, **options) -> list[str]:
    reading = Verification(folder, manifest, how, **options)
    return [line for part in range(num_parts) for line in reading.damage(part, num_parts)]


def flipped(folder: Path, name: str, manifest: Manifest, how: str, **options) -> list[list[str]]:
    """For each byte of a file: what a verification says if only this byte is another one."""
    path = folder / name
    whole = path.read_bytes()
    found = []
    for index in range(len(whole)):
        path.write_bytes(whole[:index] + bytes([whole[index] ^ 1]) + whole[index + 1 :])
        found.append(damage(folder, manifest, how, **options))
    path.write_bytes(whole)
    return found


@given(chunks=st.lists(st.binary(max_size=40), max_size=12), block_bytes=st.integers(1, 30))
def test_what_is_written_in_any_chunks_has_the_hashes_of_the_file(tmp_path_factory, chunks, block_bytes):
    path = tmp_path_factory.mktemp("hashed") / "shard"
    with path.open("wb") as file:
        hashing = HashingFile(file, block_bytes=block_bytes)
        for chunk in chunks:
            assert hashing.write(memoryview(chunk)) == len(chunk)
    content = path.read_bytes()
    assert content == b"".join(chunks)
    assert hashing.tell() == len(content)
    assert hashing.stored_as("shard") == stored_file(path.parent, path)
    assert hashing.stored_as("shard").sha256 == hashlib.sha256(content).hexdigest()
    blocks = [content[i : i + block_bytes] for i in range(0, len(content), block_bytes)]
    assert hashing.block_digests() == b"".join(hashlib.sha256(block).digest() for block in blocks)


@pytest.mark.parametrize("block_bytes", [BLOCK, None], ids=["blocks", "older version"])
@pytest.mark.parametrize("num_parts", [1, 3, 200])
def test_full_finds_every_flipped_byte_once_however_it_is_shared(tmp_path, num_parts, block_bytes):
    """One part finds it, and no other: together the parts read each byte once."""
    manifest = write(tmp_path, FILES | {LARGE: SHARD_BYTES}, block_bytes=block_bytes)
    assert damage(tmp_path, manifest, "full", num_parts=num_parts) == []
    for name in manifest.files:
        for lines in flipped(tmp_path, name, manifest, "full", num_parts=num_parts):
            assert len({*lines}) == 1, lines
            assert lines[0].startswith(f"{name} was changed")
            assert len(lines) == 1
    assert Verification(tmp_path, manifest, "full").num_bytes == sum(n for n, _ in manifest.files.values())


def test_a_changed_block_is_named(tmp_path):
    manifest = write(tmp_path, {LARGE: SHARD_BYTES})
    found = flipped(tmp_path, LARGE, manifest, "full")
    assert found[17] == [f"{LARGE} was changed between bytes 16 and 24"]
    assert found[-1] == [f"{LARGE} was changed between bytes 96 and {SHARD_BYTES}"]


def found_by_sample(folder: Path, manifest: Manifest, sample_bytes: int) -> list[int]:
    found = flipped(folder, LARGE, manifest, "sample", sample_bytes=sample_bytes)
    return [index for index, lines in enumerate(found) if lines]


@settings(max_examples=4, deadline=None)
@given(sample_bytes=st.integers(2 * BLOCK, SHARD_BYTES - 1), seed=st.integers(0, 9))
def test_a_sample_covers_so_much_of_a_large_shard_and_all_of_the_rest(tmp_path_factory, sample_bytes, seed):
    folder = tmp_path_factory.mktemp("sampled")
    manifest = write(folder, FILES | {LARGE: SHARD_BYTES}, seed=seed)
    found = found_by_sample(folder, manifest, sample_bytes)
    assert sample_bytes - 2 * BLOCK < len(found) <= sample_bytes
    assert {0, SHARD_BYTES - 1} <= {*found}
    for name in manifest.files:
        if name != LARGE:
            assert all(flipped(folder, name, manifest, "sample", sample_bytes=sample_bytes)), name


def test_a_sample_is_the_same_for_all_who_ask_and_another_for_each_checkpoint(tmp_path):
    first, moved = tmp_path / "first", tmp_path / "moved"
    manifest = write(first, {LARGE: SHARD_BYTES})
    shutil.copytree(first, moved)
    found = found_by_sample(first, manifest, 40)
    assert found_by_sample(moved, manifest, 40) == found
    samples = set()
    for seed in range(6):
        folder = tmp_path / str(seed)
        samples.add(tuple(found_by_sample(folder, write(folder, {LARGE: SHARD_BYTES}, seed=seed), 40)))
    assert len(samples) > 3


def test_of_a_large_shard_of_an_older_version_a_sample_is_its_size(tmp_path):
    manifest = write(tmp_path, FILES | {LARGE: SHARD_BYTES}, block_bytes=None)
    assert found_by_sample(tmp_path, manifest, SHARD_BYTES - 1) == []
    assert len(found_by_sample(tmp_path, manifest, SHARD_BYTES)) == SHARD_BYTES, "it is not large"
    assert all(flipped(tmp_path, "learner/.metadata", manifest, "sample", sample_bytes=1))


def bytes_read() -> int:
    """Return how many bytes this process has asked the kernel for."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def test_a_sample_reads_64_mib_of_a_large_shard_by_the_kernel_s_count(tmp_path):
    size, slack = SAMPLE_BYTES + 9 * BLOCK_BYTES + 5, 1 << 20
    manifest = write(tmp_path, {LARGE: size}, block_bytes=BLOCK_BYTES)
    amounts = {}
    for how in ("sample", "full"):
        before = bytes_read()
        assert damage(tmp_path, manifest, how) == []
        amounts[how] = bytes_read() - before
    assert SAMPLE_BYTES - BLOCK_BYTES < amounts["sample"] <= SAMPLE_BYTES + slack
    assert size <= amounts["full"] <= size + slack


def test_only_files_below_are_read(tmp_path):
    manifest = write(tmp_path, FILES)
    found = flipped(tmp_path, "buffer.bin", manifest, "full", below="learner/")
    assert found == [[]] * FILES["buffer.bin"]


@pytest.mark.parametrize("name", [LARGE, LARGE + BLOCKS, "learner/.metadata"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, name):
    manifest = write(tmp_path, FILES | {LARGE: SHARD_BYTES})
    (tmp_path / name).unlink()
    lines = damage(tmp_path, manifest, "full", num_parts=2)
    assert lines
    assert all(line.endswith("cannot be read: No such file or directory") for line in lines)
    assert f"{name} cannot be read: No such file or directory" in lines


@pytest.mark.parametrize("block_bytes", [0, -1, "many"])
def test_a_manifest_with_an_impossible_block_is_damaged(tmp_path, block_bytes):
    fields = json.loads(write(tmp_path, FILES).to_json())
    (tmp_path / "manifest.json").write_text(sealed_document({**fields, "block_bytes": block_bytes}))
    with pytest.raises(CheckpointError, match=r"is damaged: manifest\.json: .*block_bytes"):
        read_manifest(tmp_path)
