"""examples/repositories.py: each repository has a fault that its tests tell; mending it is rewarded."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
import unittest
from pathlib import Path

import pytest

from agentrl.testing import Call, play
from agentrl.types import Outcome

ROOT = Path(__file__).parents[3]
SPEC = importlib.util.spec_from_file_location("repositories_example", ROOT / "examples" / "repositories.py")
assert SPEC is not None
assert SPEC.loader is not None
EXAMPLE = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = EXAMPLE  # its dataclass looks there
SPEC.loader.exec_module(EXAMPLE)


def passed(code: str, module: str, tests: str) -> dict[str, bool]:
    """Return which tests pass with this code: our own, so it may run here."""
    made = types.ModuleType(module)
    exec(code, made.__dict__)
    names: dict[str, object] = {}
    sys.modules[module] = made
    try:
        exec(tests, names)
    finally:
        del sys.modules[module]
    loaded = unittest.defaultTestLoader.loadTestsFromTestCase(names["TestIt"])
    return {test.id().rpartition(".")[2]: is_fine(test) for test in loaded}


def is_fine(test: unittest.TestCase) -> bool:
    result = unittest.TestResult()
    test.run(result)
    return result.wasSuccessful()


@pytest.mark.parametrize("fault", EXAMPLE.FAULTS, ids=lambda fault: fault.module)
def test_the_tests_of_a_repository_tell_its_fault(fault) -> None:
    tests = EXAMPLE.TESTS.format(module=fault.module, mended=fault.mended, kept=fault.kept)
    assert passed(fault.code.format(fault.right), fault.module, tests) == {
        "test_mended": True,
        "test_kept": True,
    }
    assert passed(fault.code.format(fault.wrong), fault.module, tests) == {
        "test_mended": False,
        "test_kept": True,
    }


def test_an_attempt_at_a_row_that_mends_its_fault_is_rewarded(tmp_path: Path) -> None:
    EXAMPLE.write(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    fault, kwargs = EXAMPLE.FAULTS[0], rows[0]["extra_info"]["environment_kwargs"]
    assert (len(rows), kwargs.pop("name")) == (12, "repository")
    trajectory = play(
        [
            Call("bash", {"command": "ls; cat cart.py"}),
            Call("edit", {"path": "cart.py", "old": fault.wrong, "new": fault.right}),
            Call("bash", {"command": "python3 -c 'import cart; print(cart.total([2, 3]))'"}),
            "The prices are added.",
        ],
        environment="repository",
        environment_kwargs=kwargs,
        reward="tests_pass",
        max_turns=4,
    )
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.failure
    answers = [message.content for message in trajectory.messages if message.role == "tool"]
    assert answers[0] == "README.md\ncart.py\ntests\ndef total(prices):\n    return len(prices)"
    assert answers[1:] == ["changed cart.py", "5"]
    assert [reward.value for reward in trajectory.rewards] == [1.0]
    assert trajectory.metrics["reward/tests_pass/pass_to_pass"] == 1.0
