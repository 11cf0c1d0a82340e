"""Which hosts are this machine alone."""

from __future__ import annotations

import ipaddress


def is_local(host: str) -> bool:
    """Return whether only this machine reaches `host`: `localhost`, or a loopback address without brackets."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
