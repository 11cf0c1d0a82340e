"""Proxies that a test holds in place of the program's objects.

None of them equals plain data: only data does.

The test compares data only: an object's attributes, its text, its number. An operator with the test's own
data as the other operand would let the program judge itself. So it reaches the program only if the test
created the object by calling a class that it names; for objects that functions returned, even the same one,
it does not. Only objects of named classes have methods.
"""

from __future__ import annotations

import operator

TYPE_CHECKING = False  # importing typing would cost milliseconds at every start
if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator
    from typing import Any, Protocol

    class Asker(Protocol):
        def call(self, target: Any, args: Any, kwargs: Any) -> Any: ...
        def apply(self, function: str, *args: Any) -> Any: ...
        def iterate(self, target: Any) -> Iterator[Any]: ...
        def made(self, value: Any) -> Any: ...
        def wait(self, target: Any) -> Any: ...


UNARY = ("neg", "pos", "abs", "invert", "round")


class Opaque:
    """Any object without a plain form.

    It has identity, a truth value, and attributes that are data or proxies.
    """

    _asker: Asker
    _number: int
    _class_name: str
    _truth: bool

    def __init__(self, asker: Asker, number: int, class_name: str, truth: bool) -> None:
        vars(self).update(_asker=asker, _number=number, _class_name=class_name, _truth=truth)

    def __bool__(self) -> bool:
        return bool(self._truth)

    def __repr__(self) -> str:
        return f"<{self._class_name} of the program>"

    def __getattr__(self, name: str) -> Any:
        _refuse(name)
        value = self._asker.apply("getattr", self, name)
        if isinstance(value, Function):  # not methods: one could judge the program's own result
            raise AttributeError(name)
        return value


class Function(Opaque):
    """A function, a method, or another callable object."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._asker.call(self, args, kwargs)


class NamedFunction(Function):
    """A function that the test names. It may have attributes."""

    def __getattr__(self, name: str) -> Any:
        _refuse(name)
        return self._asker.apply("getattr", self, name)


class Iterable(Opaque):
    """An iterable that is not a list: a generator, a view, an object with `__iter__`."""

    _items: Iterator[Any] | None

    def __init__(self, asker: Asker, number: int, class_name: str, truth: bool) -> None:
        super().__init__(asker, number, class_name, truth)
        vars(self)["_items"] = None

    def __iter__(self) -> Iterator[Any]:
        return self._asker.iterate(self)

    def __next__(self) -> Any:
        items = self._items or iter(self)
        vars(self)["_items"] = items
        return next(items)

    def __len__(self) -> int:
        return _whole(self._asker.apply("len", self))


class Instance(Opaque):
    """An object of a class that the test names. Its operators accept only other objects of the program."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._asker.call(self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        _refuse(name)
        return self._asker.apply("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._asker.apply("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._asker.apply("delattr", self, name)

    def __iter__(self) -> Iterator[Any]:
        return self._asker.iterate(self)

    def __bool__(self) -> bool:
        return self._asker.apply("bool", self) is True

    def __len__(self) -> int:
        return _whole(self._asker.apply("len", self))

    def __hash__(self) -> int:
        return _whole(self._asker.apply("hash", self))

    def __next__(self) -> Any:
        for item in self._asker.iterate(self):
            return item
        raise StopIteration

    def __str__(self) -> str:
        return _text(self._asker.apply("str", self))

    def __repr__(self) -> str:
        return _text(self._asker.apply("repr", self))

    def __format__(self, form: str) -> str:
        return _text(self._asker.apply("format", self, form))

    def __float__(self) -> float:
        return float(self._asker.apply("float", self))

    def __int__(self) -> int:
        return _whole(self._asker.apply("int", self))

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Instance) and self._asker.apply("eq", self, other) is True)

    def __enter__(self) -> Any:
        return self._asker.call(self._asker.apply("getattr", self, "__enter__"), (), {})

    def __exit__(self, *error: object) -> bool:
        return (
            self._asker.call(self._asker.apply("getattr", self, "__exit__"), (None, None, None), {}) is True
        )


class OwnInstance(Instance):
    """An object that the test created.

    Its operators also accept data, because they are part of what is tested.
    """


class Class(Function):
    """A class that the test names, or the class of an object that it created."""

    def __getattr__(self, name: str) -> Any:
        _refuse(name)
        return self._asker.apply("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._asker.apply("setattr", self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._asker.made(self._asker.call(self, args, kwargs))

    def __getitem__(self, key: Any) -> Any:
        return self._asker.apply("getitem", self, key)

    def __iter__(self) -> Iterator[Any]:
        return self._asker.iterate(self)

    def __len__(self) -> int:
        return _whole(self._asker.apply("len", self))

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, Instance) and self._asker.apply("isinstance", value, self) is True

    def __subclasscheck__(self, value: object) -> bool:
        return isinstance(value, Class) and self._asker.apply("issubclass", value, self) is True


def coroutine(asker: Asker, number: int) -> Coroutine[Any, Any, Any]:
    """Return a coroutine of the test side that awaits the program's."""

    async def wait() -> Any:
        return asker.wait(Opaque(asker, number, "coroutine", True))

    return wait()


def _operator(name: str, *, is_reflected: bool = False) -> Any:
    def apply(self: Any, other: Any, *modulus: Any) -> Any:
        is_own = type(self) is OwnInstance or type(other) is OwnInstance
        if not is_own and not isinstance(other, Instance):
            return NotImplemented
        value = self._asker.apply(name, *((other, self) if is_reflected else (self, other, *modulus)))
        return self._asker.made(value) if is_own else value

    return apply


def _request(name: str) -> Any:
    def apply(self: Any, *details: Any) -> Any:
        value = self._asker.apply(name, self, *details)
        return self._asker.made(value) if type(self) is OwnInstance and name in UNARY else value

    return apply


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError("not a whole number")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError("not a text")
    return value


def _refuse(name: str) -> None:
    if name.startswith("__"):
        raise AttributeError(name)


for _name in ("getitem", "setitem", "delitem", *UNARY):
    setattr(Instance, f"__{_name}__", _request(_name))
for _name in ("lt", "le", "gt", "ge"):
    setattr(Instance, f"__{_name}__", _operator(_name))
for _name in (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "lshift",
    "rshift",
    "and",
    "or",
    "xor",
    "divmod",
):
    _function = f"{_name}_" if hasattr(operator, f"{_name}_") else _name
    setattr(Instance, f"__{_name}__", _operator(_function))
    setattr(Instance, f"__r{_name}__", _operator(_function, is_reflected=True))
for _name in ("contains",):
    setattr(OwnInstance, f"__{_name}__", _request(_name))
