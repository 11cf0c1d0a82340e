"""docs/algorithms.md explains whatever a config may name: each name in the section of its kind, as a row of a
table or in the text.
"""

from pathlib import Path
from typing import get_args

import pytest

from agentrl.algorithms.aggregation import RULES
from agentrl.algorithms.corrections import LEVELS
from agentrl.algorithms.kl import KL_ESTIMATORS
from agentrl.algorithms.rejection import STATISTICS
from agentrl.config.algorithm import KLConfig
from agentrl.config.correction import CorrectionConfig
from parts.built_in import ESTIMATORS, POLICY_LOSSES

TEXT = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
SECTIONS = {text.partition("\n")[0]: text for text in TEXT.split("\n## ")}
CHOICES = {*get_args(KLConfig.model_fields["estimator"].annotation), *KL_ESTIMATORS}


def rows(section):
    """Return {name: the other cells of its row} of all tables of a section; a row may explain several
    names.
    """
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in SECTIONS[section].splitlines()
        if line.startswith("|")
    ]
    return {name.strip("`"): row[1:] for row in cells for name in row[0].split(", ") if name.startswith("`")}


@pytest.mark.parametrize(
    ("section", "names"),
    [
        ("Advantages", ESTIMATORS),
        ("Policy losses", POLICY_LOSSES),
        ("Aggregation", RULES),
        ("KL and entropy", CHOICES),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_registered_name_has_a_row_and_a_formula(section, names):
    found = rows(section)
    assert set(names) <= set(found)
    for name in names:
        assert all(found[name][:1]), f"{name} has no formula"


def test_every_rule_of_correction_is_explained():
    text = SECTIONS["Off-policy correction"]
    words = {"weight", "reject", *STATISTICS, *LEVELS, *CorrectionConfig.model_fields}
    assert {word for word in words if word not in text} == set()


def test_what_differs_elsewhere_is_said_of_each_kind():
    for section in ("Advantages", "Policy losses", "Aggregation"):
        assert "elsewhere" in SECTIONS[section].lower(), section
