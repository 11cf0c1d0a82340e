"""Plain data between processes that do not trust each other: values of builtin types as JSON, with exact
types.

null, booleans, numbers, texts and lists are themselves; all else is an object with one key, the name of its
type. Decoding creates values of these types only, whoever wrote the text.
"""

from __future__ import annotations

import importlib
import json

TYPE_CHECKING = False  # importing typing would cost milliseconds at every start
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

MAX_BYTES = 8 * 2**20
"""Limit of one line."""
MAX_HEX_DIGITS = 10**6
MAX_EXPONENT = 10**5
MAX_FRACTION_BITS = 10**4
MAX_ALIKE = 64
"""Keys with equal hashes.

Multiples of 2**61 - 1 all have the same hash, and a set of n of them takes n * n steps.
"""
LARGE = 2**63
UNREADABLE = (ValueError, TypeError, ArithmeticError, LookupError, RecursionError, MemoryError)
"""What decoding raises for a malformed or too large text."""


def dump(tree: Any) -> bytes:
    """Return a tree of `encode` as a line."""
    return json.dumps(tree).encode() + b"\n"


def load(line: bytes) -> Any:
    """Parse a line to a tree for `decode`. Raises one of UNREADABLE."""
    if len(line) >= MAX_BYTES:
        raise ValueError("too long")
    return json.loads(line)


def encode(value: Any, other: Callable[[Any], Any]) -> Any:
    """Return the tree of a value; `other` returns the trees of objects that are not plain."""
    kind = type(value)
    if value is None or kind is bool or kind is float or kind is str:
        return value
    if kind is int:
        return value if -LARGE < value < LARGE else {"int": hex(value)}
    if kind is list:
        return [encode(item, other) for item in value]
    if kind is dict:
        return {"dict": _pairs(value, other)}
    if kind in (tuple, set, frozenset):
        return {kind.__name__: [encode(item, other) for item in value]}
    if kind in (bytes, bytearray):
        return {kind.__name__: value.hex()}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind is range:
        return {"range": [encode(part, other) for part in (value.start, value.stop, value.step)]}
    if kind is type and value.__module__ == "builtins":
        return {"type": value.__name__}
    name = f"{kind.__module__}.{kind.__qualname__}"
    writer = _WRITERS.get(name)
    return {name: writer(value, other)} if writer is not None else other(value)


def decode(tree: Any, extra: Mapping[str, Callable[[Any], Any]] | None = None) -> Any:
    """Return the value of a tree; `extra` has decoders of more types. Raises one of UNREADABLE."""
    kind = type(tree)
    if kind is list:
        return [decode(item, extra) for item in tree]
    if kind is not dict:
        return tree
    ((name, content),) = tree.items()
    if extra is not None and name in extra:
        return extra[name](content)
    return _READERS[name](content, extra)


def array(content: Any) -> Any:
    """Return a numpy array of numbers or texts. Raises one of UNREADABLE."""
    numpy = importlib.import_module("numpy")
    form, shape, items = content
    if numpy.dtype(form).kind not in "biufcU":
        raise TypeError("no array of data")
    return numpy.array(decode(items), dtype=form).reshape([int(size) for size in shape])


def _pairs(value: Any, other: Callable[[Any], Any]) -> list[Any]:
    return [[encode(key, other), encode(item, other)] for key, item in value.items()]


def _mapping(content: Any, extra: Any) -> dict[Any, Any]:
    pairs = [(decode(key, extra), decode(item, extra)) for key, item in content]
    _spread([key for key, _ in pairs])
    return dict(pairs)


def _keys(content: Any, extra: Any) -> list[Any]:
    return _spread([decode(item, extra) for item in content])


def _spread(keys: list[Any]) -> list[Any]:
    """Return the keys if they can be hashed in linear time, else raise ValueError."""
    if len(keys) > MAX_ALIKE:
        counts: dict[int, int] = {}
        for number in map(hash, keys):
            counts[number] = counts.get(number, 0) + 1
        if max(counts.values()) > MAX_ALIKE:
            raise ValueError("too many keys with the same hash")
    return keys


def _integer(text: str) -> int:
    if len(text) > MAX_HEX_DIGITS:
        raise ValueError("too large a number")
    return int(text, 16)


def _decimal(text: str) -> Any:
    value = importlib.import_module("decimal").Decimal(text)
    if value.is_finite() and abs(value.adjusted()) > MAX_EXPONENT:
        raise ValueError("too large a number")
    return value


def _fraction(content: Any, extra: Any) -> Any:
    numerator, denominator = decode(content, extra)
    # A text could contain an exponent, which is expanded.
    if type(numerator) is not int or type(denominator) is not int:
        raise TypeError("no fraction")
    if max(numerator.bit_length(), denominator.bit_length()) > MAX_FRACTION_BITS:  # gcd takes n * n steps
        raise ValueError("too large a number")
    return importlib.import_module("fractions").Fraction(numerator, denominator)


def _in(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


_BUILTINS = (
    *(
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        bytearray,
        list,
        tuple,
        set,
        frozenset,
        dict,
        range,
        object,
        type(None),
    ),
    *(Exception, ValueError, TypeError, KeyError, IndexError, ZeroDivisionError),
)
_TYPES = {kind.__name__: kind for kind in _BUILTINS}
_DATES = ("datetime.date", "datetime.datetime", "datetime.time")

_WRITERS: dict[str, Callable[[Any, Any], Any]] = {
    "collections.Counter": _pairs,
    "collections.OrderedDict": _pairs,
    "collections.deque": lambda value, other: [encode(list(value), other), value.maxlen],
    "decimal.Decimal": lambda value, other: str(value),
    "fractions.Fraction": lambda value, other: encode([value.numerator, value.denominator], other),
    "datetime.timedelta": lambda value, other: [value.days, value.seconds, value.microseconds],
    **dict.fromkeys(_DATES, lambda value, other: value.isoformat()),
}
_READERS: dict[str, Callable[[Any, Any], Any]] = {
    "int": lambda content, extra: _integer(content),
    "dict": _mapping,
    "tuple": lambda content, extra: tuple([decode(item, extra) for item in content]),
    "set": lambda content, extra: set(_keys(content, extra)),
    "frozenset": lambda content, extra: frozenset(_keys(content, extra)),
    "bytes": lambda content, extra: bytes.fromhex(content),
    "bytearray": lambda content, extra: bytearray.fromhex(content),
    "complex": lambda content, extra: complex(*content),
    "range": lambda content, extra: range(*decode(content, extra)),
    "type": lambda content, extra: _TYPES[content],
    "collections.Counter": lambda content, extra: _in("collections", "Counter")(_mapping(content, extra)),
    "collections.OrderedDict": lambda content, extra: _in("collections", "OrderedDict")(
        _mapping(content, extra)
    ),
    "collections.deque": lambda content, extra: _in("collections", "deque")(
        decode(content[0], extra), content[1]
    ),
    "decimal.Decimal": lambda content, extra: _decimal(content),
    "fractions.Fraction": _fraction,
    "datetime.timedelta": lambda content, extra: _in("datetime", "timedelta")(*content),
    "datetime.date": lambda content, extra: _in("datetime", "date").fromisoformat(content),
    "datetime.datetime": lambda content, extra: _in("datetime", "datetime").fromisoformat(content),
    "datetime.time": lambda content, extra: _in("datetime", "time").fromisoformat(content),
}
