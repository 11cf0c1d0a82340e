"""The two sides of a code test in one process: what a test sees of a program, and what the program is given.

Both sides are the real ones, connected by two pipes; only the walls around them are missing.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agentrl.extras.sandbox.inside import objects
from agentrl.extras.sandbox.inside.checker import (
    MAX_ITEMS,
    Asserting,
    Broken,
    Link,
    LostError,
    ProgramExit,
    _modules,
    run,
)
from agentrl.extras.sandbox.inside.plain_data import decode, dump, load
from agentrl.extras.sandbox.inside.program import MAX_PRINTED, LoadedProgram, Objects


@contextmanager
def connected(source: str, tmp_path: Path, *, is_heard: bool = False) -> Iterator[Link]:
    path = tmp_path / "program.py"
    path.write_text(source)
    (reads_asked, asks), (reads_answers, answers) = os.pipe(), os.pipe()
    limit, module, stdout = sys.getrecursionlimit(), sys.modules.get("solution"), sys.stdout
    program = LoadedProgram(reads_asked, answers, cpu_s=100.0, wall_s=100.0)

    def serve() -> None:
        if program.load(str(path)):
            program.serve(is_heard=is_heard)
        os.close(answers)

    thread = threading.Thread(target=serve)
    thread.start()
    link = Link(reads_answers, asks)
    try:
        assert link.read() == {"compiles": True}
        assert link.read() == {"loaded": True}
        yield link
    finally:
        os.close(asks)
        thread.join()
        link._lines.close()
        program._lines.close()
        sys.setrecursionlimit(limit)
        sys.stdout = stdout
        sys.modules.pop("solution", None)
        if module is not None:
            sys.modules["solution"] = module


def space_of(
    link: Link, names: list[str], modules: tuple[str, ...] = (), sources: tuple[str, ...] = ()
) -> dict:
    trees = link.names(names, list(sources))
    return {
        **_modules(list(modules)),
        **{name: link.named(tree) for name, tree in trees.items()},
        "asserting": Asserting(link),
    }


PROGRAM = """
import collections
calls = []
def double(values):
    return [2 * value for value in values]
def append(values, extra=()):
    values.append(7)
    values.extend(extra)
def change(mapping, values, array, pair):
    mapping["new"] = mapping.pop("old")
    values.clear(); values.add(9)
    array.extend(b"x")
    pair[0].append(1)
def swap(outer):
    outer[0], outer[1] = outer[1], outer[0]
    outer[0].append(5)
def inside(outer):
    outer[0][0].append(1)
    outer[1] = (outer[1][0] + 1,)
def fail(kind="value"):
    if kind == "own":
        raise OwnError("no", 3)
    if kind == "exit":
        raise SystemExit(3)
    if kind == "base":
        raise KeyboardInterrupt
    if kind == "stop":
        raise StopIteration(4)
    raise {"value": ValueError, "key": KeyError}[kind]("why")
class OwnError(LookupError):
    def __init__(self, text, code):
        super().__init__(text)
        self.code = code
        self._secret = 1
def apply(function, *args, **kwargs):
    return function(*args, **kwargs)
def guarded(function):
    try:
        return function()
    except ValueError:
        return "ValueError"
    except Exception as error:
        return type(error).__name__
def same(function):
    return function
def count(to):
    for number in range(to):
        yield number
def broken():
    yield 1
    raise KeyError("end")
def forever():
    while True:
        yield 0
async def later(value):
    return value + 1
def say(text):
    print(text)
    return len(text)
class Point:
    size = 2
    def __init__(self, x, y=0):
        self.x, self.y = x, y
    def moved(self, by):
        return Point(self.x + by, self.y)
    def __eq__(self, other):
        return isinstance(other, Point) and (self.x, self.y) == (other.x, other.y)
    def __hash__(self):
        return 42
    def __add__(self, other):
        return Point(self.x + (other if isinstance(other, int) else other.x), self.y)
    def __radd__(self, other):
        return Point(other + self.x, self.y)
    def __lt__(self, other):
        return self.x < other.x
    def __getitem__(self, place):
        return (self.x, self.y)[place]
    def __setitem__(self, place, value):
        self.x = value
    def __delitem__(self, place):
        self.x = None
    def __contains__(self, value):
        return value in (self.x, self.y)
    def __len__(self):
        return 2
    def __iter__(self):
        return iter((self.x, self.y))
    def __bool__(self):
        return self.x != 0
    def __neg__(self):
        return Point(-self.x, -self.y)
    def __str__(self):
        return f"({self.x})"
    def __repr__(self):
        return f"Point({self.x})"
    def __format__(self, form):
        return form + str(self.x)
    def __float__(self):
        return self.x / 2
    def __int__(self):
        return int(self.x)
    def __enter__(self):
        return self.x
    def __exit__(self, *error):
        calls.append(error)
        return error[0] is None
    def __call__(self, value):
        return self.x * value
