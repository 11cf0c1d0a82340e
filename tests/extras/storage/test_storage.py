"""Object storage through one seam: a folder, memory, and a real S3 server with faults in front of it."""

import hashlib
import os
import threading
from contextlib import suppress

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl.config.model import ModelConfig
from agentrl.config.storage_urls import SCHEMES, problem_of, shown
from agentrl.config.trainer import TrainerConfig
from agentrl.data.files import open_rows
from agentrl.data.folder_index import INDEX, FolderIndex
from agentrl.data.model_source import resolve_model
from agentrl.data.storage import mirrored_folder, new_folder
from agentrl.errors import ConfigError, StorageError
from agentrl.extras.storage import storage
from agentrl.extras.storage.fetched import fetched_file, fetched_folder, read_index
from agentrl.extras.storage.sent import send_folder
from agentrl.extras.storage.storage import StoragePath

PARTS_OF_UPLOAD = 11 << 20
"""More than one part of an upload in parts."""


@pytest.fixture(params=("file", "memory", "s3", "gs"))
def place(request, s3, gcs, tmp_path):
    return StoragePath.of(
        {
            "file": f"file://{tmp_path}/storage",
            "memory": f"memory://tests/{tmp_path.name}",
            "s3": s3.url,
            "gs": gcs,
        }[request.param]
    )


@pytest.fixture
def few_attempts(monkeypatch):
    """A request is given up after two attempts: pauses between attempts double."""
    monkeypatch.setattr(storage, "MAX_ATTEMPTS", 2)
    storage.file_system.cache_clear()


def written(path, content: bytes):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


# ---------------------------------------------------------------------------------------------- one contract


def test_what_was_written_is_read_and_listed_in_every_storage(place, tmp_path):
    content = os.urandom(100_000)
    place.probe()
    assert (place / "a").read() is None
    assert (place / "a").size() is None
    assert place.files() == {}
    (place / "a").write(b"old")
    (place / "a").write(b"new")
    sent = (place / "b/c").upload(written(tmp_path / "file", content))
    assert sent == (len(content), hashlib.sha256(content).hexdigest())
    assert (place / "a").read() == b"new"
    assert set(place.files()) == {"a", "b/c"}, "neither a probe nor a temporary file is left"
    assert (place / "b/c").size() == len(content)
    (place / "b/c").download(tmp_path / "there/copy", expected=sent)
    assert (tmp_path / "there/copy").read_bytes() == content
    (place / "a").delete()
    (place / "a").delete()
    assert set(place.files()) == {"b/c"}
    place.delete_folder()
    place.delete_folder()
    assert place.files() == {}


def test_bytes_that_differ_from_what_was_written_are_refused(place, tmp_path):
    sent = (place / "a").upload(written(tmp_path / "file", b"weights"))
    (place / "a").write(b"weighty")
    with pytest.raises(StorageError, match="is damaged: 7 bytes with another hash"):
        (place / "a").download(tmp_path / "copy", expected=sent)
    with pytest.raises(StorageError, match="does not exist"):
        (place / "b").download(tmp_path / "copy")
    assert sorted(path.name for path in tmp_path.glob("copy*")) == []


def test_a_folder_is_fetched_as_it_was_sent_or_refused(place, tmp_path):
    folder = tmp_path / "model"
    files = {"config.json": b"{}", "weights/a.safetensors": b"a", "weights/b.safetensors": b"b"}
    for name, content in files.items():
        written(folder / name, content)
    send_folder(folder, place)
    if str(place).startswith("file"):  # it is read in place
        assert (fetched_folder(place.url) / "weights/a.safetensors").read_bytes() == b"a"
        return

    def fetched() -> dict[str, bytes]:
        found = fetched_folder(place.url)
        return {str(p.relative_to(found)): p.read_bytes() for p in found.rglob("*") if p.is_file()}

    assert fetched() == files
    written(folder / "config.json", b"[]")
    (folder / "weights/b.safetensors").unlink()
    send_folder(folder, place)
    assert fetched() == {"config.json": b"[]", "weights/a.safetensors": b"a"}
    assert set(place.files()) == {"config.json", "weights/a.safetensors", INDEX}
    (place / INDEX).write(FolderIndex(files=None).to_bytes())
    with pytest.raises(StorageError, match="is incomplete"):
        fetched_folder(place.url)
    (place / INDEX).write(b"{")
    with pytest.raises(StorageError, match="is damaged"):
        fetched_folder(place.url)
    (place / INDEX).delete()  # as another program would have written it
    assert fetched() == {"config.json": b"[]", "weights/a.safetensors": b"a"}
    (place / "weights/a.safetensors").write(b"longer")
    assert fetched()["weights/a.safetensors"] == b"longer"


