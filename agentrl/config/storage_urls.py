"""URLs of object storage: which are accepted, and how they are shown. Nothing is opened here."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, urlsplit

SCHEMES = ("s3", "gs", "file", "memory")
S3_OPTIONS = ("endpoint_override", "region", "scheme")
"""What may follow `?` in an s3:// URL: for servers that speak S3 but are not Amazon's."""

_HAS_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_AUTHORITY = re.compile(r"(?<=://)[^/?#\s]*@")
_QUERY = re.compile(r"\?.*", re.S)


def is_url(text: str) -> bool:
    """Return whether a path is a URL, of whatever scheme; all other paths are local."""
    return _HAS_SCHEME.match(text) is not None


def shown(url: str) -> str:
    """Return a URL without user, password and query, for messages and logs."""
    return _QUERY.sub("", without_credentials(url))


def shown_path(path: str) -> str:
    """Return a path as it is, a URL as `shown`."""
    return shown(path) if is_url(path) else path


def without_credentials(text: str) -> str:
    """Return a text in which user and password of each URL are `***`."""
    return _AUTHORITY.sub("***@", text)


def problem_of(url: str) -> str | None:
    """Return why a URL names no place in object storage, and what would be right; None if it does."""
    if not is_url(url):
        return f"{url!r} is no URL; write one, such as s3://BUCKET/FOLDER or file:///FOLDER"
    scheme = url.partition("://")[0].lower()
    if scheme not in SCHEMES:
        return (
            f"{shown(url)!r} has the scheme {scheme}://; use one of {', '.join(f'{s}://' for s in SCHEMES)}"
        )
    if _AUTHORITY.search(url):
        return (
            f"{shown(url)!r} contains credentials, which would be written into files; take them out, and "
            "set the variables of the storage (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "GOOGLE_APPLICATION_CREDENTIALS)"
        )
    parts = urlsplit(url)
    unknown = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True) if name not in S3_OPTIONS]
    if unknown or (parts.query and scheme != "s3"):
        names = ", ".join(unknown) or "options"
        return (
            f"{shown(url)!r} has {names} behind the question mark; only s3:// URLs have options: "
            f"{', '.join(S3_OPTIONS)}"
        )
    if parts.fragment:
        return f"{shown(url)!r} contains a #, which names in object storage should not; rename the folder"
    if scheme in ("s3", "gs") and not parts.netloc:
        return f"{shown(url)!r} names no bucket; write {scheme}://BUCKET/FOLDER"
    if scheme == "file" and (parts.netloc or not parts.path.startswith("/")):
        return f"{shown(url)!r} is not an absolute path; write file:///FOLDER with three slashes"
    if scheme in ("file", "memory") and not (parts.netloc + parts.path).strip("/"):
        return f"{shown(url)!r} names no folder; write {scheme}:///FOLDER"
    return None