class Child(Point):
    pass
class Hidden:
    def __init__(self):
        self.value = [1]
    def method(self):
        return 1
    def __eq__(self, other):
        return True
class Numbers(list):
    pass
class Falsy:
    def __bool__(self):
        return False
class Unsure:
    def __bool__(self):
        raise ValueError
class Bag:
    def __iter__(self):
        return iter("ab")
    def __len__(self):
        return 2
class Color(__import__("enum").Enum):
    RED = 1
    BLUE = 2
def hidden(): return Hidden()
def numbers(): return Numbers([1, 2])
def falsy(): return Falsy()
def unsure(): return Unsure()
def bag(): return Bag()
def point(x): return Point(x)
def view(mapping): return mapping.keys()
def wrong_length(): return "a"
same_one = Point(1)
def the_same(): return same_one
def the_calls(): return calls
data = {"a": [1, (2, 3)]}
"""
NAMES = [
    "double",
    "append",
    "change",
    "swap",
    "inside",
    "fail",
    "OwnError",
    "apply",
    "guarded",
    "same",
    "count",
    "broken",
    "forever",
    "later",
    "say",
    "Point",
    "Child",
    "hidden",
    "numbers",
    "falsy",
    "unsure",
    "bag",
    "point",
    "view",
    "the_same",
    "data",
    "Color",
    "the_calls",
    "missing",
]

PASSES = """
assert double([1, 2]) == [2, 4] and data == {"a": [1, (2, 3)]}

values = [1]; append(values); assert values == [1, 7]

values = [1]; append(values, extra=(2,)); assert values == [1, 7, 2]

inner = [1]; outer = [inner, [2]]; swap(outer); assert outer == [[2, 5], [1]]

pair, other = ([0],), (1,)
outer = [pair, other]
inside(outer)
assert outer == [([0, 1],), (2,)] and outer[0] is pair and other == (1,)

mapping, values, array, pair = {"old": [1], "kept": [2]}, {1}, bytearray(b"a"), ([0],)
kept = mapping["kept"]
first = pair[0]
change(mapping, values, array, pair)
assert (mapping, values, array, pair) == ({"kept": [2], "new": [1]}, {9}, bytearray(b"ax"), ([0, 1],))
assert mapping["kept"] is kept and pair[0] is first

values = [1]
with asserting:
    append(values)
assert values == [1]

values = [1]
with asserting:
    pass
append(values)
assert values == [1, 7]

try:
    fail()
except ValueError as error:
    assert error.args == ("why",) and str(error) == "why"
else:
    assert False

try:
    fail("key")
except KeyError as error:
    assert error.args == ("why",)

try:
    fail("own")
except OwnError as error:
    assert error.code == 3 and error.args == ("no",) and not hasattr(error, "_secret")

try:
    fail("own")
except LookupError:
    pass

assert OwnError.__name__ == "OwnError" and issubclass(OwnError, LookupError)

try:
    fail("base")
except RuntimeError as error:
    assert str(error) == "KeyboardInterrupt: "

try:
    fail("stop")
except Exception as error:
    assert type(error) is Exception

assert apply(lambda a, b=1: a + b, 2) == 3 and apply(lambda a, b=1: a + b, 2, b=5) == 7

assert apply(lambda: double([3])) == [6]

