"""User files and modules: named in the config, imported once per process, shipped to other machines.

A file is named by its path relative to the driver's working directory. Cluster workers may have another
working directory or may not have the file. So the driver packs the files into one package (`pack_files`),
Ray's runtime environment puts it on the path of every worker, and `locate` finds the files there.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import json
import os
import sys
import traceback
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from agentrl.errors import PluginError
from agentrl.plugins.contained import contained

SHIPPED_PACKAGE = "agentrl_user_files"
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Reference:
    """`module:attribute` or `path/to/file.py:attribute`."""

    source: str
    attribute: str

    @classmethod
    def parse(cls, text: str) -> Reference | None:
        """Parse `text` as a reference; None if it is a plain name."""
        source, colon, attribute = text.rpartition(":")
        return cls(source, attribute) if colon and source and attribute.isidentifier() else None

    @property
    def is_file(self) -> bool:
        return self.source.endswith(".py")

    def load(self) -> Any:
        """Import the module and return the attribute.

        Raises:
            PluginError: the file, the module or the attribute does not exist, or the import fails.
        """
        module = import_source(self.source)
        if not hasattr(module, self.attribute):
            raise PluginError(f"{self.source} has no {self.attribute!r}{_defined(module, self.attribute)}")
        return getattr(module, self.attribute)


def at_place(place: str | Any) -> Any:
    """Return what stands at `module:name` or `file.py:name`; anything but text is returned as it is.

    Raises:
        PluginError: the text is no such place, its import fails, or it has no such name.
    """
    if not isinstance(place, str):
        return place
    reference = Reference.parse(place)
    if reference is None:
        raise PluginError(f"{place!r} is no place of a function; write module:name or file.py:name")
    return reference.load()


def function_reference(text: str) -> Reference | None:
    """Return `text` as a reference if it refers to a plain function; None if it is a name or refers to a
    class.

    Raises:
        PluginError: the reference cannot be loaded.
    """
    reference = Reference.parse(text)
    return reference if reference is not None and inspect.isroutine(reference.load()) else None


def import_source(source: str) -> ModuleType:
    """Import `path/to/file.py` (`~/` is the home folder) or `package.module`; a file is imported once per
    process.

    Raises:
        PluginError: the source does not exist or fails to import.
    """
    source = os.path.expanduser(source)
    try:
        with contained():
            return _import_file(source) if source.endswith(".py") else _import_module(source)
    except PluginError:
        raise
    except Exception as error:  # user code runs at import: whatever it raises is a broken plugin
        raise PluginError(
            f"plugin source {source!r} fails to import: {type(error).__name__}: {error}{import_line(error)}"
        ) from error


def import_line(error: BaseException) -> str:
    """Return ` (path:line)`: where the first of the modules that were imported failed; "" if none was run."""
    frames = traceback.extract_tb(error.__traceback__)
    found = next((frame for frame in frames if frame.name == "<module>"), None)
    return "" if found is None else f" ({os.path.relpath(named_by_user(found.filename))}:{found.lineno})"


def locate(path: str) -> Path:
    """Return the location of the user's file `path` on this machine: the driver's shipped copy, or else the
    file itself.

    The copy has priority, because this machine may have an outdated file of that name.
    """
    shipped = _shipped()
    return shipped.copies.get(shipped.absolute(path), Path(path)) if shipped else Path(path)


def named_by_user(path: str) -> str:
    """Return the user's path of a file. A copy shipped by the driver is mapped back to its original path."""
    return originals().get(path, path) if SHIPPED_PACKAGE in path else path


def originals() -> dict[str, str]:
    """Return the user's path of each file that the driver has shipped, by the path of its copy here."""
    shipped = _shipped()
    return {str(copy): original for original, copy in shipped.copies.items()} if shipped else {}


def pack_files(paths: Iterable[str], folder: Path) -> Path | None:
    """Copy the files into a package in `folder` and return its path for Ray's `py_modules`; None if there are
    no files.

    Raises:
        PluginError: a file does not exist.
    """
    package = folder / SHIPPED_PACKAGE
    names: dict[str, str] = {}
    for path in dict.fromkeys(map(os.path.abspath, paths)):
        if not Path(path).is_file():
            raise PluginError(f"file {path!r} does not exist")
        package.mkdir(parents=True, exist_ok=True)
        names[path] = f"{len(names)}_{Path(path).name}"
        (package / names[path]).write_bytes(Path(path).read_bytes())
    if not names:
        return None
    (package / MANIFEST).write_text(
        json.dumps({"working_directory": os.getcwd(), "files": names}), encoding="utf-8"
    )
    return package


def absence(path: Path, suffixes: tuple[str, ...] = ("",)) -> str:
    """Return why `path` is no file, as the end of a sentence: it is a folder, or it does not exist. A hint
    names a file of one of the suffixes in the folder, or a similar file name.
    """
    if path.is_dir():
        found = sorted(str(entry) for entry in path.iterdir() if entry.name.endswith(suffixes))
        return f"is a folder; name its files{f', such as {found[0]!r}' if found else ''}"
    if not path.parent.is_dir():
        return f"does not exist (nor does its folder {str(path.parent)!r})"
    names = [entry.name for entry in path.parent.iterdir()]
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"does not exist{f'; did you mean {str(path.parent / close[0])!r}?' if close else ''}"


def _defined(module: ModuleType, missing: str) -> str:
    """Return a hint for the error about a missing attribute: a similar name, or the functions and classes
    that the module defines.
    """
    if close := difflib.get_close_matches(missing, vars(module), n=1):
        return f"; did you mean {close[0]!r}?"
    own = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    return f"; it has: {', '.join(own)}" if own else "; it defines no function and no class"


@dataclass(frozen=True, slots=True)
class _Shipped:
    """The files shipped by the driver: its working directory, and the local copy of each original path."""

    working_directory: str
    copies: dict[str, Path]

    def absolute(self, path: str) -> str:
        return os.path.normpath(os.path.join(self.working_directory, path))


def _shipped() -> _Shipped | None:
    spec = importlib.util.find_spec(SHIPPED_PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    if not folders:
        return None
    folder = Path(folders[0])
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    return _Shipped(
        manifest["working_directory"], {path: folder / name for path, name in manifest["files"].items()}
    )


def _import_module(source: str) -> ModuleType:
    folder = Path(source)
    if folder.is_dir() and not (folder / "__init__.py").is_file():
        spec = None if "/" in source else importlib.util.find_spec(source)
        if spec is None or spec.origin is None:  # it would be imported as a package that contains nothing
            raise PluginError(f"plugin source {source!r} {absence(folder, ('.py',))}")
    return importlib.import_module(source)


def _import_file(source: str) -> ModuleType:
    path = locate(source)
    shipped = _shipped()
    # The module name derives from the driver's path, so that a class has the same name on all machines.
    identity = shipped.absolute(source) if shipped else os.path.abspath(source)
    name = f"agentrl_user_{Path(source).stem}_{zlib.crc32(identity.encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise PluginError(f"plugin file {source!r} {absence(path, ('.py',))}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with contained():
            spec.loader.exec_module(module)
    except Exception:  # user code can raise anything
        del sys.modules[name]  # a second import must not find a half-initialized module
        raise
    return module