# ---------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("faults", [{"busy": 2}, {"cut_requests": 1}, {"cut_answers": 1}])
def test_busy_answers_and_cut_connections_are_retried(s3, tmp_path, faults):
    place = StoragePath.of(s3.url)
    content = os.urandom(100_000)
    source = written(tmp_path / "file", content)
    with s3.failing(**faults):
        sent = (place / "a").upload(source)
    with s3.failing(**faults) as left:
        (place / "a").download(tmp_path / "copy", expected=sent)
    assert [getattr(left, name) for name in faults] == [0], "the fault did not happen"
    assert (tmp_path / "copy").read_bytes() == content
    with s3.failing(**faults):
        assert set(place.files()) == {"a"}


def test_a_listing_in_pages_is_followed_to_its_end(s3):
    place = StoragePath.of(s3.url)
    names = {f"step_{number}" for number in range(7)}
    for name in names:
        (place / name).write(b"x")
    with s3.failing(page=2) as faults:
        assert set(place.files()) == names
    assert len(faults.requests) == 4


def test_a_file_appears_when_it_is_complete(s3, tmp_path):
    place = StoragePath.of(s3.url) / "slow"
    place.write(b"old")
    source = written(tmp_path / "file", os.urandom(PARTS_OF_UPLOAD))
    with s3.failing(held=threading.Event()) as faults:
        thread = threading.Thread(target=place.upload, args=(source,))
        thread.start()
        assert faults.waiting.wait(60)
        assert place.read() == b"old"
        faults.held.set()
        thread.join()
    assert place.read() == source.read_bytes()


def test_a_file_that_is_replaced_while_it_is_read_is_whole(s3, tmp_path):
    """The client asks for the size first: between that and the content, a writer replaces the file."""
    place = StoragePath.of(s3.url) / "index"
    place.write(b"old")
    with s3.failing(between=lambda: place.write(b"longer content")) as faults:
        assert place.read() == b"longer content"
        assert faults.between is None, "nothing was replaced"
    with s3.failing(between=lambda: place.write(b"short")):
        place.download(tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"short"


def test_an_upload_that_fails_leaves_what_was_there(s3, tmp_path, few_attempts):
    place = StoragePath.of(s3.url) / "a"
    place.write(b"old")
    for faults in ({"forbidden": "/a"}, {"busy": 99}):
        with s3.failing(**faults), pytest.raises(StorageError) as raised:
            place.upload(written(tmp_path / "file", os.urandom(PARTS_OF_UPLOAD)))
        assert "\n" not in str(raised.value)
        assert place.read() == b"old"


def test_a_folder_that_was_sent_in_part_is_refused(s3, tmp_path):
    for name in ("a", "b", "c"):
        written(tmp_path / "folder" / name, name.encode())
    place = StoragePath.of(s3.url)
    with s3.failing(forbidden="/b"), pytest.raises(StorageError, match="access is denied"):
        send_folder(tmp_path / "folder", place)
    with pytest.raises(StorageError, match="is incomplete"):
        fetched_folder(s3.url)
    send_folder(tmp_path / "folder", place)
    assert (fetched_folder(s3.url) / "b").read_bytes() == b"b"


# ------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://host/x", "scheme ftp://; use one of s3://, gs://, file://, memory://"),
        ("s3:///x", "names no bucket; write s3://BUCKET/FOLDER"),
        ("file://host/x", "is not an absolute path; write file:///FOLDER"),
        ("file:///", "names no folder"),
        ("memory://", "names no folder"),
        ("s3://b/x?acl=public", "has acl behind the question mark; only s3:// URLs have options"),
        ("gs://b/x?region=x", "has options behind the question mark; only s3://"),
        ("s3://b/x#1", "contains a #"),
        ("s3://user:hush@b/x", "contains credentials"),
        ("s3://user:hush@b/x?access_key=hush", "contains credentials"),
    ],
)
def test_a_wrong_url_is_one_line_without_secrets(url, words):
    problem = problem_of(url)
    assert words in problem
    assert "hush" not in problem
    assert "\n" not in problem
    with pytest.raises(ConfigError):
        StoragePath.of(url)
    for key in ("upload_to", "run_dir"):
        with pytest.raises(ValueError) as raised:
            TrainerConfig(**{key: url})
        assert "hush" not in str(raised.value.errors()[0]["ctx"]["error"])


def test_every_scheme_that_is_named_is_accepted():
    for scheme in SCHEMES:
        assert problem_of(f"{scheme}:///folder" if scheme == "file" else f"{scheme}://bucket/folder") is None
    assert problem_of("s3://b/x?endpoint_override=127.0.0.1:9000&scheme=http&region=eu-west-1") is None
    assert shown("s3://b/x?endpoint_override=h") == "s3://b/x"
    with pytest.raises(ValueError, match="is not a URL"):
        TrainerConfig(upload_to="runs/copy")


