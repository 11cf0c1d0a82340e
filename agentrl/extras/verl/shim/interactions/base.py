"""The base class of verl's interactions: one instance per process, one id per attempt."""

from __future__ import annotations

from typing import Any
from uuid import uuid4


class BaseInteraction:
    """Subclasses override `generate_response`, and other methods if they need them."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Start an attempt and return its id."""
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Return whether the conversation is over, the reply, the score of the model's last turn, and
        metrics.
        """
        return False, "Your current result seems acceptable.", 0.8, {}

    async def calculate_score(self) -> float:
        """Return the score of the conversation."""
        return 0.0

    async def finalize_interaction(self) -> None:
        """Discard the attempt's state."""
