"""Ground truths of programs in every form, and when an output is the expected one."""

from __future__ import annotations

import json
import math
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.extras.sandbox.code_cases import (
    MAX_NUMBER_CHARS,
    Cases,
    equal_texts,
    equal_values,
    extract_code,
    is_expected,
    read_cases,
)

PAIR = {"inputs": ["1"], "outputs": ["2"]}
CALL = {"fn_name": "f", "inputs": [[1]], "outputs": [2]}


@pytest.mark.parametrize(
    ("truth", "cases"),
    [
        (PAIR, Cases(None, ("1",), ("2",))),
        (json.dumps(PAIR), Cases(None, ("1",), ("2",))),
        ({"inputs": ([1, 2], 3), "outputs": (("a", "b"), 4)}, Cases(None, ("1\n2", "3"), ("a\nb", "4"))),
        (CALL, Cases("f", ([1],), (2,))),
        (
            {**CALL, "inputs": ['1\n\n"a"\n', "[2]"], "outputs": ["[3]", "so"]},
            Cases("f", ([1, "a"], [[2]]), ([3], "so")),
        ),
        ({**CALL, "inputs": ["1"], "outputs": [[2]]}, Cases("f", ([1],), ([2],))),
        ({**CALL, "outputs": ["[3]"]}, Cases("f", ([1],), ("[3]",))),
        ({"assert_case": "assert f()"}, Cases(asserts=("assert f()",))),
        ({"test": ["assert f()", "g()"]}, Cases(asserts=("assert f()", "g()"))),
        ({"test": "g()", "entry_point": "f"}, Cases(asserts=("g()\n\ncheck(f)",))),
        ({"assert_case": [], "test": "g()"}, Cases(asserts=("g()",))),
        ({"assert_case": [], **PAIR}, Cases(None, ("1",), ("2",))),
        ({**PAIR, "fn_name": None, "tolerance": 0}, Cases(None, ("1",), ("2",), tolerance=0)),
        ({**PAIR, "tolerance": 0.5}, Cases(None, ("1",), ("2",), tolerance=0.5)),
        ({**CALL, "tolerance": 0.999}, Cases("f", ([1],), (2,), tolerance=0.999)),
    ],
)
def test_each_form_of_a_ground_truth(truth, cases):
    assert read_cases(truth) == cases
    assert len(cases) == max(len(cases.inputs), len(cases.asserts))


@pytest.mark.parametrize(
    ("truth", "told"),
    [
        ("{", "it is not valid JSON"),
        ("[" * 100_000, "it is not valid JSON"),
        ("[]", "it must be a mapping"),
        (None, "it must be a mapping"),
        ({}, "it must have `inputs` and `outputs`"),
        ({"inputs": ["1"]}, "it must have `inputs` and `outputs`"),
        ({"outputs": ["1"]}, "it must have `inputs` and `outputs`"),
        ({"inputs": "1", "outputs": ["2"]}, "it must have `inputs` and `outputs`"),
        ({"inputs": ["1"], "outputs": "2"}, "it must have `inputs` and `outputs`"),
        ({"inputs": 1, "outputs": [2]}, "it must have `inputs` and `outputs`"),
        ({"inputs": [1], "outputs": {"2": 2}}, "it must have `inputs` and `outputs`"),
        ({"inputs": [], "outputs": []}, "0 inputs and 0 outputs"),
        ({"inputs": ["1", "2"], "outputs": ["2"]}, "2 inputs and 1 outputs"),
        ({"test": ["assert 1", 2]}, "must be a list of Python code strings"),
        ({**CALL, "inputs": ["one"]}, r"must have JSON on each line .*'one'"),
        ({**CALL, "inputs": ["[" * 100_000]}, "must have JSON on each line"),
        ({**CALL, "inputs": [1]}, "must be a list of arguments"),
        *(({**PAIR, "tolerance": t}, "`tolerance` must be") for t in (1, 1.5, -0.1, True, False, "0.1")),
    ],
)
def test_what_is_no_ground_truth_is_refused(truth, told):
    with pytest.raises(ValueError, match=told):
        read_cases(truth)


