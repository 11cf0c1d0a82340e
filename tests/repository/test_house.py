"""The house does not grow: no measure of benchmarks/house.py rises. Who lowers one lowers its limit here."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from house import measure, names_for_extras, read_modules

LIMITS = {
    "core_lines_of_code": 43_995,
    "extras_lines_of_code": 46_030,
    "core_modules": 458,
    "modules_of_the_largest_room": 51,
    "arrows_between_rooms_of_the_core": 87,
    "arrows_with_modules_that_stand_alone": 159,
    "names_across_rooms_of_the_core": 646,
    "names_of_the_core_in_extras": 597,
    "imports_of_extras_in_the_core": 0,
    "protocols_with_one_implementation": 20,
    "methods_of_the_largest_class": 45,
    "functions_reached_from_open_run": 602,
    "files_reached_from_open_run": 168,
    "functions_reached_from_learn": 141,
    "files_reached_from_learn": 38,
    "imports_of_start": 20,
    "lines_of_start": 135,
    "config_keys": 422,
    "commands_of_the_core": 5,
    "pages": 23,
}


@pytest.fixture(scope="module")
def modules():
    return read_modules()


@pytest.fixture(scope="module")
def measured(modules):
    return measure(modules)


@pytest.mark.parametrize("name", LIMITS)
def test_no_measure_rises(measured, name: str) -> None:
    assert measured[name] <= LIMITS[name], "what enters the core names the three extras that need it"


def test_extras_import_names_of_the_core_that_are_declared(modules) -> None:
    """Whoever changes one of these names changes an extra with it."""
    declared = (Path(__file__).parent / "core_names.txt").read_text().split()
    found = names_for_extras(modules)
    assert sorted(found - set(declared)) == [], "declare them in core_names.txt, if no declared name will do"
    assert sorted(set(declared) - found) == [], "no extra needs them: take them out of core_names.txt"
    assert declared == sorted(declared)
