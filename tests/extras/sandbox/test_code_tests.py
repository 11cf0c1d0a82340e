"""What is read from a test written in Python: its calls, the names that it takes from the program, and what
only a test runner would call.
"""

from __future__ import annotations

import ast

import pytest

from agentrl.extras.sandbox.code_tests import (
    FunctionCall,
    Suite,
    join_setups,
    read_call,
    read_suite,
    read_tests,
)

USE = "assert f(1) == 1"


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("assert f(1, k=2) == 3", FunctionCall("f", (1,), {"k": 2}, 3)),
        ("assert 3 == f([1])", FunctionCall("f", ([1],), {}, 3)),
        ("assert 1 == 2", None),
        ("assert f(1) == g(1)", None),
        ("assert f(1) != 1", None),
        ("assert f(1).a == 1", None),
        ("assert m.f(1) == 1", None),
        ("assert f(g(1)) == 1", None),
        ("assert len([1]) == 1", None),
        ("assert f(**{'k': 1}) == 1", None),
        ("assert f(k=1, **{}) == 1", None),
        ("f(1)", None),
        ("", None),
    ],
)
def test_a_call_is_one_assertion_of_literals(text, call):
    assert read_call(text) == call


def test_calls_are_made_only_if_all_tests_are_calls():
    assert read_tests((USE, "assert f(2) == 2")) == tuple(FunctionCall("f", (n,), {}, n) for n in (1, 2))
    suite = read_tests((USE, "assert f(2) > 1"))
    assert isinstance(suite, Suite)
    assert len(suite.cases) == 2


@pytest.mark.parametrize(
    ("pieces", "joined"),
    [
        (("x = 1", USE), (f"x = 1\n{USE}",)),
        (("x = 1",), ("x = 1",)),
        ((USE, "x = 1"), (USE, "x = 1")),
        (("import a", "'doc'", "x: int = 1", USE), (f"import a\n'doc'\nx: int = 1\n{USE}",)),
        ((USE, "def test_it(): f()", USE), (USE, "def test_it(): f()", USE)),
        (("def helper(): f()", USE), (f"def helper(): f()\n{USE}",)),
        (("class TestIt:\n    def test_a(self): f()", USE), None),
        (("class Node: pass", USE), (f"class Node: pass\n{USE}",)),
        (("print(1)", USE), None),
        (("x += 1", USE), None),
    ],
)
def test_what_runs_nothing_is_part_of_the_next_piece(pieces, joined):
    assert join_setups(pieces) == (joined or pieces)


@pytest.mark.parametrize(
    ("pieces", "names", "modules"),
    [
        ([USE], "f", ""),
        (["assert f(g)", "assert g(h)"], "f g h", ""),
        (["y = f(1)\nprint(y)", "assert y == x and len([y]) == 1"], "f x", ""),
        (["import f\nassert f(i)", "from a import g, k as h\nassert g(h(2)) == k"], "i k", ""),
        (["def helper(x): return f(x)\nassert helper(1)", "assert helper(g)"], "f g", ""),
        (["assert all(f(x) for x in xs)", "assert (lambda y: y + z)(1)"], "f xs z", ""),
        (["def run():\n    global out\n    out = f()\nrun()\nassert out"], "f", ""),
        (["def run():\n    local = f()\n    local += g()\n    return local\nrun()"], "f g", ""),
        (["class TestA:\n    size = f()\n    def test_a(self): assert self.size == size"], "f size", ""),
        (["assert math.isclose(f(1), 1)"], "f", "math"),
        (["assert np.sum(f(1)) == pd.NA"], "f", "np pd"),
        (["assert random(math.pi) == f(1)"], "f random", "math"),
        (["assert copy(1) == copy.copy"], "copy", ""),
        (["assert mine.f(1) == 1"], "mine", ""),
        (["import math\nassert math.pi == f(1)"], "f", ""),
        (["from solution import f, g as h\nassert f(1) == h(1)"], "f g", ""),
        (["from solution import sum\nassert sum([f(1)]) == 1"], "f sum", ""),
        (["from solution import *\nassert f(1)"], "f", ""),
        (["from elsewhere import g\nassert g(1) == f(1)"], "f", ""),
        (["class Node: pass\nassert f(Node())"], "f Node", ""),
        (["def check(candidate): assert candidate(1) == 1\ncheck(f)"], "f", ""),
        (["def check(candidate): assert candidate(1) == 1\ncheck(sum)"], "sum", ""),
        (["def check(candidate): assert candidate([1], k) == len('a')\ncheck(sum)"], "k sum", ""),
        (["assert str([1]) == '[1]'"], "str", ""),
        (["assert f(1) == sum([1])"], "f", ""),
        (["assert 1\nx = 1", "assert sum([x]) == 1"], "", ""),
        (["expected = 1\nassert sum([1]) == expected"], "sum", ""),
        (["'a'.upper()\nassert 'a'.upper() == 'A'"], "", ""),
        (["sum([1])"], "", ""),
    ],
)
def test_names_are_the_programs_unless_the_test_has_them(pieces, names, modules):
    """Names of builtins are the program's only where the test can mean no other."""
    suite = read_suite(pieces)
    assert set(suite.names) == set(names.split())
    assert set(suite.modules) == set(modules.split())
    assert len(suite.cases) == len(pieces)


