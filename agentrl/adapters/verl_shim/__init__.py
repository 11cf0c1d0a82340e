"""The names that tools and interactions written for verl import, where verl itself is not installed.

The folders below stand for `verl.tools`, `verl.interactions` and `verl.utils`. They hold what such files need and no more:
base classes, schemas, the decorator of function tools, a tracing decorator that does nothing, the score of GSM8K, and the two
examples that every tutorial names. Folders `verl/tools` of the user's own, without the rest of verl, come first.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType


def install() -> None:
    """Make `verl` importable, unless it is."""
    if "verl" in sys.modules:
        return
    spec = importlib.util.find_spec("verl")
    if spec is not None and spec.origin is not None:
        return  # the real one
    module = ModuleType("verl", __doc__)
    # Without an __init__.py, `verl` is a folder with a few files of the user's: theirs, then ours.
    own_folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    module.__path__ = [*own_folders, *__path__]
    module.__spec__ = ModuleSpec("verl", None, is_package=True)
    module.__spec__.submodule_search_locations = module.__path__
    sys.modules["verl"] = module
