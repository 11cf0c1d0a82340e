"""The reward `code`: right and wrong programs, in each form of test case, and programs that would rather not
be tested.
"""

from __future__ import annotations

import json
import os

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError, DataError, RewardError, SandboxError
from agentrl.extras.sandbox import Sandbox
from agentrl.extras.sandbox.code_cases import equal_values
from agentrl.extras.sandbox.code_reward import Code
from agentrl.extras.sandbox.code_tests import FunctionCall, join_setups, read_call, read_suite
from agentrl.extras.sandbox.inside import plain_data
from agentrl.extras.sandbox.inside.checker import Link
from agentrl.plugins import Attempted, load_plugins
from parts.cpu_time import cpu_s
from parts.trajectories import attempted, make_task

SUM = {"inputs": ["1 2", "3 4\n", "10 -3"], "outputs": ["3", "7\n", "7 "]}
DOUBLE = {"fn_name": "double", "inputs": [[1], [2], [[1, 2]]], "outputs": [2, 4, [1, 2, 1, 2]]}


def attempt(answer: str, ground_truth) -> Attempted:
    return attempted(make_task("Write it.", ground_truth), answer)


def score(code: str, ground_truth, **config):
    reward = Code({"wall_s": 60.0, "total_s": 200.0, **config})
    return trio.run(reward.score, attempt(f"Here it is:\n```python\n{code}\n```\nDone.", ground_truth))


ADD = "a, b = map(int, input().split())\nprint(a + b)"


@pytest.mark.parametrize(
    ("code", "truth"),
    [
        (ADD, SUM),
        (ADD, json.dumps(SUM)),
        (ADD, {"inputs": [["1 2"]], "outputs": [["3"]]}),
        ("def double(x):\n    return x * 2", DOUBLE),
        ("class Solution:\n    def double(self, x):\n        return x * 2", DOUBLE),
        (
            "def double(x):\n    print('noise')\n    return x * 2",
            {**DOUBLE, "outputs": [[2], [4], [[1, 2, 1, 2]]]},
        ),
        ("def f(x): return x", {"assert_case": ["assert f(1) == 1", "assert f('a') == 'a'"]}),
        (
            "def f(x): return x",
            {"test": "def check(candidate):\n    assert candidate(1) == 1", "entry_point": "f"},
        ),
        ("def double(x): return (x * 2,)", {"fn_name": "double", "inputs": [[1]], "outputs": [[2]]}),
    ],
)
def test_a_right_program_earns_one(code: str, truth) -> None:
    result = score(code, truth)
    assert result.value == 1.0
    assert result.metrics["accuracy"] == result.metrics["passed"] == result.metrics["compiles"] == 1.0


@pytest.mark.parametrize(
    ("code", "truth", "share"),
    [
        ("print(3)", SUM, 1 / 3),
        ("print(input() and 7)", SUM, 2 / 3),
        ("def double(x): return x + x if x != 2 else 5", DOUBLE, 2 / 3),
        ("def double(x): return x * 2 if x != 1 else 1 / 0", DOUBLE, 2 / 3),
        ("import os\ndef double(x): return x * 2 if x != 1 else os._exit(0)", DOUBLE, 2 / 3),
        ("def f(x): return 1", {"assert_case": ["assert f(1) == 1", "assert f(2) == 2"]}, 1 / 2),
    ],
)
def test_otherwise_the_share_or_nothing(code: str, truth, share: float) -> None:
    result = score(code, truth)
    assert result.value == pytest.approx(share)
    assert result.metrics["accuracy"] == 0.0
    assert score(code, truth, continuous=False).value == 0.0


@pytest.mark.parametrize(
    ("code", "truth"),
    [
        ("def double(x): return", DOUBLE),
        ("def other(x): return x", DOUBLE),
        ("import os\nos._exit(0)", DOUBLE),
        ("import sys; sys.exit(0)", {"test": "assert f(1) == 1"}),
        ("import os; os._exit(0)", {"assert_case": ["assert f(1) == 1"]}),
        ("raise SystemExit", {"test": "assert f(1) == 1"}),
        ("print('{\"value\": 2}')\nimport os\nos._exit(0)", DOUBLE),
        ("class Any:\n    def __eq__(self, other): return True\ndef double(x): return Any()", DOUBLE),
    ],
)
def test_a_program_that_avoids_its_test_earns_nothing(code: str, truth) -> None:
    assert score(code, truth).value == 0.0


