"""Types of config fields that name a place: a local path, a URL of object storage, or either."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import AfterValidator

from agentrl.config.storage_urls import is_url, problem_of, shown


def _checked(path: str) -> str:
    if is_url(path) and (problem := problem_of(path)):
        raise ValueError(problem)
    return path


def _checked_url(url: str | None) -> str | None:
    if url is not None and not is_url(url):
        raise ValueError(
            f"{url!r} is not a URL; write s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or file:///FOLDER"
        )
    return None if url is None else _checked(url)


def _local(path: str | None) -> str | None:
    if path is not None and is_url(path):
        raise ValueError(
            f"{shown(path)!r} must be a local folder: a run writes there all the time; set trainer.upload_to "
            "to have finished files copied to a URL"
        )
    return path


def _beside_output(path: str | None) -> str | None:
    if path is not None and is_url(path):
        raise ValueError(f"{shown(path)!r} must be a local folder; only trainer.output may be a URL")
    return path


def _checked_all(paths: Iterable[str]) -> tuple[str, ...]:
    return tuple(_checked(path) for path in paths)


PathOrURL = Annotated[str, AfterValidator(_checked)]
"""A local path, or a URL that `problem_of` accepts."""
PathsOrURLs = Annotated[tuple[str, ...], AfterValidator(_checked_all)]
LocalFolder = Annotated[str | None, AfterValidator(_local)]
FolderBesideOutput = Annotated[str | None, AfterValidator(_beside_output)]
"""A local folder of a supervised training, whose model alone may go to a URL."""
StorageURL = Annotated[str | None, AfterValidator(_checked_url)]
