"""The small package in the place of TextArena, and how it is configured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

SMALL = Path(__file__).with_name("small_textarena")
CONFIG: dict[str, Any] = {"python": sys.executable, "path": [str(SMALL)]}