def test_no_program_and_no_python() -> None:
    nothing = trio.run(Code({}).score, attempt("I cannot.", SUM))
    broken = score("def f(:", SUM)
    assert (nothing.value, nothing.metrics["compiles"]) == (0.0, 0.0)
    assert (broken.value, broken.metrics["compiles"], broken.metrics["num_cases"]) == (0.0, 0.0, 3.0)


def test_a_program_that_does_not_end_is_wrong_and_not_an_error() -> None:
    result = score("while True: pass", SUM, cpu_s=1.0, total_s=1.0)
    assert result.value == 0.0
    assert result.metrics["timeouts"] == 1
    looping = score("def double(x):\n    while x == 2: pass\n    return x * 2", DOUBLE, cpu_s=0.3)
    assert looping.value == pytest.approx(2 / 3)


def test_cases_beyond_the_first_ones_count_until_one_fails() -> None:
    truth = {"inputs": [[n] for n in range(20)], "outputs": list(range(20)), "fn_name": "f"}
    assert score("def f(n): return n", truth, max_cases=4).value == 1.0
    late = score("def f(n): return n if n < 7 else -1", truth, max_cases=4)
    assert (late.value, late.metrics["num_cases"]) == (7 / 8, 8.0)
    early = score("def f(n): return n if n != 1 else -1", truth, max_cases=4)
    assert (early.value, early.metrics["num_cases"]) == (3 / 4, 4.0)


def test_the_expected_values_are_nowhere_to_be_read() -> None:
    code = """
import gc, os, sys
def f(n):
    seen = [text for folder, _, names in os.walk('/work') for name in names for text in open(os.path.join(folder, name))]
    seen += [repr(thing)[:10**4] for thing in gc.get_objects() if isinstance(thing, (str, dict, list))]
    return 987654321 if any('9876' + '54321' in text.replace(code, '') for text in seen) else 0
code = '987654321 if any'
"""  # noqa: E501
    assert score(code, {"fn_name": "f", "inputs": [[1]], "outputs": [987654321]}).value == 0.0


def test_a_broken_sandbox_is_an_error_and_never_a_zero(monkeypatch) -> None:
    async def broken(self, program) -> None:
        raise SandboxError("no more processes")

    monkeypatch.setattr(Sandbox, "run", broken)
    with pytest.raises(RewardError, match="reward 'code': no more processes"):
        score(ADD, SUM)


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        ("3", "must be a mapping"),
        ("{", "is not valid JSON"),
        ({}, "must have `inputs` and `outputs`"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"inputs": [], "outputs": []}, "0 inputs and 0 outputs"),
        ({"inputs": [1], "outputs": [1], "fn_name": "f"}, "must be a list of arguments"),
        ({"assert_case": [1]}, "list of Python code strings"),
    ],
)
def test_a_task_without_cases_is_refused_before_any_rollout(truth, message: str) -> None:
    with pytest.raises(DataError, match=f"task t:0: reward 'code': reward_model.ground_truth: .*{message}"):
        Code({}).check(make_task("Write it.", truth))


def test_a_good_task_is_accepted_and_the_reward_is_registered() -> None:
    Code({}).check(make_task("Write it.", SUM))
    assert load_plugins().rewards.get("code") is Code


@pytest.mark.parametrize("config", [{"continuous": 1}, {"max_cases": 0}, {"total_s": "x"}, {"timeout": 3}])
def test_a_wrong_config_is_refused(config: dict) -> None:
    with pytest.raises(ConfigError, match=r"reward\.reward_config\.code"):
        Code(config)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(2**62, 2**90)
    | st.floats(allow_nan=False)
    | st.text(max_size=3)
    | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


def no_object(value) -> None:
    raise TypeError(value)


@given(PLAIN)
def test_plain_data_arrives_with_its_types(value) -> None:
    arrived = plain_data.decode(plain_data.load(plain_data.dump(plain_data.encode(value, no_object))))
    assert repr(arrived) == repr(value)


@given(
    st.binary(max_size=60)
    | st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(sorted(plain_data._READERS)), inner, max_size=1)
        ),
        max_leaves=8,
    ).map(plain_data.dump)
)
def test_whatever_a_program_says_is_data_or_unreadable(line: bytes) -> None:
    try:
        value = plain_data.decode(plain_data.load(line))
    except plain_data.UNREADABLE:
        return
    assert type(value).__module__ in {
        "builtins",
        "collections",
        "datetime",
        "decimal",
        "fractions",
        "numpy",
    }, value


