"""What a test holds in place of the program's objects. None of them says that it equals plain data: only data does that.

An operator reaches the program where the test made the object itself, by calling a class that it names. What a function returned
answers calls and attributes, if it belongs to such a class, else nothing: it would be asked whether it is right.
"""

from __future__ import annotations

import operator

TYPE_CHECKING = False  # typing's own costs milliseconds at every start
if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator
    from typing import Any, Protocol

    class Asker(Protocol):
        def call(self, target: Any, args: Any, kwargs: Any) -> Any: ...
        def apply(self, function: str, *args: Any) -> Any: ...
        def iterate(self, target: Any) -> Iterator[Any]: ...
        def wait(self, target: Any) -> Any: ...


class Opaque:
    """Anything without plain data: it is itself, and true or false."""

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


class Function(Opaque):
    """A function, a method, or another object that can be called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._asker.call(self, args, kwargs)


class NamedFunction(Function):
    """A function that the test names: it may have attributes."""

    def __getattr__(self, name: str) -> Any:
        _refuse(name)
        return self._asker.apply("getattr", self, name)


class Iterable(Opaque):
    """What gives items and is no list: a generator, a view, an object with `__iter__`."""

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
    """An object of a class that the test names. It is compared with others of the program, and with nothing else."""

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

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Instance) and self._asker.apply("eq", self, other) is True)

    def __enter__(self) -> Any:
        return self._asker.call(self._asker.apply("getattr", self, "__enter__"), (), {})

    def __exit__(self, *error: object) -> bool:
        return self._asker.call(self._asker.apply("getattr", self, "__exit__"), (None, None, None), {}) is True


class OwnInstance(Instance):
    """An object that the test made: its operators are a part of what is tested."""

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


class Class(Function):
    """A class that the test names, or a class whose objects it made."""

    def __getattr__(self, name: str) -> Any:
        _refuse(name)
        return self._asker.apply("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._asker.apply("setattr", self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        made = self._asker.call(self, args, kwargs)
        if type(made) is Instance:
            object.__setattr__(made, "__class__", OwnInstance)
        return made

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
    """Return a coroutine of the test's side that waits for the program's."""

    async def wait() -> Any:
        return asker.wait(Opaque(asker, number, "coroutine", True))

    return wait()


def _operator(name: str, *, is_reflected: bool = False) -> Any:
    def apply(self: Any, *others: Any) -> Any:
        return _owned(self._asker.apply(name, *((*others, self) if is_reflected else (self, *others))))

    return apply


def _comparison(name: str) -> Any:
    def compare(self: Any, other: Any) -> Any:
        return self._asker.apply(name, self, other) is True if isinstance(other, Instance) else NotImplemented

    return compare


def _owned(value: Any) -> Any:
    if type(value) is Instance:
        object.__setattr__(value, "__class__", OwnInstance)
    return value


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


for _name in ("getitem", "setitem", "delitem", "contains"):
    setattr(Instance if _name != "contains" else OwnInstance, f"__{_name}__", _operator(_name))
for _name in ("lt", "le", "gt", "ge"):
    setattr(Instance, f"__{_name}__", _comparison(_name))
    setattr(OwnInstance, f"__{_name}__", _operator(_name))
for _name in ("neg", "pos", "abs", "invert", "round"):
    setattr(OwnInstance, f"__{_name}__", _operator(_name))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lshift", "rshift", "and", "or", "xor", "divmod"):
    _function = f"{_name}_" if hasattr(operator, f"{_name}_") else _name
    setattr(OwnInstance, f"__{_name}__", _operator(_function))
    setattr(OwnInstance, f"__r{_name}__", _operator(_function, is_reflected=True))
