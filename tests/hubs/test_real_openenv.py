"""OpenEnv's own server, of a pinned version in an environment of its own, on this machine."""

from __future__ import annotations