@pytest.mark.parametrize(
    "tree",
    [
        {"fractions.Fraction": ["1e99999999", None]},
        {"fractions.Fraction": [{"int": hex(3**200_000)}, {"int": hex(7**100_000)}]},
        {"set": [number * (2**61 - 1) for number in range(1, 20_000)]},
        {"frozenset": [{"tuple": [number * (2**61 - 1)]} for number in range(1, 20_000)]},
        {"dict": [[number * (2**61 - 1), 0] for number in range(1, 20_000)]},
        {"collections.Counter": [[-number * (2**61 - 1), 0] for number in range(1, 20_000)]},
    ],
)
def test_what_takes_long_to_read_is_unreadable(tree) -> None:
    def read() -> None:
        with pytest.raises(plain_data.UNREADABLE):
            plain_data.decode(tree)

    assert cpu_s(read, below=0.5) < 0.5


@given(
    st.sets(
        st.integers(-(2**70), 2**70) | st.text() | st.none() | st.tuples(st.floats(allow_nan=False)),
        max_size=200,
    )
)
def test_usual_sets_arrive(value) -> None:
    assert plain_data.decode(plain_data.load(plain_data.dump(plain_data.encode(value, no_object)))) == value


def test_pieces_that_run_nothing_belong_to_the_next_one() -> None:
    setup, uses, test = "import math\nx = 3", "assert f(x) == 3", "def test_g():\n    assert g(x)"
    assert join_setups((setup, uses, "y = 4", setup, test)) == (f"{setup}\n{uses}", f"y = 4\n{setup}\n{test}")
    suite = read_suite(
        ("expected, total = 3, 4", uses, "assert f(2) == expected", "assert sum([x]) == total")[1:]
    )
    assert set(suite.names) == {"f", "x", "expected", "total"}
    suite = read_suite(join_setups(("x, expected = 3, 3", uses, "assert f(2) == expected")))
    assert set(suite.names) == {"f"}
    suite = read_suite(["total = f(1)\nassert total", "assert len(total) == 3"])
    assert set(suite.names) == {"f"}


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("assert f(1, [2], k=(3,)) == {4}", FunctionCall("f", (1, [2]), {"k": (3,)}, {4})),
        ("assert -1 == f()", FunctionCall("f", (), {}, -1)),
        ("assert (f(set())) == 'a', 'message'", FunctionCall("f", (set(),), {}, "a")),
        ("assert f(x) == 1", None),
        ("assert sum([1]) == 1", None),
        ("assert f(1) == 1 == g(1)", None),
        ("assert f(*[1]) == 1", None),
        ("assert f(1) is True", None),
        ("x = 1\nassert f(1) == 1", None),
    ],
)
def test_an_assertion_is_a_call_where_it_is_no_more(text: str, call: FunctionCall | None) -> None:
    assert read_call(text) == call


def test_a_suite_takes_from_the_program_what_the_test_does_not_have() -> None:
    suite = read_suite(
        [
            "import math\nx = 3\ndef helper(y): return g(y) + x\nassert math.isclose(helper(1), abs(f(2)))",
            "class Node:\n    def __init__(self): self.v = 1\nassert f(Node()).v == 1",
            "assert np.allclose(random.choice(f(1)), 1)",
            "from solution import h as k\nassert k(1)",
            "assert sum(1, 2) == 3",
        ]
    )
    assert set(suite.names) == {"g", "f", "Node", "h", "sum"}
    assert set(suite.modules) == {"np", "random"}
    assert [source.startswith("class Node") for source in suite.sources] == [True]
    assert not equal_values({"a": 1}, {"b": 1})


def test_a_request_that_leaves_in_pieces_arrives_whole(monkeypatch):
    """A pipe that is nearly full takes a part of a line."""
    (reads, answers), (requests, writes) = os.pipe(), os.pipe()
    write = os.write
    write(answers, plain_data.dump({"value": 5}))
    monkeypatch.setattr(os, "write", lambda descriptor, line: write(descriptor, line[:7]))
    assert Link(reads, writes).apply("double", 2) == 5
    os.close(writes)
    with open(requests, "rb") as sent:
        assert plain_data.load(sent.read()) == {"op": "apply", "function": "double", "args": [2]}
    os.close(answers)
