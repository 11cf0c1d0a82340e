"""Object storage and shared folders: `StoragePath`, a file or folder named by a URL (s3, gs, file, memory).

All that agentrl reads from or writes to object storage goes through this class, over `pyarrow.fs`: it is
installed anyway, transfers in C++ without holding Python's lock, and retries what S3 and GCS answer when they
are busy. Other code works on local files: inputs are fetched before use (`fetched`), and finished files and
folders are sent.

What a reader may rely on: a file appears whole or not at all, its size is compared after writing, and nothing
depends on a listing except the names in folders that have no index of ours.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pyarrow as pa
from pyarrow import fs

from agentrl.config.storage_urls import problem_of, shown
from agentrl.data.atomic_files import sync
from agentrl.errors import ConfigError, DiskError, StorageError

CHUNK_BYTES = 16 << 20
"""Bytes per read and write. A read of S3 is one request."""
CONNECT_TIMEOUT_S = 10.0
REQUEST_TIMEOUT_S = 60.0
"""Seconds without a byte after which a request counts as failed."""
MAX_ATTEMPTS = 5
"""Attempts per request, with pauses that double: 503, timeouts and cut connections are retried."""
RETRY_TIME = timedelta(seconds=60)
"""Google's client retries a request for so long: it counts no attempts."""
MAX_READS = 3
"""Attempts to read a file that is replaced meanwhile, or damaged."""
PROBE = ".agentrl_probe"

_FAILURES = (OSError, pa.ArrowException)
_AWS = re.compile(r"AWS Error (?P<code>\w+)[^:]* during (?P<what>\w+) operation: (?P<text>.*)", re.S)
_REQUEST_ID = re.compile(r"\s*\(Request ID.*", re.S)
_CREDENTIALS = "check the credentials (AWS_ACCESS_KEY_ID, AWS_PROFILE; GOOGLE_APPLICATION_CREDENTIALS)"
_MEANINGS = (
    # words in the error of AWS's or Google's client, the cause, the cure
    (
        ("NO_SUCH_BUCKET", "bucket does not exist"),
        "the bucket does not exist",
        "create it, or correct the URL",
    ),
    (
        ("INVALID_ACCESS_KEY_ID", "INVALID_CLIENT_TOKEN", "SIGNATURE_DOES_NOT_MATCH", "UNRECOGNIZED_CLIENT"),
        "the storage does not know these credentials",
        _CREDENTIALS,
    ),
    (
        ("ACCESS_DENIED", "HTTP status 403", "PERMISSION_DENIED", "UNAUTHENTICATED", "HTTP status 401"),
        "access is denied",
        f"{_CREDENTIALS} and their permissions",
    ),
    (("PERMANENT_REDIRECT", "HTTP status 301"), "the bucket is in another region", "add ?region=REGION"),
    (
        ("SLOW_DOWN", "SERVICE_UNAVAILABLE", "HTTP status 503", "UNAVAILABLE"),
        "the storage is busy or down",
        "try again later",
    ),
    (
        ("NETWORK_CONNECTION", "REQUEST_TIMEOUT", "Could not connect", "curlCode"),
        "the storage cannot be reached",
        "check the network and the endpoint (AWS_ENDPOINT_URL)",
    ),
)


