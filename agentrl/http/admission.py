"""Which requests a server refuses by their head, because only a web page would send them.

A page that a browser of this machine shows can reach a server on 127.0.0.1. It may post text to it from a foreign origin, which browsers
allow without asking, or let its own name resolve to 127.0.0.1. Programs send neither an Origin nor a foreign Host, and say that their
JSON is JSON. So these three are required even where a key is, and cost honest clients nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from agentrl.loopback import is_local

JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Refusal:
    """The answer to a request that is not read on."""

    status: int
    message: str


def refusal_of(headers: Mapping[str, str], *, is_on_loopback: bool) -> Refusal | None:
    """Return why a request is refused, None if it may go on.

    Args:
        headers: names in lower case.
        is_on_loopback: the server listens on this machine alone. Any name may lead to a server that listens to the network;
            such a server needs a key.
    """
    if is_on_loopback and not is_local(_name_of(headers.get("host", ""))):
        return Refusal(403, f"the Host {headers.get('host', '')[:100]!r} is not this machine; use 127.0.0.1 or localhost")
    if "origin" in headers or headers.get("sec-fetch-site", "none") != "none":
        return Refusal(403, "requests of web pages are refused: leave Origin and Sec-Fetch-Site out")
    content_type = headers.get("content-type", "")
    if _has_body(headers) and content_type.partition(";")[0].strip().lower() != JSON:
        return Refusal(415, f"the body must be sent as Content-Type: {JSON}, got {content_type[:100]!r}")
    return None


def _name_of(host: str) -> str:
    """Return the name in a Host header, without port and brackets; the empty text if there is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _has_body(headers: Mapping[str, str]) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0").strip() not in ("", "0")