@pytest.mark.parametrize(
    ("returned", "expected", "is_equal"),
    [
        ("a", "a", True),
        ("a", "b", False),
        ("1", 1, False),
        (1, "1", False),
        (b"a", "a", False),
        ([], "", False),
        (None, None, True),
        (None, False, False),
        (None, 0, False),
        (0, None, False),
        (0, False, False),
        (True, 1, False),
        (True, True, True),
        (1.0, 1, True),
        (1, 1.0, True),
        (2, 1.0, False),
        ([1, 2], [1, 3], False),
        ([1, 2], [2, 2], False),
        ([1], [1, 1], False),
        ((1, 2), [1, 2], True),
        ([], [], True),
        ({"a": 1, "b": 2}, {"a": 1, "b": 2}, True),
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}, False),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({"a": 1, "b": 2}, {"a": 1}, False),
        ([], {}, False),
        ({True: 1, 2.5: 1, None: 1}, {"true": 1, "2.5": 1, "null": 1}, True),
        ({(1, 2): 1}, {"[1, 2]": 1}, False),
        (math.nan, math.nan, True),
        (1.0, math.nan, False),
        (math.nan, 1.5, False),
        (math.inf, math.inf, True),
        (-math.inf, math.inf, False),
        (1.0, math.inf, False),
        (math.inf, 1.5, False),
        (math.nan, math.inf, False),
        (10**400, 1.5, False),
    ],
)
def test_values_by_hand(returned, expected, is_equal):
    assert equal_values(returned, expected) is is_equal
    assert is_expected(returned, expected) is is_equal
    assert equal_values([returned], [expected]) is is_equal
    assert is_expected(returned, [expected]) is is_equal or isinstance(returned, list)


@pytest.mark.parametrize(
    ("returned", "expected", "is_right"),
    [(2, [2], True), (2, (2,), True), (3, [2], False), (2, [2, 2], False), ([2], 2, False)],
)
def test_the_expected_value_may_be_wrapped_in_a_list(returned, expected, is_right):
    assert is_expected(returned, expected) is is_right


@given(
    st.floats(1.5, 1e6).filter(lambda x: not x.is_integer()),
    st.sampled_from([None, 0, 1e-3, 0.25]),
    st.sampled_from([0.5, 2.0]),
    st.sampled_from([1, -1]),
)
def test_other_numbers_are_right_up_to_the_tolerance(number, tolerance, part, sign):
    allowed = 1e-9 if tolerance is None else tolerance
    near = number * (1 + sign * part * allowed)
    is_right = near == number or part < 1
    assert equal_values(near, number, tolerance) is is_right
    assert equal_texts(repr(near), repr(number), tolerance) is is_right
    assert equal_values(near, int(number), tolerance) is False
    assert equal_values({"a": [near]}, {"a": [number]}, tolerance) is is_right
    assert is_expected(near, [number], tolerance) is is_right


@pytest.mark.parametrize(
    ("printed", "expected", "tolerance", "is_equal"),
    [
        ("0.009", "0.0", 0.01, True),
        ("0.02", "0.0", 0.01, False),
        ("99.5", "100.0", 0.01, True),
        ("99.5", "1e2", 0.01, True),
        ("99.5", "100", 0.01, False),
        ("1e2", "100", None, True),
        ("99.9999999999", "1E2", None, False),
        ("+.5", "0.5", None, True),
        ("1e999", "1.5", 0.5, False),
        ("1.5", "1e999", 0.5, False),
        ("a 1", "a 1.0", None, True),
        ("b 1", "a 1.0", None, False),
        ("0." + "1" * 50, "0." + "1" * 49 + "2", None, True),
        ("0." + "1" * 500, "0." + "1" * 499 + "2", None, False),
        ("1 2", "1", None, False),
        ("1\n2", "1\n3", None, False),
        ("1\n2", "2\n2", None, False),
        ("1", "one", None, False),
        ("one", "1", None, False),
        ("", "1", None, False),
    ],
)
def test_outputs_by_hand(printed, expected, tolerance, is_equal):
    assert equal_texts(printed, expected, tolerance) is is_equal


def test_a_word_is_a_number_up_to_a_length():
    longest = "0." + "1" * (MAX_NUMBER_CHARS - 2)
    assert equal_texts(longest, f"{longest[:-1]}2")
    assert not equal_texts(longest, f"{longest}1")
    assert not equal_texts(f"{longest}1", longest)
    assert equal_texts(f"{longest}1", f"{longest}1")


