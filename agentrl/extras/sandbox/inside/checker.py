"""The test side: runs test code in a process without any of the program's objects, and prints the results.

stdin: the JSON of an `agentrl.extras.sandbox.code_tests.Suite`. Descriptors 3 and 4 lead to the program.
stdout, which only this file writes to: `compiles` and `loaded`, as the program side reported them, then one
line per case: `passed`, `failed`, or `broken` with the reason why the test itself cannot run. Cases
without a line were not reached: the program ended.
"""

from __future__ import annotations

import builtins
import importlib
import json
import os
import sys

from . import objects
from .plain_data import MAX_BYTES, UNREADABLE, array, decode, dump, encode, load

TYPE_CHECKING = False  # importing typing would cost milliseconds at every start
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

MAX_ITEMS = 10**6
MAX_CHUNK = 1024
STOPS = (StopIteration, StopAsyncIteration)


class LostError(BaseException):
    """The program ended or sent invalid data.

    A BaseException: no `except Exception` of a test may catch it.
    """


class ProgramExit(SystemExit):
    """The program called exit. This ends only the program's call, not this process."""


class Broken(BaseException):
    """The test requires something that cannot be done from this process."""


class Link:
    """Sends requests to the program and reads its answers.

    Answers are data; anything invalid ends the case.
    """

    def __init__(self, reads: int, writes: int) -> None:
        self._lines = open(reads, "rb")  # noqa: SIM115 - for as long as the process lives
        self._out = writes
        self._classes: set[str] = set()
        self._exceptions: dict[str, type[BaseException]] = {}
        self._functions: list[Any] = []
        self._held: dict[int, Any] = {}
        self._made: dict[int, objects.OwnInstance] = {}
        self._iterators: dict[int, Iterator[Any]] = {}
        self._readers = {"object": self._object, "callback": self._function, "ndarray": array}
        self.is_lost = False
        self.depth_of_asserts = 0

    def read(self) -> dict[str, Any]:
        """Read one line. Raises LostError."""
        try:
            answer = load(self._lines.readline(MAX_BYTES))
        except (*UNREADABLE, OSError):
            answer = None
        if not isinstance(answer, dict):
            self._lose()
        if "printed" in answer and sys.stdout is not sys.__stdout__:  # a test captures it
            sys.stdout.write(str(answer["printed"]))
        return answer

    def names(self, names: list[str], sources: list[str]) -> dict[str, Any]:
        """Return {name: tree} of the program's objects with these names. Missing ones are omitted."""
        self._classes = {name for name in names if name[:1].isupper()}
        answer = self._ask({"op": "names", "names": names, "sources": sources})
        trees: Any = answer.get("value")
        if not isinstance(trees, list) or len(trees) != len(names):
            self._lose()
        return {name: tree for name, tree in zip(names, trees, strict=True) if tree != {"missing": None}}

    def named(self, tree: Any) -> Any:
        """Return the object that a test gets for a name."""
        value = self._decode(tree)
        return objects.NamedFunction(*_parts(value)) if type(value) is objects.Function else value

    def call(self, target: Any, args: Any, kwargs: Any) -> Any:
        given = [list(args), dict(kwargs)]
        keeps = not self.depth_of_asserts
        asked = {
            "op": "call",
            "target": self._encode(target),
            "args": self._encode(given[0]),
            "kwargs": self._encode(given[1]),
        }
        answer = self._ask({**asked, "keeps": keeps})
        if keeps and "changed" in answer:
            _restore(given, self._decode(answer["changed"]))
        return self._value(answer)

    def apply(self, function: str, *args: Any) -> Any:
        return self._value(self._ask({"op": "apply", "function": function, "args": self._encode(list(args))}))

    def made(self, value: Any) -> Any:
        """Return an object as its maker sees it, an OwnInstance; data unchanged."""
        if type(value) is not objects.Instance:
            return value
        return self._made.setdefault(value._number, objects.OwnInstance(*_parts(value)))

    def wait(self, target: Any) -> Any:
        return self._value(self._ask({"op": "await", "target": self._encode(target)}))

    def iterate(self, target: Any) -> Iterator[Any]:
        iterator = self._value(self._ask({"op": "iterate", "target": self._encode(target)}))
        if not isinstance(iterator, objects.Opaque):
            self._lose()
        items = self._items(self._encode(iterator))
        if type(iterator) is not objects.Iterable:
            return items
        # A generator is its own iterator: what is fetched ahead is not lost if a loop over it ends early.
        return self._iterators.setdefault(iterator._number, items)

    def _items(self, target: Any) -> Iterator[Any]:
        count, total = 1, 0
        while total < MAX_ITEMS:
            answer = self._ask({"op": "items", "target": target, "count": count})
            items = self._value(answer)
            if not isinstance(items, list):
                self._lose()
            yield from items
            if "end" in answer:
                raise self._error(answer["end"])
            if "is_end" in answer:
                return
            total += count
            count = min(2 * count, MAX_CHUNK)
        raise OverflowError("more items than are taken from a program")

    def _ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        if self.is_lost:
            raise LostError
        self._write(asked)
        while "callback" in (answer := self.read()):
            self._write(self._call_back(answer))
        if "op" in answer:
            self._lose()
        return answer

    def _call_back(self, asked: dict[str, Any]) -> dict[str, Any]:
        try:
            function = self._function(asked["callback"])
            args, kwargs = self._decode(asked["args"]), self._decode(asked["kwargs"])
        except (*UNREADABLE, KeyError):
            self._lose()
        try:
            return {"value": self._encode(function(*args, **kwargs))}
        except Exception as error:  # noqa: BLE001 - boundary: a function of the test
            return {"error": type(error).__name__}

    def _write(self, asked: dict[str, Any]) -> None:
        line = dump(asked)
        try:
            while line:
                line = line[os.write(self._out, line) :]
        except OSError:
            self._lose()

    def _lose(self) -> Any:
        self.is_lost = True
        raise LostError

    # --------------------------------------------------------------------------------------- data and objects

    def _encode(self, value: Any) -> Any:
        return encode(value, self._other)

    def _other(self, value: Any) -> Any:
        if isinstance(value, objects.Opaque):
            return {"ref": value._number}
        module = type(value).__module__
        if module == "numpy" and type(value).__name__ == "ndarray":
            return {"ndarray": [value.dtype.str, list(value.shape), self._encode(value.tolist())]}
        if module == "numpy" and hasattr(value, "item"):
            return self._encode(value.item())
        if callable(value):
            self._functions.append(value)
            return {"callback": len(self._functions) - 1}
        base: Any
        for base in (int, float, str, bytes, list, tuple, dict, set, frozenset):
            if isinstance(value, base):
                return self._encode(base(value))
        if hasattr(value, "__iter__"):
            return self._encode(list(value))
        if module != "__main__":
            raise TypeError(f"{type(value).__name__} is no plain data")
        raise Broken(
            f"the test passes an object of {type(value).__name__} to the program, which takes plain data "
            "alone"
        )

    def _decode(self, tree: Any) -> Any:
        try:
            return decode(tree, self._readers)
        except UNREADABLE:
            return self._lose()

    def _value(self, answer: dict[str, Any]) -> Any:
        if "error" in answer:
            raise self._error(answer["error"])
        if "value" not in answer:
            self._lose()
        return self._decode(answer["value"])

    def _object(self, content: Any) -> Any:
        """Return the proxy of an object of the program, always the same one for the same object."""
        kind, number, name, truth = content[:4]
        if type(number) is not int or type(name) is not str:
            raise TypeError("no object")
        if kind == "coroutine":
            return objects.coroutine(self, number)
        if kind == "exception" and len(content) > 4:
            return self._exception(name, content[4])
        is_known = name in self._classes
        kinds = {"function": objects.Function, "iterable": objects.Iterable, "iterator": objects.Opaque}
        if is_known:
            kinds |= {"class": objects.Class, "instance": objects.Instance}
        kind_of = kinds.get(kind, objects.Opaque)
        if number not in self._held:
            self._held[number] = kind_of(self, number, name, truth is True)
        return self._held[number]

    def _function(self, number: Any) -> Any:
        if type(number) is not int or number < 0:
            raise TypeError("no function")
        return self._functions[number]

    def _exception(self, name: str, bases: Any) -> type[BaseException]:
        """Return a class that stands in for an exception class of the program, for `except` and `raises`."""
        if name not in self._exceptions:
            base = next((kind for kind in map(_builtin_error, bases[1:]) if kind is not None), Exception)
            self._exceptions[name] = type(name, (base,), {})
        return self._exceptions[name]

    def _error(self, content: Any) -> BaseException:
        """Return the program's error.

        Types that would end this process or a loop of the test are replaced.
        """
        try:
            names, args, attributes, text = content
            kind = next(
                (found for name in names if (found := self._exceptions.get(name) or _builtin_error(name))),
                None,
            )
            if kind is None:
                return ProgramExit(1) if "SystemExit" in names else RuntimeError(f"{names[0]}: {text}")
            error = kind.__new__(kind)
            error.args = tuple(self._decode(args))
            if kind in self._exceptions.values():
                vars(error).update(self._decode(attributes))
        except UNREADABLE:
            self._lose()
        return error


