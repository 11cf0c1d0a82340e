"""The Hugging Face hub: files are downloaded once, into the cache of `huggingface_hub`.

The environment variables (`HF_HOME`, `HF_ENDPOINT`, `HF_TOKEN`, `HF_HUB_OFFLINE`) are those of
`huggingface_hub`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from agentrl.errors import DataError

CONVERTED = "refs/convert/parquet"
"""Revision with the hub's own Parquet conversion of every data set: SUBSET/SPLIT/0000.parquet."""

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_DATA = ("*.parquet", "*.jsonl", "*.json")


def fetch_dataset(name: str, *, subset: str | None = None, revision: str | None = None) -> Path:
    """Return the local folder with the files of a data set, or of one subset.

    Args:
        revision: branch, tag or commit, with the authors' original files; None: the hub's Parquet conversion,
            else the branch `main`.

    Raises:
        DataError: the hub has no such data set or revision, refuses access, or cannot be reached while the
            cache does not have the files.
    """
    if not _HUB_ID.fullmatch(name):
        raise DataError(f"{name!r}: no such file or folder, and not a hub id either (owner/name)")
    converted = [f"{subset}/*.parquet"] if subset else ["*.parquet"]
    try:
        if revision is not None:
            return download("dataset", name, revision, list(_DATA))
        try:
            return download("dataset", name, CONVERTED, converted)
        except NoRevisionError:
            return download("dataset", name, "main", list(_DATA))
    except HubError as error:
        raise DataError(f"dataset {name!r}: {error}") from None


class HubError(Exception):
    """The hub does not give the files; the text says why."""


class NoRevisionError(HubError):
    """The hub does not have the revision."""


def download(
    kind: Literal["dataset", "model"], name: str, revision: str | None, patterns: list[str], **options: Any
) -> Path:
    """Download the files of a hub id that match `patterns`; return the folder, which is named after the
    commit.

    Raises:
        HubError: they are neither on the hub nor in its cache.
    """
    # Loading it takes a quarter of a second in every rank and actor, few of which download anything.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(
            snapshot_download(name, repo_type=kind, revision=revision, allow_patterns=patterns, **options)
        )
    except GatedRepoError:
        why = "the hub asks for permission; accept its terms there and set HF_TOKEN"
    except RevisionNotFoundError:
        raise NoRevisionError(f"the hub does not have revision {revision!r}") from None
    except RepositoryNotFoundError:
        why = f"no such folder, and no such {kind} on the hub (or it is private: set HF_TOKEN)"
    except LocalEntryNotFoundError:
        why = f"no such folder, and the hub cannot be reached (the {kind} is not in the hub's cache either)"
    except HFValidationError as error:
        why = (
            f"not a valid hub id: {str(error).splitlines()[0]}"
            if kind == "dataset"
            else "no such folder, and not a hub id either (owner/name)"
        )
    except (HfHubHTTPError, OSError) as error:
        why = f"the download from the hub failed: {str(error).splitlines()[0]}"
    raise HubError(why)
