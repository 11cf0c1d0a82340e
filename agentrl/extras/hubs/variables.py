"""Environment variables for external programs, without this process's API keys; headers of servers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from agentrl.errors import ConfigError

PASSED = (
    *(
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "TERM",
        "TMPDIR",
        "TZ",
        "LANG",
        "LANGUAGE",
        "LC_ALL",
        "LC_CTYPE",
    ),
    *("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR"),
)
"""Variables passed to every program: search paths, locale and the like."""


def clean_environment(names: Iterable[str], *, key: str) -> dict[str, str]:
    """Return the variables of PASSED that are set, and the variables in `names`.

    Args:
        key: the config key that lists the names, for errors.

    Raises:
        ConfigError: a variable in `names` is not set.
    """
    wanted = tuple(names)
    missing = [name for name in wanted if name not in os.environ]
    if missing:
        raise ConfigError(
            f"{key}: the environment variable {missing[0]!r} is not set; set it, or remove it from the config"
        )
    return {name: os.environ[name] for name in (*PASSED, *wanted) if name in os.environ}


def header_values(headers_env: Mapping[str, str], *, key: str) -> dict[str, str]:
    """Return HTTP headers whose values are secrets: header -> environment variable, as the config has them.

    Args:
        key: the config key of the mapping, for errors.

    Raises:
        ConfigError: a variable is not set.
    """
    for header, variable in headers_env.items():
        if variable not in os.environ:
            raise ConfigError(f"{key}.{header}={variable!r}: this environment variable is not set")
    return {header: os.environ[variable] for header, variable in headers_env.items()}
