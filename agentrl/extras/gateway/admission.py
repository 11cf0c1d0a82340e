"""Rejection of requests that only a web page would send, by their head.

A page in a browser on this machine can reach a server on 127.0.0.1 in two ways. It may post plain text from a
foreign origin, which browsers allow without asking. Or its own domain may resolve to 127.0.0.1 (DNS
rebinding). Programs send neither an Origin nor a foreign Host, and they declare JSON as JSON. So these three
checks cost honest clients nothing; they apply even if the server requires a key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from agentrl.loopback import is_local

JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Refusal:
    """The answer to a rejected request; its body is not read."""

    status: int
    message: str


def refusal_of(headers: Mapping[str, str], *, is_on_loopback: bool) -> Refusal | None:
    """Return why a request is refused, None if it is accepted.

    Args:
        headers: names in lower case.
        is_on_loopback: the server listens on this machine only; Host must then be a local name. A server on
            the network may be reached by any name, so Host is not checked there; it needs a key.
    """
    if is_on_loopback and not is_local(_name_of(headers.get("host", ""))):
        return Refusal(
            403, f"the Host {headers.get('host', '')[:100]!r} is not this machine; use 127.0.0.1 or localhost"
        )
    if "origin" in headers or headers.get("sec-fetch-site", "none") != "none":
        return Refusal(403, "requests of web pages are refused: leave Origin and Sec-Fetch-Site out")
    content_type = headers.get("content-type", "")
    has_body = "transfer-encoding" in headers or headers.get("content-length", "0").strip() not in ("", "0")
    if has_body and content_type.partition(";")[0].strip().lower() != JSON:
        return Refusal(415, f"the body must be sent as Content-Type: {JSON}, got {content_type[:100]!r}")
    return None


def _name_of(host: str) -> str:
    """Return the name in a Host header without port and brackets, "" if there is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
