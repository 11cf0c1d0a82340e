"""Which servers a run may talk to."""

from __future__ import annotations

from urllib.parse import urlsplit

from agentrl.loopback import is_local


def refuse_url(url: str, *, has_key: bool, variable: str = "rollout.api_key_env") -> str | None:
    """Return in one line why a server at `url` must not be attached to; None if it may be.

    variable: the config key that names the environment variable with its API key.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return f"{url!r} is not the URL of a server; write http://HOST:PORT"
    if has_key or is_local(parts.hostname):
        return None
    return (
        f"{url} is on another machine, where anyone who can reach it could change the policy; set "
        f"{variable} to the name of the variable with its key"
    )
