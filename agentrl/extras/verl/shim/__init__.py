"""Stand-ins for the modules that tools and interactions for verl import, if verl is not installed.

The folders below replace `verl.tools`, `verl.interactions` and `verl.utils`. They contain only what such
files need: base classes, schemas, the decorator for function tools, a tracing decorator that does nothing,
the GSM8K score, and the two classes that all tutorials use. If the user has a folder `verl/tools` without the
rest of verl, it takes precedence. A verl that cannot be imported, such as a checkout without the packages
that it needs, serves the modules that have no stand-in.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parent


def install() -> None:
    """Make `verl` importable, unless it already is."""
    if "verl" in sys.modules:
        return
    spec = importlib.util.find_spec("verl")
    is_whole = spec is not None and spec.origin is not None
    if is_whole and _is_importable():
        return  # the real verl
    module = ModuleType("verl", __doc__)
    # A `verl` without __init__.py is a folder with some files of the user's: search it first, then these
    # folders. In a whole verl, their namesakes would import the rest of it.
    own_folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    module.__path__ = [*__path__, *own_folders] if is_whole else [*own_folders, *__path__]
    module.__spec__ = ModuleSpec("verl", None, is_package=True)
    module.__spec__.submodule_search_locations = module.__path__
    sys.modules["verl"] = module


def _is_importable() -> bool:
    try:
        importlib.import_module("verl")
    except Exception:  # noqa: BLE001 - boundary: verl's many imports may raise anything
        for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
            del sys.modules[name]
        return False
    return True
