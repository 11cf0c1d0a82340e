"""Checks of the values that plugins construct results from, at the line that constructs them."""

from __future__ import annotations

import inspect
import math
import reprlib
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from agentrl.types import Image

PLAIN = (str, bytes, int, float, list, tuple, dict, set, frozenset)
"""Types whose values are shown, not only named: their text is short and has no address."""
MAX_WHERE_CHARS = 500
FORGOT_AWAIT = "did you forget `await`?"


def described(value: object) -> str:
    """Return the type and the value in a few words: `dict {'a': 1}`, `None`."""
    if value is None:
        return "None"
    if inspect.isawaitable(value):
        return f"a {type(value).__name__} ({FORGOT_AWAIT})"
    kind = type(value).__name__
    return f"{kind} {reprlib.repr(value)}" if isinstance(value, PLAIN) else kind


def is_number(value: object) -> bool:
    """Return whether a value is None or a finite number."""
    return value is None or (isinstance(value, Real) and math.isfinite(value))


def check_number(what: str, value: object) -> None:
    """Check that a value is None or a finite number.

    Raises:
        TypeError: it is something else.
        ValueError: it is infinite or no number.
    """
    if is_number(value):
        return
    if isinstance(value, Real):
        raise ValueError(f"{what} is {float(value)}; it must be finite, or None")
    raise TypeError(f"{what} is {described(value)}; it must be a number or None")


def check_type(what: str, value: object, kind: type | tuple[type, ...], cure: str) -> None:
    """Raise TypeError if `value` is not of the type."""
    if not isinstance(value, kind):
        raise TypeError(f"{what} is {described(value)}; {cure}")


def check_answer(
    kind: str,
    *,
    text: object,
    flags: Mapping[str, object],
    reward: object,
    metrics: object,
    state: object,
    images: object,
) -> None:
    """Check the fields of what a tool or a partner answers; `kind` is the name of its type.

    Raises:
        TypeError, ValueError: a field has a wrong type or value.
    """
    check_type(f"{kind}.text", text, str, "it must be a text, such as json.dumps(value)")
    for name, flag in flags.items():
        check_type(f"{kind}.{name}", flag, (bool, np.bool_), "it must be True or False")
    check_number(f"{kind}.reward", reward)
    check_type(f"{kind}.metrics", metrics, Mapping, "it must map names to numbers")
    _check_metrics(f"{kind}.metrics", metrics)
    check_type(f"{kind}.state", state, (str, type(None)), "it must be a text or None")
    check_type(f"{kind}.images", images, (tuple, list), "it must be a tuple of agentrl.types.Image")
    _check_images(f"{kind}.images", images)


def _check_metrics(what: str, metrics: Any) -> None:
    for name, value in metrics.items():
        check_type(f"the name of a metric in {what}", name, str, "it must be a text")
        check_type(f"{what}[{name!r}]", value, Real, "it must be a number")
        check_number(f"{what}[{name!r}]", value)


def _check_images(what: str, images: Any) -> None:
    for index, image in enumerate(images):
        check_type(f"{what}[{index}]", image, Image, "it must be agentrl.types.Image(data)")
        check_type(f"{what}[{index}].data", image.data, bytes, "it must be the bytes of a file")


def not_plain(value: Any, where: str) -> str | None:
    """Return what keeps a value from being plain JSON data: `facts['when'] is datetime ...`; None if it is
    plain.
    """
    if len(where) > MAX_WHERE_CHARS:
        return f"{where[:40]}... nests too deeply, or contains itself"
    if value is None or isinstance(value, bool | int | str):
        return None
    if isinstance(value, float):
        return None if math.isfinite(value) else f"{where} is {value}"
    if isinstance(value, Mapping):
        odd = next((key for key in value if not isinstance(key, str | int | float | bool | None)), None)
        if odd is not None:
            return f"{where} has the key {described(odd)}"
        parts: Sequence[tuple[str, Any]] = [(f"{where}[{key!r}]", part) for key, part in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(f"{where}[{index}]", part) for index, part in enumerate(value)]
    else:
        return f"{where} is {described(value)}"
    return next((found for name, part in parts if (found := not_plain(part, name)) is not None), None)
