"""Recognizes loopback hosts."""

from __future__ import annotations

import ipaddress


def is_local(host: str) -> bool:
    """Return whether `host` is `localhost` or a loopback address.

    IPv6 addresses are given without brackets.
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
