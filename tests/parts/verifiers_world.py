"""The small package in the place of verifiers, and how it is configured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

SMALL = Path(__file__).with_name("small_verifiers")
CONFIG: dict[str, Any] = {"python": sys.executable, "path": [str(SMALL)]}
TASK = {"prompt": [{"role": "user", "content": "3 + 1?"}], "answer": "4", "example_id": 3}
