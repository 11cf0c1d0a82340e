"""Plain data as lines of JSON: every type comes back as it was, and nothing large or strange is decoded."""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import json
import math

import numpy as np
import pytest

from agentrl.extras.sandbox.inside.plain_data import (
    LARGE,
    MAX_BYTES,
    UNREADABLE,
    array,
    decode,
    dump,
    encode,
    load,
)


class Other:
    pass


def tree(value: object) -> object:
    return encode(value, lambda item: {"other": type(item).__name__})


TREES = [
    (None, None),
    (True, True),
    (False, False),
    (1.5, 1.5),
    ("a", "a"),
    (7, 7),
    (2**63 - 1, 2**63 - 1),
    (1 - 2**63, 1 - 2**63),
    (2**63, {"int": hex(2**63)}),
    (-(2**63), {"int": hex(-(2**63))}),
    ([1, [2]], [1, [2]]),
    ({1: "a", (2,): [3]}, {"dict": [[1, "a"], [{"tuple": [2]}, [3]]]}),
    ((), {"tuple": []}),
    ({3}, {"set": [3]}),
    (frozenset([3]), {"frozenset": [3]}),
    (b"\x01\xff", {"bytes": "01ff"}),
    (bytearray(b"\x02"), {"bytearray": "02"}),
    (1 - 2j, {"complex": [1.0, -2.0]}),
    (range(1, 9, 3), {"range": [1, 9, 3]}),
    (int, {"type": "int"}),
    (type(None), {"type": "NoneType"}),
    (ValueError, {"type": "ValueError"}),
    (collections.Counter("aab"), {"collections.Counter": [["a", 2], ["b", 1]]}),
    (collections.OrderedDict([(2, 1), (1, 2)]), {"collections.OrderedDict": [[2, 1], [1, 2]]}),
    (collections.deque([1, 2], 5), {"collections.deque": [[1, 2], 5]}),
    (collections.deque([1]), {"collections.deque": [[1], None]}),
    (decimal.Decimal("1.50"), {"decimal.Decimal": "1.50"}),
    (fractions.Fraction(-3, 4), {"fractions.Fraction": [-3, 4]}),
    (datetime.timedelta(1, 2, 3), {"datetime.timedelta": [1, 2, 3]}),
    (datetime.date(2024, 2, 3), {"datetime.date": "2024-02-03"}),
    (datetime.datetime(2024, 2, 3, 4, 5, 6, 7), {"datetime.datetime": "2024-02-03T04:05:06.000007"}),
    (datetime.time(4, 5), {"datetime.time": "04:05:00"}),
]


@pytest.mark.parametrize(("value", "expected"), TREES, ids=lambda value: repr(value)[:30])
def test_a_value_has_one_form_and_comes_back_with_its_type(value, expected):
    found = tree(value)
    assert found == expected
    assert type(found) is type(expected)
    back = decode(load(dump(found)))
    assert back == value
    assert type(back) is type(value)
    assert repr(back) == repr(value)


def test_a_line_ends_and_is_no_longer_than_allowed():
    assert dump([1]) == b"[1]\n"
    assert load(b'"' + b"a" * (MAX_BYTES - 3) + b'"') == "a" * (MAX_BYTES - 3)
    for num_bytes in (MAX_BYTES, 10**7):
        with pytest.raises(ValueError, match="too long"):
            load(b'"' + b"a" * (num_bytes - 2) + b'"')
    assert load(b'"' + b"a" * 10**6 + b'"') == "a" * 10**6
    assert LARGE == 2**63


@pytest.mark.parametrize("value", [Other(), Other, print, len, np.float64(1), collections.ChainMap()])
def test_what_is_not_plain_is_asked_for(value):
    assert tree(value) == {"other": type(value).__name__}
    assert tree([value]) == [{"other": type(value).__name__}]
    assert tree({"a": value}) == {"dict": [["a", {"other": type(value).__name__}]]}
    assert tree((value,)) == {"tuple": [{"other": type(value).__name__}]}