class Asserting:
    """Marks assertions. Calls within one do not update the test's arguments, which the same line inspects."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def __enter__(self) -> None:
        self._link.depth_of_asserts += 1

    def __exit__(self, *error: object) -> None:
        self._link.depth_of_asserts -= 1


def run(case: dict[str, Any], space: dict[str, Any]) -> bool:
    """Run one piece of test code, then the test functions and classes that it defines and does not call."""
    try:
        exec(compile(case["source"], "test", "exec", dont_inherit=True), space)
        for name in case["functions"]:
            space[name]()
        return all(_runs_well(space[name]) for name in case["classes"])
    except ProgramExit:
        return False
    except SystemExit as end:  # `unittest.main()` ends like this
        return not end.code


def _runs_well(test_case: Any) -> bool:
    unittest = importlib.import_module("unittest")
    if not issubclass(test_case, unittest.TestCase):
        return _runs_as_pytest_would(test_case)
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(test_case).run(result)
    return bool(result.wasSuccessful() and result.testsRun > len(result.skipped))


def _runs_as_pytest_would(test_class: Any) -> bool:
    for name in [name for name in vars(test_class) if name.startswith("test")]:
        case = test_class()
        getattr(case, "setup_method", bool)()
        getattr(case, name)()
    return True


def _modules(names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        try:
            found[name] = importlib.import_module({"np": "numpy", "pd": "pandas"}.get(name, name))
        except ImportError:
            continue
    return found


def _restore(old: Any, new: Any) -> None:
    """Update lists, dicts and sets in place to the state that the program left.

    Their elements stay the same.
    """
    if type(old) is not type(new):
        return
    if type(old) is list:
        old[:] = [_kept(old[place], item) if place < len(old) else item for place, item in enumerate(new)]
    elif type(old) is dict:
        kept = {key: _kept(old[key], item) if key in old else item for key, item in new.items()}
        old.clear()
        old.update(kept)
    elif type(old) in (set, bytearray):
        old.clear()
        old.update(new) if type(old) is set else old.extend(new)
    elif type(old) is tuple and len(old) == len(new):
        for before, after in zip(old, new, strict=True):
            _restore(before, after)


def _kept(old: Any, new: Any) -> Any:
    if type(old) is type(new) and type(old) in (list, dict, set, bytearray, tuple):
        _restore(old, new)
        return old if type(old) is not tuple or old == new else new
    return new


def _builtin_error(name: Any) -> type[Exception] | None:
    kind = getattr(builtins, name, None) if isinstance(name, str) else None
    is_error = isinstance(kind, type) and issubclass(kind, Exception) and kind not in STOPS
    return kind if is_error else None


def _parts(value: Any) -> tuple[Any, int, str, bool]:
    return value._asker, value._number, value._class_name, value._truth


def main() -> None:
    """Run the cases of stdin in order."""
    suite = json.load(sys.stdin)
    out = os.dup(1)
    os.dup2(2, 1)  # a test may print
    sys.argv[:] = ["test"]

    def tell(text: str) -> None:
        os.write(out, text.encode("utf-8", "replace") + b"\n")

    link = Link(3, 4)
    try:
        for word in ("compiles", "loaded"):
            if link.read().get(word) is not True:
                return
            tell(word)
        names = link.names(suite["names"], suite["sources"])
        module = type(sys)("__main__")
        sys.modules["__main__"] = module
        space = module.__dict__
        space.update(_modules(suite["modules"]))
        space.update(
            {name: link.named(tree) for name, tree in names.items()}, **{suite["asserting"]: Asserting(link)}
        )
        for case in suite["cases"]:
            link.depth_of_asserts = 0
            try:
                is_passed = run(case, space)
            except Broken as error:
                tell(f"broken {error}")
                return
            except BaseException:  # noqa: BLE001 - boundary of one case
                is_passed = False
            if link.is_lost:
                return
            tell("passed" if is_passed else "failed")
    except LostError:
        return
    finally:
        os._exit(0)