@dataclass(frozen=True, slots=True)
class StoragePath:
    """A file or folder behind a URL. Every method raises StorageError if the storage does not do it."""

    url: str
    _files: fs.FileSystem
    _path: str

    @classmethod
    def of(cls, url: str) -> StoragePath:
        """Return the place that a URL names; nothing is asked of the storage.

        Raises:
            ConfigError: the URL is malformed, or this build of pyarrow lacks the storage.
        """
        if problem := problem_of(url):
            raise ConfigError(problem)
        parts = urlsplit(url)
        files = file_system(parts.scheme, parts.netloc, tuple(parse_qsl(parts.query)))
        path = parts.path.rstrip("/") if parts.scheme == "file" else f"{parts.netloc}{parts.path}".strip("/")
        return cls(url, files, path)

    def __truediv__(self, name: str) -> StoragePath:
        before, mark, query = self.url.partition("?")
        return StoragePath(f"{before.rstrip('/')}/{name}{mark}{query}", self._files, f"{self._path}/{name}")

    def __str__(self) -> str:
        return shown(self.url)

    @property
    def name(self) -> str:
        return self._path.rpartition("/")[2]

    @property
    def parent(self) -> StoragePath:
        """The folder that this file is in."""
        before, mark, query = self.url.partition("?")
        before = before.rstrip("/").rpartition("/")[0]
        return StoragePath(f"{before}{mark}{query}", self._files, self._path.rpartition("/")[0])

    # --------------------------------------------------------------------------------------------------- read

    def read(self) -> bytes | None:
        """Return the content of a file, None if there is none. For small files.

        Raises:
            StorageError: it cannot be read, or is replaced all the time.
        """
        for _ in range(MAX_READS):
            with self._explained("read"):
                try:
                    with self._files.open_input_file(self._path) as file:
                        content: bytes = file.read()
                except FileNotFoundError:
                    return None
            # The client asks for the size first: a file that is replaced then is cut at the old size.
            if self.size() == len(content):
                return content
        raise StorageError(f"{self} was replaced while it was read, {MAX_READS} times")

    def size(self) -> int | None:
        """Return the size of a file in bytes, None if there is none."""
        return self._info().size

    def is_folder(self) -> bool:
        return bool(self._info().type == fs.FileType.Directory)

    def identity(self) -> str | None:
        """Return a text that changes with the content: size and time of writing; None without a file."""
        info = self._info()
        return f"{info.size} {info.mtime_ns}" if info.type == fs.FileType.File else None

    def files(self) -> dict[str, str]:
        """Return the files below a folder: relative path -> `identity`. Empty if there is no folder."""
        with self._explained("listed"):
            found = self._files.get_file_info(
                fs.FileSelector(self._path, recursive=True, allow_not_found=True)
            )
        own = len(self._path.strip("/")) + 1
        return {
            info.path.strip("/")[own:]: f"{info.size} {info.mtime_ns}"
            for info in sorted(found, key=lambda info: info.path)
            if info.type == fs.FileType.File
        }

    def download(self, target: Path, *, expected: tuple[int, str] | None = None) -> None:
        """Write a file to `target`, which appears whole or not at all.

        Args:
            expected: bytes and sha256 that the file must have; None: it may be replaced meanwhile, and then
                is read again.

        Raises:
            StorageError: there is no such file, or it differs from `expected` at every attempt.
        """
        partial = target.with_name(f"{target.name}.partial")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            for _ in range(MAX_READS):
                before = self.identity()
                size, sha256 = self._copy_to(partial)
                if (size, sha256) == expected or (expected is None and self.identity() == before):
                    break
            else:
                problem = (
                    f"was replaced while it was read, {MAX_READS} times"
                    if expected is None
                    else f"is damaged: {size} bytes with another hash than was written"
                )
                raise StorageError(f"{self} {problem}")
            sync(partial)
            os.replace(partial, target)
        except (NotADirectoryError, FileExistsError, IsADirectoryError) as error:
            raise DiskError(f"{target} cannot be written: {error.strerror}") from error
        finally:
            with suppress(NotADirectoryError):
                partial.unlink(missing_ok=True)

    def _copy_to(self, target: Path) -> tuple[int, str]:
        digest, size = hashlib.sha256(), 0
        with self._explained("read"):
            try:
                source = self._files.open_input_file(self._path)
            except FileNotFoundError:
                raise StorageError(f"{self} does not exist") from None
            with source, target.open("wb") as file:
                length = source.size()
                while size < length:
                    chunk = source.read(min(CHUNK_BYTES, length - size))
                    if not chunk:
                        raise StorageError(f"{self} ended after {size} of {length} bytes")
                    file.write(chunk)
                    digest.update(chunk)
                    size += len(chunk)
        return size, digest.hexdigest()

    def _info(self) -> fs.FileInfo:
        with self._explained("read"):
            return self._files.get_file_info(self._path)

    # -------------------------------------------------------------------------------------------------- write

    def write(self, content: bytes) -> None:
        """Write a small file: it is replaced as a whole."""
        with self._appearing() as (files, path):
            with files.open_output_stream(path) as stream:
                stream.write(content)

    def upload(self, source: Path) -> tuple[int, str]:
        """Send a local file; return the bytes that were sent, and their sha256.

        A file that grows meanwhile is sent up to the length that it had.
        """
        digest = hashlib.sha256()
        with source.open("rb") as file:
            left = size = os.fstat(file.fileno()).st_size
            with self._appearing(size) as (files, path), files.open_output_stream(path) as stream:
                while left and (chunk := file.read(min(CHUNK_BYTES, left))):
                    stream.write(chunk)
                    digest.update(chunk)
                    left -= len(chunk)
        return size, digest.hexdigest()

    @contextmanager
    def _appearing(self, size: int | None = None) -> Iterator[tuple[fs.FileSystem, str]]:
        """Yield where to write. `size`: bytes that the file must have at the end; None: not compared.

        Object storage shows an object when it is complete. A folder does not: there, the file is renamed.
        """
        with self._explained("written"):
            if isinstance(self._files, fs.S3FileSystem) or "gcs" in self._files.type_name:
                yield self._files, self._path
            else:
                self._files.create_dir(self._path.rpartition("/")[0], recursive=True)
                yield self._files, f"{self._path}.partial"
                self._files.move(f"{self._path}.partial", self._path)
        if size is not None and (found := self.size()) != size:
            self.delete()
            raise StorageError(f"{self} has {found} bytes after {size} were written")

    def delete(self) -> None:
        """Remove a file, if there is one."""
        with self._explained("removed"), suppress(FileNotFoundError):
            self._files.delete_file(self._path)

    def delete_folder(self) -> None:
        """Remove a folder, if there is one."""
        if not self.is_folder():  # Google's client knows no FileNotFoundError here
            return
        with self._explained("removed"), suppress(FileNotFoundError):
            self._files.delete_dir(self._path)

    def probe(self) -> None:
        """Write and remove a small marker in this folder.

        Raises:
            ConfigError: it could not be written; the message says why, and a cure.
        """
        try:
            (self / PROBE).write(b"agentrl\n")
            (self / PROBE).delete()
        except StorageError as error:
            raise ConfigError(str(error)) from error

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Turn an error of the storage's client into one line. what: it cannot be ..."""
        try:
            yield
        except _FAILURES as error:
            if isinstance(error, OSError) and error.errno is not None and error.filename:
                raise  # of the local file
            raise StorageError(f"{self} cannot be {what}: {reason_of(error)}") from error