@pytest.mark.parametrize(
    ("url", "key", "words"),
    [
        ("s3://no-such-bucket/x", None, "the bucket does not exist; create it"),
        ("s3://tests/x", "unknown", "does not know these credentials; check the credentials (AWS_"),
        (
            "s3://tests/x?endpoint_override=127.0.0.1:1&scheme=http",
            None,
            "cannot be reached; check the network",
        ),
        ("file:///proc/x", None, "No such file"),
    ],
)
def test_a_place_that_cannot_be_written_says_why_in_one_line(s3, few_attempts, monkeypatch, url, key, words):
    if key is not None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    with pytest.raises(ConfigError) as raised:
        StoragePath.of(url).probe()
    assert words in str(raised.value)
    assert str(raised.value).startswith(shown(url))
    assert "\n" not in str(raised.value)


def test_no_permission_to_write_is_found_by_the_probe(s3):
    with s3.failing(forbidden="/"), pytest.raises(ConfigError, match="cannot be written: access is denied"):
        StoragePath.of(s3.url).probe()


# ---------------------------------------------------------------------------------------- inputs and results


def test_rows_are_read_from_storage_as_from_a_file(s3, tmp_path):
    rows = [{"prompt": f"question {i}", "answer": i} for i in range(50)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    written(tmp_path / "train.jsonl", "".join(f'{{"answer": {i}}}\n' for i in range(3)).encode())
    place = StoragePath.of(s3.url)
    for name in ("train.parquet", "train.jsonl"):
        (place / name).upload(tmp_path / name)
    found = open_rows(f"{s3.url}/train.parquet")
    assert [found.row(index) for index in range(len(found))] == rows
    with s3.failing() as faults:
        fetched_file(f"{s3.url}/train.parquet")
    assert not any(request.startswith("GET") for request in faults.requests), "it was fetched twice"
    assert open_rows(f"{s3.url}/train.jsonl").row(2) == {"answer": 2}
    (place / "train.jsonl").write(b'{"answer": "another"}\n')
    assert open_rows(f"{s3.url}/train.jsonl").row(0) == {"answer": "another"}
    with pytest.raises(ConfigError, match=r"missing\.parquet' does not exist"):
        open_rows(f"{s3.url}/missing.parquet")


def test_a_model_in_storage_is_resolved_to_a_local_folder(s3, tmp_path):
    weights = (2).to_bytes(8, "little") + b"{}"
    written(tmp_path / "model" / "config.json", b"config.json")
    written(tmp_path / "model" / "model.safetensors", weights)
    send_folder(tmp_path / "model", StoragePath.of(f"{s3.url}/model"))
    model = resolve_model(ModelConfig(path=f"{s3.url}/model", tokenizer_path=f"{s3.url}/model"))
    assert model.path == model.tokenizer_path
    assert model.path.endswith("/model")
    with open(f"{model.path}/model.safetensors", "rb") as file:
        assert file.read() == weights
    with pytest.raises(ConfigError, match=r"model\.path: folder .* does not exist or is empty"):
        resolve_model(ModelConfig(path=f"{s3.url}/none"))


def test_results_are_sent_whole_and_only_into_a_new_folder(s3):
    with new_folder(f"{s3.url}/out") as folder:
        written(folder / "a/b", b"1")
        assert StoragePath.of(s3.url).files() == {}
    assert (fetched_folder(f"{s3.url}/out") / "a/b").read_bytes() == b"1"
    with pytest.raises(ConfigError, match="exists and is not empty"), new_folder(f"{s3.url}/out"):
        pass
    with pytest.raises(ZeroDivisionError), new_folder(f"{s3.url}/failed"):
        1 / 0  # noqa: B018
    assert StoragePath.of(f"{s3.url}/failed").files() == {}


def test_results_that_grow_continue_anywhere_but_never_from_two_places(s3, monkeypatch, tmp_path):
    url, here, there = f"{s3.url}/eval", tmp_path / "here", tmp_path / "there"
    monkeypatch.setenv("AGENTRL_CACHE", str(here))
    with suppress(KeyboardInterrupt), mirrored_folder(url) as folder:
        written(folder / "attempts.sqlite", b"1")
        written(folder / "attempts.lock", b"")
        raise KeyboardInterrupt
    monkeypatch.setenv("AGENTRL_CACHE", str(there))
    with mirrored_folder(url) as folder:
        assert (folder / "attempts.sqlite").read_bytes() == b"1"
        assert not (folder / "attempts.lock").exists()
        written(folder / "attempts.sqlite", b"12")
    with mirrored_folder(url) as folder:
        assert (folder / "attempts.sqlite").read_bytes() == b"12"
    assert read_index(StoragePath.of(url)).files.keys() == {"attempts.sqlite"}
    monkeypatch.setenv("AGENTRL_CACHE", str(here))
    with pytest.raises(ConfigError, match="was changed from elsewhere"), mirrored_folder(url):
        pass
    with mirrored_folder(tmp_path / "local") as folder:
        assert folder == tmp_path / "local"