assert guarded(lambda: 1 // 0) == "ZeroDivisionError" and guarded(lambda: int("x")) == "ValueError"

f = lambda: 1; assert same(f) is f

assert list(count(3)) == [0, 1, 2] and list(count(0)) == [] and list(count(2000)) == list(range(2000))

numbers_ = count(3)
assert next(numbers_) == 0 and next(numbers_) == 1 and list(numbers_) == [0, 1, 2][2:]

found = []
try:
    for item in broken():
        found.append(item)
except KeyError as error:
    assert found == [1] and error.args == ("end",)
else:
    assert False

import asyncio; assert asyncio.run(later(3)) == 4

assert Point(1) == Point(1) and Point(1) != Point(2) and not Point(1) == 1 and Point(1) != "x"

assert Point(3).x == 3 and Point(3, y=4).y == 4 and Point.size == 2

assert Point(3).moved(2).x == 5 and Point(3).moved(by=2) == Point(5)

p = Point(1); p.x = 9; assert p.x == 9 and p.moved(0).x == 9

p = Point(1); del p.y; assert not hasattr(p, "y")

Point.size = 5; assert Point.size == 5; Point.size = 2

assert (Point(1) + 2).x == 3 and (2 + Point(1)).x == 3 and (Point(1) + Point(4)).x == 5

assert Point(1) < Point(2) and not Point(2) < Point(1) and sorted([Point(2), Point(1)])[0].x == 1

p = Point(1, 2)
assert p[0] == 1 and p[1] == 2 and len(p) == 2 and list(p) == [1, 2] and 2 in p and 7 not in p

p = Point(1, 2); p[0] = 8; assert p.x == 8; del p[0]; assert p.x is None

assert bool(Point(1)) is True and bool(Point(0)) is False and hash(Point(1)) == 42
assert len({Point(1), Point(1)}) == 1

assert (-Point(3)).x == -3 and -(-Point(3)) == Point(3) and (-Point(3)) + 5 == Point(2)

assert str(Point(3)) == "(3)" and repr(Point(3)) == "Point(3)" and f"{Point(3):>>}" == ">>3"

assert float(Point(3)) == 1.5 and int(Point(3)) == 3 and Point(3)(4) == 12

with Point(6) as inside:
    assert inside == 6
assert the_calls()[-1] == (None, None, None)

try:
    with Point(6):
        raise KeyError(1)
except KeyError:
    assert False, "the program returned True: the error is its own to hide"

assert next(Point(4, 5)) == 4

assert isinstance(Point(1), Point) and isinstance(Child(1), Point) and not isinstance(Point(1), Child)

assert issubclass(Child, Point) and not issubclass(Point, Child) and not isinstance(1, Point)
assert not issubclass(int, Point)

assert type(the_same()) is type(the_same()) and the_same() is the_same()

assert point(3).x == 3 and point(3).moved(1).x == 4 and point(1) == Point(1)

assert numbers() == [1, 2] and type(numbers()) is list

h = hidden()
assert h.value == [1] and h != 1 and not hasattr(h, "method") and repr(h) == "<Hidden of the program>"
assert bool(h)

assert not falsy() and bool(unsure()) and not hasattr(hidden(), "__len__")

b = bag()
assert list(b) == ["a", "b"] and len(b) == 2 and next(b) == "a" and next(b) == "b" and "a" in b

v = view({1: 2}); assert sorted(v) == [1] and len(v) == 1

assert Color.RED == Color.RED and Color.RED is Color.RED and Color.RED != Color.BLUE
assert Color["RED"] is Color.RED and len(Color) == 2 and [c.name for c in Color] == ["RED", "BLUE"]

assert say("abc") == 3

def test_it():
    assert double([1]) == [2]

assert double(range(2)) == [0, 2] and double((1, 2)) == [2, 4] and double({3}) == [6]

class MyList(list): pass
assert double(MyList([1])) == [2]

assert double(iter([1, 2])) == [2, 4] and double(x for x in [3]) == [6]

assert numpy.array_equal(apply(lambda a: a, numpy.array([1, 2])), numpy.array([1, 2]))

assert double([numpy.int64(2)]) == [4] and double(numpy.array([1.5, 2.0])) == [3.0, 4.0]
""".strip().split("\n\n")

FAILS = """
assert double([1, 2]) == [2, 5]

assert point(1) + 2 == Point(3)

assert 1 in point(1) and False

assert hidden() == hidden()

assert hidden() == 1

assert bag() == ["a", "b"]

hidden().method()

missing()

fail("exit")

assert point(1) < 5

assert point(1) == (1, 0)

list(forever())

def test_it():
    assert False

double(1)

Point(1) @ Point(2)

assert hidden().__eq__ is None and False

len(hidden())

raise SystemExit(1)

int(say)
""".strip().split("\n\n")


@pytest.fixture(scope="module")
def link(tmp_path_factory) -> Iterator[Link]:
    with connected(PROGRAM, tmp_path_factory.mktemp("program")) as link:
        yield link


@pytest.fixture(scope="module")
def space(link) -> dict:
    return space_of(link, NAMES, modules=("numpy",))


def is_passed(link: Link, space: dict, source: str) -> bool:
    link.depth_of_asserts = 0
    functions = ["test_it"] if source.startswith("def test_it") else []
    return run({"source": source, "functions": functions, "classes": []}, dict(space))


@pytest.mark.parametrize("source", PASSES)
def test_a_right_statement_passes(link, space, source):
    assert is_passed(link, space, source) is True
    assert not link.is_lost


@pytest.mark.parametrize("source", FAILS)
def test_a_wrong_statement_fails(link, space, source):
    try:
        passed = is_passed(link, space, source)
    except Exception as error:  # noqa: BLE001 - as `main` does
        passed = isinstance(error, NameError) and "missing" not in source
    assert passed is False
    assert not link.is_lost


UNITTEST = """
import unittest
class Case(unittest.TestCase):
    def test_double(self):
        self.assertEqual(double([1]), [{}])
    def other(self):
        raise ValueError
"""
PYTEST = """
class Case:
    note = 1
    def setup_method(self):
        self.given = [1]
    def test_double(self):
        assert double(self.given) == [{}]
    def other(self):
        raise ValueError
"""


@pytest.mark.parametrize("source", [UNITTEST, PYTEST])
def test_classes_of_tests_are_run(link, space, source):
    def passes(text: str) -> bool:
        try:
            return run({"source": text, "functions": [], "classes": ["Case"]}, dict(space))
        except AssertionError:
            return False

    assert passes(source.format(2)) is True
    assert passes(source.format(3)) is False


def test_a_class_without_tests_does_not_pass(link, space):
    skipped = UNITTEST.format(2).replace(
        "    def test_double", "    @unittest.skip('x')\n    def test_double"
    )
    assert run({"source": skipped, "functions": [], "classes": ["Case"]}, dict(space)) is False


@pytest.mark.parametrize(("ending", "passed"), [("exit(0)", True), ("exit()", True), ("exit(1)", False)])
def test_a_test_may_exit(link, space, ending, passed):
    source = f"import sys; sys.{ending}"
    assert run({"source": source, "functions": [], "classes": []}, dict(space)) is passed


def test_modules_that_exist():
    found = _modules(["nowhere", "np", "math"])
    assert {name: module.__name__ for name, module in found.items()} == {"np": "numpy", "math": "math"}


def test_operators_of_objects_that_the_test_made(link, space):
    Point, point = space["Point"], space["point"]
    for one, other in ((Point(1), 2), (2, Point(1)), (Point(1), Point(2)), (point(1), point(2))):
        assert (one + other).x == 3
    assert type(Point(1) + 2) is type(-Point(1)) is objects.OwnInstance
    assert type(point(1) + point(2)) is type(-point(1)) is objects.Instance
    for wrong in (lambda: point(1) + 2, lambda: 2 + point(1), lambda: point(1) < 2):
        with pytest.raises(TypeError):
            wrong()
    assert 1 in Point(1)
    assert 7 not in Point(1)
    with pytest.raises(AttributeError):
        getattr(space["double"], "nothing")  # noqa: B009
    with pytest.raises(AttributeError):
        getattr(space["double"], "__code__")  # noqa: B009


@contextmanager
def answered(*lines: object) -> Iterator[tuple[Link, int]]:
    """A link to a program that has already written its answers, and where its requests arrive."""
    (reads_asked, asks), (reads_answers, answers) = os.pipe(), os.pipe()
    os.write(answers, b"".join(line if isinstance(line, bytes) else dump(line) for line in lines))
    os.close(answers)
    link = Link(reads_answers, asks)
    try:
        yield link, reads_asked
    finally:
        link._lines.close()
        os.close(asks)
        os.close(reads_asked)


@pytest.mark.parametrize(
    "line",
    [
        b"no JSON\n",
        [1],
        7,
        {},
        {"op": "call"},
        {"op": "call", "value": 1},
        {"value": {"unknown": 1}},
        {"value": {"object": ["opaque", "one", "A", True]}},
        {"value": {"object": ["opaque", 1, 2, True]}},
        {"value": {"object": []}},
        {"value": {"callback": 0}},
        {"value": {"callback": -1}},
        {"value": {"callback": "a"}},
        {"error": []},
        {"error": [1, 2]},
        {"error": [["ValueError"], {"unknown": 1}, {"dict": []}, ""]},
        {"callback": 5, "args": [], "kwargs": {"dict": []}},
        {"callback": 0, "kwargs": {"dict": []}},
        {"callback": "a", "args": [], "kwargs": {"dict": []}},
    ],
    ids=repr,
)
def test_an_answer_that_is_none_ends_everything(line):
    with answered(line, {"value": 1}) as (link, _):
        assert link.is_lost is False
        with pytest.raises(LostError):
            link.apply("len", [1])
        assert link.is_lost is True
        with pytest.raises(LostError):
            link.apply("len", [1])


def test_a_program_that_ended_is_lost():
    with answered() as (link, _), pytest.raises(LostError):
        link.read()


@pytest.mark.parametrize("value", [None, "ab", [], [1], [1, 2, 3], {"dict": []}])
def test_as_many_names_are_answered_as_were_asked(value):
    with answered({"value": value}) as (link, _), pytest.raises(LostError):
        link.names(["a", "b"], [])


def test_an_answer_is_data_and_a_request_a_line():
    with answered({"value": [1]}, {"value": [1, {"missing": None}]}) as (link, asked):
        assert link.apply("len", [1], 2) == [1]
        assert load(os.read(asked, 1000)) == {"op": "apply", "function": "len", "args": [[1], 2]}
        assert link.names(["a", "B"], ["source"]) == {"a": 1}
        assert load(os.read(asked, 1000)) == {"op": "names", "names": ["a", "B"], "sources": ["source"]}


def test_what_iterates_is_an_object_and_its_items_a_list():
    iterator = {"value": {"object": ["iterator", 1, "", True]}}
    for lines in (({"value": [1, 2]},), (iterator, {"value": 5}), (iterator, {"value": {"tuple": [1]}})):
        with answered(*lines) as (link, _), pytest.raises(LostError):
            list(link.iterate([1]))
    chunks = [{"value": [0] * count} for count in (1, 2, 4)]
    with answered(iterator, *chunks, {"value": [], "is_end": True}) as (link, asked):
        assert list(link.iterate([1])) == [0] * 7
        counts = [json.loads(line).get("count") for line in os.read(asked, 10_000).splitlines()]
        assert counts == [None, 1, 2, 4, 8]
    with answered(iterator, *[{"value": []}] * 13, {"value": [], "is_end": True}) as (link, asked):
        assert list(link.iterate([1])) == []
        counts = [json.loads(line).get("count") for line in os.read(asked, 10_000).splitlines()]
        assert counts[10:] == [512, 1024, 1024, 1024, 1024]
    many = -(-MAX_ITEMS // 1024) + 10
    with answered(iterator, *[{"value": []}] * many) as (link, _), pytest.raises(OverflowError):
        list(link.iterate([1]))
    with answered(iterator, *[{"value": []}] * 900, {"value": [], "is_end": True}) as (link, _):
        assert list(link.iterate([1])) == [], "fewer than a million"


def test_errors_of_the_program_are_those_a_test_expects():
    def error(names: list[str], attributes: object = None) -> dict:
        return {"error": [names, [{"tuple": [1]}], attributes or {"dict": [["a", 1]]}, "why"]}

    lines = [
        error(["KeyError", "LookupError", "Exception"]),
        error(["Own", "KeyError", "Exception"]),
        error(["SystemExit", "BaseException", "object"]),
        error(["Strange", "object"]),
        error(["StopIteration", "Exception"]),
        error(["int", "object"]),
    ]
    with answered(*lines) as (link, _):
        for expected, text in (
            (KeyError, r"\(1,\)"),
            (KeyError, r"\(1,\)"),
            (ProgramExit, "1"),
            (RuntimeError, "Strange: why"),
            (Exception, r"\(1,\)"),
            (RuntimeError, "int: why"),
        ):
            with pytest.raises(expected, match=text) as found:
                link.apply("len")
            assert type(found.value) is expected
            assert not hasattr(found.value, "a")


def test_what_a_program_prints_is_shown_to_a_test_that_captures_it(monkeypatch):
    with answered({"printed": "abc", "value": 1}, {"printed": "def", "value": 2}) as (link, _):
        captured = io.StringIO()
        monkeypatch.setattr(sys, "stdout", captured)
        assert link.apply("f") == 1
        assert captured.getvalue() == "abc"
        monkeypatch.setattr(sys, "__stdout__", captured)
        assert link.apply("f") == 2
        assert captured.getvalue() == "abc"


def test_what_is_no_data_is_not_passed():
    with answered() as (link, _):
        mine = type("Mine", (), {"__module__": "__main__"})()
        with pytest.raises(Broken, match="an object of Mine"):
            link.apply("len", mine)
        with pytest.raises(TypeError, match="Theirs is no plain data"):
            link.apply("len", type("Theirs", (), {"__module__": "else"})())
        assert link.is_lost is False


def test_proxies_keep_the_same_object():
    first = {"value": {"object": ["opaque", 1, "A", False]}}
    named = {"value": {"object": ["instance", 2, "Point", True]}}
    with answered(first, first, named, {"value": ["x"]}, named) as (link, _):
        one, other = link.apply("f"), link.apply("f")
        assert one is other
        assert type(one) is objects.Opaque
        assert bool(one) is False
        assert type(link.apply("f")) is objects.Opaque, "a class that the test does not name"
        assert link.names(["Point"], []) == {"Point": "x"}
        assert type(link.apply("f")) is objects.Opaque, "the one that it was"


class Whole(int):
    pass


class Words(str):
    pass


class Table(dict):
    pass


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Whole(3), 3),
        (type("F", (float,), {})(1.5), 1.5),
        (type("C", (complex,), {})(1, 2), 1 + 2j),
        (Words("a"), "a"),
        (type("B", (bytes,), {})(b"a"), b"a"),
        (type("A", (bytearray,), {})(b"a"), bytearray(b"a")),
        (type("L", (list,), {})([1]), [1]),
        (type("T", (tuple,), {})((1, 2)), (1, 2)),
        (type("S", (set,), {})({1}), {1}),
        (type("Z", (frozenset,), {})({1}), frozenset({1})),
        (Table(a=1), {"a": 1}),
        ([Whole(1), {"a": Words("b")}], [1, {"a": "b"}]),
    ],
)
def test_an_object_of_a_builtin_kind_is_data(value, plain):
    returned = decode(Objects(lambda *_: None).encode(value))
    assert (type(returned), returned) == (type(plain), plain)


LOADED = [{"compiles": True}, {"loaded": True}]


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("x = 1", LOADED),
        ("x = ", [{"compiles": False}]),
        ("x = '\0'", [{"compiles": False}]),
        ("1 / 0", [{"compiles": True}, {"loaded": False}]),
        ("raise SystemExit", [{"compiles": True}, {"loaded": False}]),
        ("x: Undefined = 1", [{"compiles": True}, {"loaded": False}]),
        (
            "assert __name__ == 'solution' and __file__.endswith('program.py')",
            LOADED,
        ),
        (
            "import sys; assert sys.modules['solution'].__dict__ is globals()",
            LOADED,
        ),
        ("a = Counter(deque([math.pi, gcd(4, 6)]))", LOADED),
        ("def f(): return (lambda: sqrt(4))()\nf()", LOADED),
        ("assert pow(2, 3, 5) == 3 and sum([1]) == 1 and sqrt", LOADED),
        (
            "def f(n): return n and 1 + f(n - 1)\nassert f(5000) == 5000",
            LOADED,
        ),
    ],
)
def test_a_program_says_whether_it_compiles_and_loads(source, told, tmp_path):
    (tmp_path / "program.py").write_text(source)
    reads, writes = os.pipe()
    nothing = os.open(os.devnull, os.O_RDONLY)
    limit, module = sys.getrecursionlimit(), sys.modules.get("solution")
    program = LoadedProgram(nothing, writes, cpu_s=100.0, wall_s=100.0)
    try:
        assert program.load(str(tmp_path / "program.py")) is (told[-1].get("loaded") is True)
        clocks = (signal.getitimer(signal.ITIMER_PROF), signal.getitimer(signal.ITIMER_REAL))
        assert clocks == ((0.0, 0.0), (0.0, 0.0)) or told[-1] != {"loaded": True}
    finally:
        program._stop_clocks()
        sys.setrecursionlimit(limit)
        sys.modules.pop("solution", None)
        if module is not None:
            sys.modules["solution"] = module
        os.close(writes)
        program._lines.close()
    with open(reads, "rb") as answers:
        assert [load(line) for line in answers] == told


ENTRIES = """
def own(x): return [x, 1]
class Solution:
    def method(self, x, y=1): return x + y
    def own(self, x): return "never"
"""


def test_an_entry_is_a_function_or_a_method_of_a_solution(tmp_path):
    with connected(ENTRIES, tmp_path) as link:
        for function, args, kwargs, value in (
            ("own", [3], [], [3, 1]),
            ("method", [3], [["y", 4]], 7),
            ("method", [3], [], 4),
        ):
            asked = {"op": "entry", "function": function, "args": args, "kwargs": {"dict": kwargs}}
            assert link._value(link._ask(asked)) == value
        with pytest.raises(AttributeError):
            link._value(link._ask({"op": "entry", "function": "no", "args": [], "kwargs": {"dict": []}}))
    with connected("def own(x): return x", tmp_path) as link, pytest.raises(KeyError):
        link._value(link._ask({"op": "entry", "function": "no", "args": [], "kwargs": {"dict": []}}))


def test_each_answer_brings_what_was_printed_since_the_last(tmp_path, monkeypatch):
    source = "def say(text, n=1):\n    print(text * n)\n    return 1\ndef quiet(): return 2"
    with connected(source, tmp_path, is_heard=True) as link:
        say, quiet = (link.named(tree) for tree in link.names(["say", "quiet"], []).values())
        monkeypatch.setattr(sys, "__stdout__", sys.stdout)  # both sides have one: no test captures it
        asked = {"op": "call", "target": {"ref": say._number}, "kwargs": {"dict": []}, "keeps": False}
        printed = [link._ask({**asked, "args": args}).get("printed") for args in (["abc"], ["d"])]
        assert printed == ["abc\n", "d\n"]
        many = link._ask({**asked, "args": ["a", 100_000]})["printed"]
        assert many == "a" * MAX_PRINTED
        assert 1000 < MAX_PRINTED < 10**6
        assert "printed" not in link._ask({**asked, "target": {"ref": quiet._number}, "args": []})
    with connected(source, tmp_path) as link:
        (say,) = (link.named(tree) for tree in link.names(["say"], []).values())
        asked = {"op": "call", "target": {"ref": say._number}, "kwargs": {"dict": []}, "keeps": False}
        assert link._ask({**asked, "args": ["abc"]}) == {"value": 1}


def test_classes_of_a_test_are_defined_beside_the_program(tmp_path):
    sources = ("import nowhere", "import math", "class Node:\n    size = math.pi")
    with connected("def size(node): return node.size", tmp_path) as link:
        space = space_of(link, ["size", "Node"], sources=sources)
        assert abs(space["size"](space["Node"]()) - 3.14159) < 1e-5


@pytest.mark.parametrize("kind", ["NamedFunction", "Instance", "OwnInstance"])
def test_hidden_names_of_an_object_are_never_asked_of_the_program(kind):
    """Python looks for them by itself, as `__deepcopy__` where a value is copied."""
    asked = []

    class Recording:
        def apply(self, function, *args):
            asked.append((function, args[1]))
            return 7

    thing = getattr(objects, kind)(Recording(), 1, "Thing", True)
    with pytest.raises(AttributeError, match="__deepcopy__"):
        thing.__deepcopy__  # noqa: B018
    assert asked == []
    assert thing.value == 7
    assert asked == [("getattr", "value")]
