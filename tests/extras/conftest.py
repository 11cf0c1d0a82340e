"""Servers that tests of several extras need."""

import pytest

from agentrl.extras.storage import storage
from parts.gcs_server import BUCKET
from parts.gcs_server import gcs_server as serve_gcs
from parts.s3_server import S3Server, create_bucket


@pytest.fixture(scope="session")
def s3_server():
    """A real S3 server, one for the session: see `s3`."""
    server = S3Server()
    create_bucket(server)
    yield server
    server.close()


@pytest.fixture
def s3(s3_server, monkeypatch, tmp_path):
    """The S3 server, which the test finds by its environment; its `url` is a folder of the test's own."""
    for name, value in {**s3_server.environment(), "AGENTRL_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    storage.file_system.cache_clear()
    yield s3_server.for_test()
    storage.file_system.cache_clear()


@pytest.fixture(scope="session")
def gcs_server():
    """A server of Google Cloud Storage's protocol, one for the session: see `gcs`."""
    with serve_gcs() as address:
        yield address


@pytest.fixture
def gcs(gcs_server, monkeypatch, tmp_path):
    """The URL of a folder of the test's own on that server, which the test finds by its environment."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_server)
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path / "cache"))
    storage.file_system.cache_clear()
    yield f"gs://{BUCKET}/{tmp_path.name}"
    storage.file_system.cache_clear()
