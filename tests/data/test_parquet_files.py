"""Sealed Parquet files: no changed byte is read as other content, and everybody can read them."""

import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl.data.parquet_files import open_parquet, read_table, reading_parquet, write_table, writing_parquet
from agentrl.data.trajectories import encode, read_parquet, read_trajectories, write_parquet
from agentrl.errors import DataError
from parts.trajectories import make_trajectory

WHAT = "a table"
FLIPS = 400


@pytest.fixture
def table():
    rng = np.random.default_rng(0)
    return pa.table(
        {
            "id": list(range(200)),
            "text": [f"answer {i}" * (i % 5) for i in range(200)],
            "tokens": [rng.integers(0, 99, i % 7).tolist() for i in range(200)],
        }
    )


def by_pages(path):
    with reading_parquet(path, WHAT), open_parquet(path, WHAT) as file:
        return file.read()


@pytest.mark.parametrize("reader", [lambda path: read_table(path, WHAT), by_pages])
@pytest.mark.parametrize("compression", ["zstd", "none"])
def test_a_flipped_bit_is_found_or_harms_nothing(tmp_path, table, reader, compression):
    path, rng = tmp_path / "a.parquet", random.Random(1)
    write_table(table, path, compression=compression)
    data, told = path.read_bytes(), []
    for _ in range(FLIPS):
        flipped = bytearray(data)
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        try:
            assert reader(path).equals(table)
        except DataError as error:
            told.append(str(error))
    assert len(told) > 0.8 * FLIPS
    assert all(line.startswith(str(path)) and "\n" not in line for line in told)


@pytest.mark.parametrize("size", [0, 3, 11, 500, -1, -9])
def test_a_cut_file_is_named(tmp_path, table, size):
    path = tmp_path / "a.parquet"
    write_table(table, path)
    path.write_bytes(path.read_bytes()[:size])
    for reader in (lambda: read_table(path, WHAT), lambda: by_pages(path)):
        with pytest.raises(DataError, match=r"a\.parquet cannot be read as a table: it is no whole Parquet"):
            reader()


def test_other_readers_and_files_without_a_seal(tmp_path, table):
    path = tmp_path / "a.parquet"
    with writing_parquet(path, table.schema) as writer:
        writer.write_table(table.slice(0, 100))
        writer.write_table(table.slice(100))
    assert pq.read_table(path).equals(table)
    assert pq.read_table(path, filters=pa.compute.field("id") == 7).num_rows == 1
    assert list(tmp_path.iterdir()) == [path]
    pq.write_table(table, path)  # as an earlier version did
    assert read_table(path, WHAT).equals(table)
    with pytest.raises(FileNotFoundError):
        read_table(tmp_path / "b.parquet", WHAT)


def test_damage_in_an_old_file_of_trajectories_is_one_line_or_nothing(tmp_path):
    """Without checksums it cannot be found everywhere; but no error is raw."""
    path, rng = tmp_path / "a.parquet", random.Random(2)
    write_parquet(path, encode([make_trajectory([-1, 0, 0], member=m, reward=1.0) for m in range(4)]))
    pq.write_table(pa.Table.from_batches([read_parquet(path)]), path)
    data, told = path.read_bytes(), []
    for _ in range(FLIPS):
        flipped = bytearray(data)
        flipped[rng.randrange(4, len(data) - 2000)] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        try:
            read_trajectories(path)
        except DataError as error:
            told.append(str(error))
    assert told
    assert not any("\n" in line for line in told)