def reason_of(error: Exception) -> str:
    """Return in one line why the storage refused, with a cure if the cause is known."""
    text = str(error)
    for words, cause, cure in _MEANINGS:
        if any(word in text for word in words):
            return f"{cause}; {cure}"
    if found := _AWS.search(text):
        text = f"{found['what']}: {found['text']}"
    return " ".join(_REQUEST_ID.sub("", text).split()) or type(error).__name__


@functools.cache
def file_system(scheme: str, bucket: str, options: tuple[tuple[str, str], ...]) -> fs.FileSystem:
    """Return the client for the URLs of one bucket, with the environment of the first call."""
    if scheme == "file":
        return fs.LocalFileSystem()
    if scheme == "memory":
        import fsspec

        return fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem("memory")))
    try:
        return _s3(bucket, dict(options)) if scheme == "s3" else _gcs()
    except ImportError as error:
        raise ConfigError(
            f"{scheme}://{bucket}: the installed pyarrow was built without this storage; install the one of "
            f"PyPI: pip install --force-reinstall pyarrow ({error})"
        ) from error


def _s3(bucket: str, options: dict[str, str]) -> fs.FileSystem:
    endpoint = (
        options.get("endpoint_override")
        or os.environ.get("AWS_ENDPOINT_URL_S3")
        or os.environ.get("AWS_ENDPOINT_URL")
    )
    given: dict[str, Any] = {}
    if endpoint is not None:
        own_scheme, _, address = endpoint.rpartition("://")
        given |= {"endpoint_override": address.rstrip("/"), "scheme": own_scheme or "https"}
    if "scheme" in options:
        given["scheme"] = options["scheme"]
    region = options.get("region") or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if region is None and endpoint is None:
        try:
            region = fs.resolve_s3_region(bucket)
        except _FAILURES as error:
            raise StorageError(f"s3://{bucket} cannot be found: {reason_of(error)}") from error
    return fs.S3FileSystem(
        region=region,
        connect_timeout=CONNECT_TIMEOUT_S,
        request_timeout=REQUEST_TIMEOUT_S,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=MAX_ATTEMPTS),
        allow_delayed_open=True,  # a small file is one request, and appears by it
        **given,
    )


def _gcs() -> fs.FileSystem:
    """Return the client of Google Cloud Storage, or of an emulator that the environment names."""
    address = os.environ.get("STORAGE_EMULATOR_HOST")
    if address is None:
        return fs.GcsFileSystem(retry_time_limit=RETRY_TIME)
    scheme, _, host = address.rpartition("://")
    return fs.GcsFileSystem(
        anonymous=True,
        scheme=scheme or "http",
        endpoint_override=host.rstrip("/"),
        retry_time_limit=RETRY_TIME,
    )
