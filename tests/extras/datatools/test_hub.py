"""Data sets of the hub by name: from its cache, or from a small hub on this machine; never the network."""

from __future__ import annotations

import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from parts.hub import Repository, ask_in_process, hub_with

READ = """
import json, sys
from agentrl.extras.datatools.originals import OriginalSource, open_originals, read_originals
from agentrl.errors import DataError

def read(source):
    try:
        return [[row.split, row.index, row.raw["n"]] for row in read_originals(open_originals(OriginalSource(**source)))]
    except DataError as error:
        return str(error)

print(json.dumps([read(source) for source in json.loads(sys.argv[1])]))
"""  # noqa: E501


def read(environment: dict, *sources: dict) -> list:
    return ask_in_process(READ, environment, json.dumps(sources))


def parquet(*numbers: int) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"n": list(numbers)}), buffer)
    return buffer.getvalue()


CONVERTED, MAIN, OLD = "c" * 40, "a" * 40, "b" * 40


AUTHORS = {"train.jsonl": b'{"n": 5}\n', "README.md": b"words", "load.py": b"raise SystemExit"}
REPOSITORIES = {
    "datasets/team/sums": Repository(
        {"refs/convert/parquet": CONVERTED, "main": MAIN, "v1": OLD},
        {
            CONVERTED: {
                "main/train/0000.parquet": parquet(1, 2),
                "main/test/0000.parquet": parquet(3),
                "other/train/0000.parquet": parquet(4),
            },
            MAIN: AUTHORS,
            OLD: {"train.jsonl": b'{"n": 6}\n'},
        },
    ),
    "datasets/team/plain": Repository({"main": MAIN}, {MAIN: AUTHORS}),
}


@pytest.fixture
def hub(tmp_path):
    with hub_with(REPOSITORIES, tmp_path) as hub:
        yield hub


def test_the_hubs_own_parquet_files_are_read_and_only_those_of_the_subset(hub):
    assert read(hub.environment, {"name": "team/sums", "subset": "main"}) == [
        [["test", 0, 3], ["train", 0, 1], ["train", 1, 2]]
    ]
    assert sorted(hub.asked) == ["main/test/0000.parquet", "main/train/0000.parquet"]
    offline = {**hub.environment, "HF_HUB_OFFLINE": "1"}
    assert read(offline, {"name": "team/sums", "subset": "main", "split": "test"}) == [[["test", 0, 3]]]


def test_the_authors_files_are_read_where_there_are_no_others_or_a_revision_is_named(hub):
    assert read(hub.environment, {"name": "team/plain"}, {"name": "team/sums", "revision": "v1"}) == [
        [["train", 0, 5]],
        [["train", 0, 6]],
    ]
    assert sorted(hub.asked) == ["train.jsonl", "train.jsonl"]


def test_what_the_hub_does_not_have_is_told_apart(hub):
    sums = {"name": "team/sums"}
    said = read(
        hub.environment,
        {"name": "team/other"},
        {**sums, "subset": "none"},
        {**sums, "revision": "v2"},
        {**sums, "split": "dev"},
    )
    assert "no such dataset on the hub" in said[0]
    assert said[1] == "'team/sums' has no subset (folder) 'none'"
    assert said[2] == "dataset 'team/sums': the hub does not have revision 'v2'"
    assert said[3] == "'team/sums' has no split 'dev'; it has test, train"


@pytest.mark.parametrize("environment", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}])
def test_no_network_is_one_clear_line(tmp_path, environment):
    said = read({"HF_HUB_CACHE": str(tmp_path), **environment}, {"name": "team/sums"})[0]
    assert said.startswith("dataset 'team/sums': no such folder, and the hub cannot be reached")
    assert "\n" not in said
