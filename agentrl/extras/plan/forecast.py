"""What this room registers as a forecast of a run: called with the config before any process starts."""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.config.schema import Config
from agentrl.extras.plan.explain_cpu import memory_warning
from agentrl.extras.plan.explain_memory import refuse_too_large
from agentrl.granted import granted


def memory(config: Config) -> Iterator[str]:
    """Yield a warning if the machine grants less memory than the run needs.

    Raises:
        ConfigError: a GPU is too small for its roles.
    """
    refuse_too_large(config)
    if (warning := memory_warning(config, granted_bytes=granted().memory_bytes)) is not None:
        yield warning
