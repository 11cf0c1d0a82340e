"""Data sets of the Hugging Face hub: their files are downloaded once, into the cache of `huggingface_hub`.

The environment variables (`HF_HOME`, `HF_ENDPOINT`, `HF_TOKEN`, `HF_HUB_OFFLINE`) are those of
`huggingface_hub`.
"""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

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
    if revision is not None:
        return _download(name, revision, list(_DATA))
    try:
        return _download(name, CONVERTED, [f"{subset}/*.parquet"] if subset else ["*.parquet"])
    except _NoRevision:
        return _download(name, "main", list(_DATA))


class _NoRevision(DataError):
    pass


def _download(name: str, revision: str, patterns: list[str]) -> Path:
    try:
        return Path(snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=patterns))
    except GatedRepoError:
        why = "the hub asks for permission; accept its terms there and set HF_TOKEN"
    except RevisionNotFoundError:
        raise _NoRevision(f"dataset {name!r}: the hub does not have revision {revision!r}") from None
    except RepositoryNotFoundError:
        why = "no such folder, and no such dataset on the hub (or it is private: set HF_TOKEN)"
    except LocalEntryNotFoundError:
        why = "no such folder, and the hub cannot be reached (the dataset is not in the hub's cache either)"
    except HFValidationError as error:
        why = f"not a valid hub id: {str(error).splitlines()[0]}"
    except (HfHubHTTPError, OSError) as error:
        why = f"the download from the hub failed: {str(error).splitlines()[0]}"
    raise DataError(f"dataset {name!r}: {why}")
