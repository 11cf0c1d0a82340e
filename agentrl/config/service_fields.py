"""Types of config fields that name a service by its URL."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator

from agentrl.config.storage_urls import shown


def _without_credentials(url: str | None) -> str | None:
    if url is not None and "@" in urlsplit(url).netloc:
        raise ValueError(
            f"{shown(url)!r} contains credentials, which would be written into files; take them out, and set "
            "the variables of the service"
        )
    return url


def _http(url: str | None) -> str | None:
    if url is not None and not (urlsplit(url).scheme in ("http", "https") and urlsplit(url).netloc):
        raise ValueError(f"{shown(url)!r} is not the URL of an HTTP service; write http://HOST:PORT")
    return _without_credentials(url)


ServiceURI = Annotated[str | None, AfterValidator(_without_credentials)]
"""A URI of whatever scheme, without credentials."""
HttpURL = Annotated[str | None, AfterValidator(_http)]
"""An http:// or https:// URL, without credentials."""