@pytest.mark.parametrize(
    ("text", "functions", "classes"),
    [
        (USE, (), ()),
        ("def test_a(): f()\ndef test_b(x=1): f()\ndef helper(x): pass\ny = 1", ("test_a", "test_b"), ()),
        ("def test_a(): f()\ntest_a()", (), ()),
        ("'doc'\nimport a\nx: int = 1\ndef test_a(): f()", ("test_a",), ()),
        ("class TestA:\n    def test_a(self): f()", (), ("TestA",)),
        ("class testing:\n    def test_a(self): assert f()", (), ("testing",)),
        ("class A(unittest.TestCase):\n    def test_a(self): f()", (), ("A",)),
        ("class A(TestCase): pass", (), ("A",)),
        ("class Shape:\n    def test_a(self): assert f()", (), ("Shape",)),
        ("class TestData: x = 1\ndef test_a(): f()", ("test_a",), ()),
        ("class TestData: x = 1\nclass A(TestCase): pass", (), ("A",)),
    ],
)
def test_what_only_a_runner_would_call_is_called(text, functions, classes):
    (case,) = read_suite([text]).cases
    assert (case.functions, case.classes) == (functions, classes)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("def test_a(x): f(x)", "function test_a of a test needs pytest"),
        ("def test_a(): f()\ndef test_b(x, y=1): f(x)", "function test_b of a test needs pytest"),
        ("@given(1)\ndef test_a(): f()", "function test_a of a test needs pytest"),
        ("@given(1)\ndef test_a(x): f()", "function test_a of a test needs pytest"),
        ("x = f()", "a test runs nothing"),
        ("def helper(): f()", "a test runs nothing"),
        ("class TestData: x = 1", "a test runs nothing"),
        ("class Node: pass", "a test runs nothing"),
        ("", "a test runs nothing"),
        ("assert f(", "a test is not valid Python"),
        ("assert f('\0')", "a test is not valid Python"),
    ],
)
def test_a_test_that_cannot_run_is_refused(text, told):
    with pytest.raises(ValueError, match=told):
        read_suite([text])


@pytest.mark.parametrize(
    ("text", "source"),
    [
        (
            "assert f(1)\nself.assertEqual(f(1), 1)\nassert_that(f(1))\nf(1)\nx.f(1)\nx\nassertion",
            "with _asserting:\n    assert f(1)\nwith _asserting:\n    self.assertEqual(f(1), 1)\n"
            "with _asserting:\n    assert_that(f(1))\nf(1)\nx.f(1)\nx\nassertion",
        ),
        ("if x:\n    assert y, 'why'", "if x:\n    with _asserting:\n        assert y, 'why'"),
        ("x = 1\nfrom main import f as g, h\ng(h)", "g = f\nx = 1\ng(h)"),
        ("import solution\nsolution.f()", "import solution\nsolution.f()"),
        ("class Node: pass\nf(Node)", "f(Node)"),
        ("class NODE: pass\nclass node: pass\nf(node)", "class node: pass\nf(node)"),
    ],
)
def test_a_piece_runs_as_it_was_written_except_for(text, source):
    """Assertions are marked; the program's imports are names, and its classes are defined beside it."""
    (case,) = read_suite([text]).cases
    assert case.source == ast.unparse(ast.parse(source))


def test_classes_whose_objects_the_program_gets_are_defined_there():
    node = "class Node:\n    size = math.pi"
    suite = read_suite([f"import math\nfrom a import b\ny = 1\n{node}\nf(Node())", "import os\nf(os)"])
    assert suite.sources == ("import math", "from a import b", node)
    assert read_suite(["class TestA:\n    def test_a(self): f()"]).sources == ()