def test_decoders_of_more_types_come_first_and_are_used_everywhere():
    extra = {"mine": lambda content: ("mine", content), "int": lambda content: "another"}
    mine = {"mine": 1}
    assert decode(mine, extra) == ("mine", 1)
    assert decode({"int": "0x1"}, extra) == "another"
    for whole, expected in (
        ([mine], [("mine", 1)]),
        ({"tuple": [mine]}, (("mine", 1),)),
        ({"set": [mine]}, {("mine", 1)}),
        ({"frozenset": [mine]}, frozenset([("mine", 1)])),
        ({"dict": [[mine, mine]]}, {("mine", 1): ("mine", 1)}),
        ({"collections.Counter": [[mine, 1]]}, collections.Counter([("mine", 1)])),
        ({"collections.OrderedDict": [[mine, 1]]}, {("mine", 1): 1}),
        ({"collections.deque": [[mine], None]}, collections.deque([("mine", 1)])),
    ):
        assert decode(whole, extra) == expected
    assert decode({"tuple": [{"bytes": "00"}]}, {}) == (b"\x00",)


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"a": 1, "b": 2},
        {"unknown": 1},
        {"int": "zz"},
        {"int": 5},
        {"int": "0x" + "f" * 10**6},
        {"type": "open"},
        {"type": "Other"},
        {"bytes": "0"},
        {"complex": [1, 2, 3]},
        {"range": [1, 2, 0]},
        {"dict": [[1]]},
        {"dict": [[{"tuple": [[1]]}, 2]]},
        {"set": [[1]]},
        {"frozenset": [{"dict": []}]},
        {"decimal.Decimal": "x"},
        {"decimal.Decimal": "1e100001"},
        {"decimal.Decimal": "1e-100001"},
        {"fractions.Fraction": ["1e9", 1]},
        {"fractions.Fraction": [1, True]},
        {"fractions.Fraction": [1.5, 1]},
        {"fractions.Fraction": [1, 0]},
        {"fractions.Fraction": [{"int": hex(2**10_000)}, 1]},
        {"fractions.Fraction": [1, {"int": hex(2**10_000)}]},
        {"datetime.date": "yesterday"},
        {"datetime.timedelta": [10**10]},
        {"set": [i * (2**61 - 1) for i in range(1, 66)] + [1]},
        {"dict": [[i * (2**61 - 1), 0] for i in range(1, 66)]},
    ],
    ids=lambda bad: repr(bad)[:40],
)
def test_what_is_malformed_or_too_large_is_not_decoded(bad):
    with pytest.raises(UNREADABLE):
        decode(bad)


def test_limits_admit_what_is_just_below():
    assert decode({"int": "0x" + "f" * (10**6 - 2)}) == 16 ** (10**6 - 2) - 1
    for text in ("1e100000", "1e-100000", "NaN", "Infinity"):
        assert decode({"decimal.Decimal": text}).compare_total(decimal.Decimal(text)) == 0
    large = 2**10_000 - 1
    assert decode(tree(fractions.Fraction(large, 2))) == fractions.Fraction(large, 2)
    assert decode(tree(fractions.Fraction(2, large))) == fractions.Fraction(2, large)
    alike = [i * (2**61 - 1) for i in range(1, 65)]
    assert decode({"set": alike}) == set(alike)
    assert decode({"set": [*alike, *range(1, 100)]}) == {*alike, *range(1, 100)}
    assert decode({"set": list(range(200))}) == set(range(200))


def test_arrays_are_of_data():
    for value in (
        np.array([[1, 2], [3, 4]], dtype=np.int32),
        np.array([True, False]),
        np.array([1.5, math.inf]),
        np.array(["a", "bc"]),
        np.array([1 + 2j]),
        np.array([3], dtype=np.uint8),
        np.zeros((0, 2)),
    ):
        content = [value.dtype.str, list(value.shape), tree(value.tolist())]
        back = array(json.loads(json.dumps(content)))
        assert (back.dtype, back.shape) == (value.dtype, value.shape)
        assert back.tolist() == value.tolist()
        assert array([value.dtype.str, [str(size) for size in value.shape], content[2]]).shape == value.shape
    for form in ("O", "V8", "M8[s]", "S3"):
        with pytest.raises(UNREADABLE):
            array([form, [1], ["a"]])
    with pytest.raises(UNREADABLE):
        array(["<i8", [3], [1, 2]])
