"""Runs tests of a repository inside of a box, and prints which passed.

stdin: {"runner", "tests", "added", "token"}; added: modules, by their paths, that must not take the place of
others. The last line of stdout is the token and a JSON object: test -> passed.
What the tests print themselves goes to stderr.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import unittest
from typing import Any


class TestVerdicts(unittest.TestResult):
    """Which tests passed: those that began, and neither failed nor were skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.passed: dict[str, bool] = {}

    def addSuccess(self, test: unittest.TestCase) -> None:
        self.passed.setdefault(test.id(), True)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self.passed[test.id()] = False

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self.passed[test.id()] = False

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self.passed[test.id()] = False

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        if err is not None:
            self.passed[test.id()] = False

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        self.passed[test.id()] = False


def by_unittest(tests: list[str]) -> dict[str, bool]:
    """Run tests by their dotted names: `tests.test_cart.TestCart.test_total`."""
    sys.path.insert(0, os.getcwd())
    verdicts = TestVerdicts()
    for name in tests:
        unittest.defaultTestLoader.loadTestsFromName(name).run(verdicts)
    return verdicts.passed


def by_pytest(tests: list[str]) -> dict[str, bool]:
    """Run tests by their node ids: `tests/test_cart.py::test_total[2]`."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = (
        "1"  # those installed beside the run are not the repository's
    )
    import pytest

    passed: dict[str, bool] = {}

    class Listener:
        def pytest_runtest_logreport(self, report: Any) -> None:
            is_fine = report.passed if report.when == "call" else not (report.failed or report.skipped)
            passed[report.nodeid] = passed.get(report.nodeid, True) and is_fine

    sys.path.insert(0, os.getcwd())
    files = sorted({name.partition("::")[0] for name in tests})
    pytest.main(["-q", "-p", "no:cacheprovider", *files], plugins=[Listener()])
    return passed


def remove_impostors(added: list[str]) -> None:
    """Remove modules and packages that this interpreter has under the same name from elsewhere."""
    for path in added:
        name = os.path.basename(path).removesuffix(".py")
        if name.isidentifier() and _is_elsewhere(name):
            shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)


def _is_elsewhere(name: str) -> bool:
    try:
        found = importlib.util.find_spec(name)
    except ValueError:  # `__main__`
        return True
    places = [] if found is None else [*(found.submodule_search_locations or ()), found.origin or "built-in"]
    return any(not os.path.realpath(place).startswith(os.getcwd() + os.sep) for place in places)


RUNNERS = {"unittest": by_unittest, "pytest": by_pytest}


def main() -> None:
    request = json.loads(sys.stdin.read())
    token, answers = request["token"], os.dup(1)
    os.dup2(2, 1)
    remove_impostors(request["added"])
    passed = RUNNERS[request["runner"]](request["tests"])
    sys.stdout.flush()
    os.write(answers, f"\n{token}{json.dumps(passed)}\n".encode())
    os._exit(0)  # threads that the tests left do not matter


if __name__ == "__main__":
    main()
