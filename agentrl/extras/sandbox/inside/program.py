"""The program side: loads the program, then executes one request per line and answers with a line of plain
data.

A request is a mapping with `op`. The answer is {"value": tree} or {"error": [names of its classes, args,
attributes, text]}. The program shares this process and can forge any answer. So nothing here is trusted, and
nothing here is secret.
"""

from __future__ import annotations

import _signal as signal  # importing `signal` would also load enum
import builtins
import io
import operator
import os
import sys

from .contest_imports import prepare
from .plain_data import array, decode, dump, encode, load

TYPE_CHECKING = False  # importing typing would cost milliseconds at every start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MODULE = "solution"
MAX_PRINTED = 2**16
"""Characters of output that are sent with an answer. They are shown only if the test captures them."""
BASES = (int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset)


class Objects:
    """The program's objects that the test side refers to by number, and proxies of the test's functions."""

    def __init__(self, call_back: Callable[[int, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        self.named: set[str] = set()  # classes that the test names: their objects are never converted to data
        self._call_back = call_back
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._callbacks: dict[int, int] = {}

    def encode(self, value: Any) -> Any:
        return encode(value, self._other)

    def decode(self, tree: Any) -> Any:
        return decode(tree, {"ref": self._objects.__getitem__, "callback": self._callback, "ndarray": array})

    def _callback(self, number: int) -> Any:
        def function(*args: Any, **kwargs: Any) -> Any:
            return self._call_back(number, args, kwargs)

        self._callbacks[id(function)] = number
        self._objects.append(function)  # kept alive: its id is a key
        return function

    def _other(self, value: Any) -> Any:
        kind = type(value)
        if id(value) in self._callbacks:
            return {"callback": self._callbacks[id(value)]}
        if kind.__module__ == "numpy" and hasattr(value, "dtype"):
            if kind.__name__ == "ndarray":
                return {"ndarray": [value.dtype.str, list(value.shape), self.encode(value.tolist())]}
            return self.encode(value.item())
        name = next((base.__name__ for base in kind.__mro__ if base.__name__ in self.named), "")
        if not name:
            for base in BASES:
                if isinstance(value, base):
                    return self.encode(_as(base, value))
        return {"object": [self._kind(value, name), self._number(value), name or _name(value), _truth(value)]}

    def _kind(self, value: Any, name: str) -> str:
        if isinstance(value, type):
            return "exception" if issubclass(value, BaseException) else "class"
        if name:
            return "instance"
        if type(value).__name__ == "coroutine":
            return "coroutine"
        if hasattr(value, "__iter__"):
            return "iterable"
        return "function" if callable(value) else "opaque"

    def _number(self, value: Any) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return self._numbers[id(value)]


class LoadedProgram:
    """Loads the program and answers requests.

    cpu_s, wall_s: limits of one call; beyond them the process dies.
    """

    def __init__(self, reads: int, writes: int, *, cpu_s: float, wall_s: float) -> None:
        self._lines = open(reads, "rb")  # noqa: SIM115 - open as long as the process lives
        self._out = writes
        self._cpu_s, self._wall_s = cpu_s, wall_s
        self._space: dict[str, Any] = {}
        self._objects = Objects(self._call_back)
        self._printed = io.StringIO()

    def load(self, path: str) -> bool:
        """Run the program as a module; return whether it loaded.

        Also writes two answers: `compiles` and `loaded`.
        """
        module = type(sys)(MODULE)
        module.__file__ = path
        self._space = module.__dict__
        sys.modules[MODULE] = module
        with open(path, encoding="utf-8") as file:
            source = file.read()
        self._start_clocks()
        try:
            code = compile(source, path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            self._write({"compiles": False})
            return False
        self._write({"compiles": True})
        try:
            prepare(code, self._space)
            exec(code, self._space)
        except BaseException:  # noqa: BLE001 - boundary: the program's own code
            self._write({"loaded": False})
            return False
        self._stop_clocks()
        self._write({"loaded": True})
        return True

    def serve(self, *, is_heard: bool) -> None:
        """Answer requests until there are no more."""
        if is_heard:
            sys.stdout = self._printed
        while line := self._lines.readline():
            self._answer(load(line))

    def _answer(self, asked: dict[str, Any]) -> None:
        self._start_clocks()
        try:
            answer = getattr(self, f"_{asked.pop('op')}")(**asked)
        except BaseException as error:  # noqa: BLE001 - boundary: the program's own code
            answer = {"error": self._error(error)}
        self._stop_clocks()
        self._write(answer)

    def _names(self, names: list[str], sources: list[str]) -> Any:
        """Execute the test's class definitions, then return the program's objects with these names."""
        self._objects.named = {name for name in names if name[:1].isupper()}
        for source in sources:
            try:
                exec(source, self._space)
            except Exception:  # noqa: BLE001 - boundary: the program's own code
                continue  # the test will report what is missing
        missing = {"missing": None}
        return {
            "value": [self._named(self._space[name]) if name in self._space else missing for name in names]
        }

    def _named(self, value: Any) -> Any:
        tree = self._objects.encode(value)
        if isinstance(tree, dict) and tree.get("object", [""])[0] == "exception":
            tree["object"].append([base.__name__ for base in value.__mro__])
        return tree

    def _entry(self, function: str, args: Any, kwargs: Any) -> Any:
        """Call a function by name, or a method of a new `Solution`."""
        space = self._space
        is_method = function not in space and "Solution" in space
        entry = getattr(space["Solution"](), function) if is_method else space[function]
        value = entry(*self._objects.decode(args), **self._objects.decode(kwargs))
        return {"value": self._objects.encode(value)}

    def _call(self, target: Any, args: Any, kwargs: Any, keeps: bool) -> Any:
        """Call an object. keeps: also return the arguments if the call changed them."""
        function = self._objects.decode(target)
        given = [self._objects.decode(args), self._objects.decode(kwargs)]
        before = dump(self._objects.encode(given)) if keeps else b""
        answer: dict[str, Any]
        try:
            answer = {"value": self._objects.encode(function(*given[0], **given[1]))}
        except Exception as error:  # noqa: BLE001 - boundary: the program's own code
            answer = {"error": self._error(error)}
        if keeps:
            after = self._objects.encode(given)
            if dump(after) != before:
                answer["changed"] = after
        return answer

    def _apply(self, function: str, args: Any) -> Any:
        """Call a builtin function or a function of `operator`."""
        value = (getattr(builtins, function, None) or getattr(operator, function))(
            *self._objects.decode(args)
        )
        return {"value": self._objects.encode(value)}

    def _iterate(self, target: Any) -> Any:
        return {
            "value": {
                "object": ["iterator", self._objects._number(iter(self._objects.decode(target))), "", True]
            }
        }

    def _items(self, target: Any, count: int) -> Any:
        """Return up to `count` more items of an iterator, and whether it ended, or the error that ended
        it.
        """
        iterator = self._objects.decode(target)
        items: list[Any] = []
        try:
            for _ in range(count):
                items.append(self._objects.encode(next(iterator)))
        except StopIteration:
            return {"value": items, "is_end": True}
        except Exception as error:  # noqa: BLE001 - boundary: the program's own code
            return {"value": items, "end": self._error(error)}
        return {"value": items}

    def _await(self, target: Any) -> Any:
        import asyncio

        return {"value": self._objects.encode(asyncio.run(self._objects.decode(target)))}

    def _call_back(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of the test; answers its requests meanwhile."""
        self._write(
            {
                "callback": number,
                "args": self._objects.encode(list(args)),
                "kwargs": self._objects.encode(kwargs),
            }
        )
        while line := self._lines.readline():
            asked = load(line)
            if "op" not in asked:
                if "error" in asked:
                    raise getattr(builtins, asked["error"], RuntimeError)()
                return self._objects.decode(asked["value"])
            self._answer(asked)
        os._exit(0)

    def _error(self, error: BaseException) -> list[Any]:
        names = [base.__name__ for base in type(error).__mro__]
        try:
            attributes = {name: item for name, item in vars(error).items() if not name.startswith("_")}
            tree = [
                names,
                self._objects.encode(list(error.args)),
                self._objects.encode(attributes),
                str(error),
            ]
            dump(tree)
        except Exception:  # noqa: BLE001 - boundary: the program's own code
            return [names, [], {"dict": []}, ""]
        return tree

    def _write(self, answer: Any) -> None:
        if printed := self._printed.getvalue()[:MAX_PRINTED]:
            answer["printed"] = printed
            self._printed.seek(0)
            self._printed.truncate()
        line = dump(answer)
        while line:
            line = line[os.write(self._out, line) :]

    def _start_clocks(self) -> None:
        # The signals of both timers kill a process without handlers.
        signal.setitimer(signal.ITIMER_PROF, self._cpu_s)
        signal.setitimer(signal.ITIMER_REAL, self._wall_s)

    def _stop_clocks(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def main(reads: int, writes: int, *, is_heard: bool, cpu_s: float, wall_s: float) -> None:
    """Serve one program. Its own standard streams are /dev/null: what it prints is not an answer.

    is_heard: send what it prints along with the answers, for tests that capture it.
    """
    reads, writes = os.dup(reads), os.dup(writes)
    nowhere = os.open("/dev/null", os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    program = LoadedProgram(reads, writes, cpu_s=cpu_s, wall_s=wall_s)
    if program.load("program.py"):
        program.serve(is_heard=is_heard)
    os._exit(0)  # do not wait for threads that the program left


def _as(base: Any, value: Any) -> Any:
    """Convert an instance of a subclass of a builtin type to that type."""
    if base is dict:
        return dict(dict.items(value))
    if base in (list, tuple, set, frozenset):
        return base(base.__iter__(value))
    if base in (bytes, bytearray):
        return base(memoryview(value))
    if base is complex:
        return complex(value.real, value.imag)
    return {int: int.__int__, float: float.__float__, str: str.__str__}[base](value)


def _name(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else type(value).__name__


def _truth(value: Any) -> bool:
    try:
        return bool(value)
    except Exception:  # noqa: BLE001 - boundary: the program's own code
        return True