@given(st.integers(-(10**30), 10**30), st.integers(-3, 3))
def test_integers_are_exact_in_both_forms(number, other):
    written = str(number + other)
    assert equal_values(number + other, number, 0.5) is (other == 0)
    assert equal_texts(written, str(number), 0.5) is (other == 0)
    assert equal_texts(f"{Decimal(written)}.0", str(number)) is (other == 0)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```\ntext\n```\nb\n```", "a\n"),
        ("```python\na\n```\n``` Python3 \nb\n```\n```bash\nc\n```", "b\n"),
        ("```\na\n```\n```\nb\n```\n```bash\nc\n```", "b\n"),
        ("```{.python .numberLines}\na\n```\n```\nb\n```", "a\n"),
        ("```cpp\na\n```\n```bash\nb\n```", "b\n"),
        ("```py\na", "a"),
        ("~~~\na\n```\nb\n~~~", "a\n```\nb\n"),
        ("  ```python\n  a\n  ```", "  a\n"),
        ("no code, only `this`", None),
        ("```python\n```", ""),
        pytest.param("`" * 300_000, None, id="a line of backticks"),
        pytest.param("~~~\n" + "`" * 300_000, "`" * 300_000, id="a line of backticks in a block"),
    ],
)
def test_the_last_block_of_python_is_the_answer(text: str, code: str | None) -> None:
    assert extract_code(text) == code


@pytest.mark.parametrize(
    ("printed", "expected", "is_equal"),
    [
        ("1 2\n", "1   2", True),
        ("1\n2", "1 2", False),
        ("0.3333333333", "0.33333333331", True),
        ("0.33333333", "0.33333333331", False),
        ("1e18", "1000000000000000007", False),
        ("1e18", "1000000000000000000", True),
        ("1234567.9", "1234567", False),
        ("1234567.0000001", "1234567", False),
        ("5", "5.0", True),
        ("5.0000000001", "5.0", False),
        ("1_000", "1000", False),
        ("1" * 70, "1" * 69 + "2", False),
        ("1e999999", "1e999998", False),
        ("0.333", "0.334", False),
        ("3.0", "3", True),
        ("9007199254740993", "9007199254740992", False),
        ("Yes", "yes", False),
        ("a\n\n\n", "a", True),
        ("", "", True),
        ("\n5", "5", True),
        ("5", "\n \n5", True),
        ("a\n\nb", "a\nb", False),
        ("a b\nc", "a b\r\nc\r\n", True),
        ("", "0", False),
        ("nan", "nan", True),
        ("inf", "1e999", False),
    ],
)
def test_outputs_are_compared_word_by_word(printed: str, expected: str, is_equal: bool) -> None:
    assert equal_texts(printed, expected) == is_equal


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3),
        max_leaves=6,
    )
)
def test_a_value_equals_itself_and_nothing_it_is_not(value) -> None:
    assert equal_values(value, value)
    assert is_expected(value, value)
    assert not equal_values(value, [value])
    assert not equal_values([value, value], [value])


def test_true_is_not_one_and_close_numbers_are_equal() -> None:
    assert not equal_values(True, 1)
    assert not equal_values(10**400, 1.0)
    assert equal_values(0.1 + 0.2, 0.3)
    assert equal_values({"a": [1.0]}, {"a": [1]})
    assert equal_values({1: (2, 3), None: 4}, {"1": [2, 3], "null": 4})
    assert not equal_values({1: 2, "1": 3}, {"1": 3})
    assert not equal_values({1, 2}, [1, 2])


def test_integers_are_exact_and_other_numbers_within_the_tolerance() -> None:
    assert not equal_values(1e18, 1000000000000000007)
    assert equal_values(1e18, 10**18)
    assert not equal_values(1234567.9, 1234567)
    assert not equal_values(0.1 * (1 + 4e-7), 0.1)
    assert equal_values(0.1 * (1 + 4e-10), 0.1)
    assert equal_values(0.1 * (1 + 4e-7), 0.1, tolerance=1e-6)
    assert not equal_values(1e-12, 0.0)
    assert equal_values(1e-12, 0.0, tolerance=1e-9)
    assert not equal_values(10**400, 0.5, tolerance=1e-6)
    assert not equal_values(3.0000001, 3, tolerance=1e-6)
    assert equal_texts("0.3334", "0.3333", tolerance=1e-3)
    assert not equal_texts("3.0001", "3", tolerance=1e-3)


@given(st.text(max_size=200))
def test_any_text_is_a_ground_truth_or_refused(text: str) -> None:
    try:
        cases = read_cases(text)
    except ValueError:
        return
    assert len(cases) > 0
