"""The games by their ids."""

from typing import Any

ENV_REGISTRY: dict[str, Any] = {}
