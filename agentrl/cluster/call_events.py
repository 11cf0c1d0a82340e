"""Whether Ray's control store gets events of every call. It keeps 100,000 of them, about 1 KiB each, and only
`ray.timeline` reads them.
"""

from __future__ import annotations

import os

VARIABLE = "RAY_task_events_report_interval_ms"
"""Read by the processes of a Ray that this process starts. In a cluster that runs already, the option of each
actor counts.
"""


def keep_call_events(are_kept: bool) -> None:
    """Choose whether events of the calls of actors that this process starts are kept; call it before Ray is
    started.
    """
    os.environ[VARIABLE] = "1000" if are_kept else "0"


def are_kept() -> bool:
    return os.environ.get(VARIABLE) != "0"
