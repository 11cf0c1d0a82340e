"""The desk of agentrl/extras/hubs/README.md keeps the contract of environments."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from agentrl.testing.contracts import EnvironmentContract

DESK = Path(__file__).parents[3] / "examples" / "desk"


class TestDesk(EnvironmentContract):
    environment = f"{DESK}.py:Desk"
    config: ClassVar[dict[str, Any]] = {"database": f"{DESK}/database.json"}
    environment_kwargs: ClassVar[dict[str, Any]] = {"database": "{}"}
    bad_kwargs = ()
    calls = (
        ("find_bookings", {"guest": "Ada Okoye"}),
        ("show_booking", {"number": "A17"}),
        ("change_nights", {"number": "A17", "nights": 5}),
        ("cancel_booking", {"number": "A17"}),
    )
