"""Config keys that the documentation names exist, and its YAML fits a schema."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_origin

import pytest
import yaml

from agentrl.config.keys import iter_keys, iter_sections, unknown_keys, with_defaults
from agentrl.config.schema import Config
from agentrl.extras.supervised.config import RMConfig, SFTConfig
from parts.docs_claims import Page

ROOT = Path(__file__).parents[2]
SCHEMAS = (Config, SFTConfig, RMConfig)
KEYS = {".".join(key): field for schema in SCHEMAS for key, field in iter_keys(schema)}
SECTIONS = {".".join(key) for schema in SCHEMAS for key, _ in iter_sections(schema)}
TOP = "|".join(sorted({section.partition(".")[0] for section in SECTIONS}))
SPAN = re.compile(r"`([^`\n]+)`")
KEY = re.compile(rf"(?<![\w./-])((?:{TOP})\.[a-z_]\w*(?:\.\w+)*)(?![\w(/])")
"""A key as prose writes it: `learner.offload=optimizer`, `model.lora.rank`."""
OTHERS = {
    "reward_model.ground_truth",
    "model.config.pad_token_id",
    "data.max_response_length",
    "trainer.total_training_steps",
}
FILES = (".py", ".json", ".bin", ".parquet")
"""A column of rows, an attribute, keys of verl and files, which look like keys."""

PAGES = sorted(
    {
        str(file.relative_to(ROOT))
        for pattern in ("docs/*.md", "docs/results/*.md", "agentrl/extras/*/*.md")
        for file in ROOT.glob(pattern)
    }
    - {"docs/config.md", "docs/roadmap.md"}
)
"""Not what is generated from the schema, and not what does not exist yet."""


def exists(key: str) -> bool:
    """Tell whether the schema has this key or section; below a free-form mapping anything may stand."""
    if key in KEYS or key in SECTIONS:
        return True
    parts = key.split(".")
    parents = (".".join(parts[:length]) for length in range(1, len(parts)))
    return any(parent in KEYS and get_origin(KEYS[parent].annotation) is dict for parent in parents)


def named_keys(page: str) -> set[str]:
    prose = Page(page, (ROOT / page).read_text()).prose  # without columns of tables that name verl's keys
    keys = {key for span in SPAN.findall(prose) for key in KEY.findall(span)}
    return {key for key in keys - OTHERS if not key.endswith(FILES)}


@pytest.mark.parametrize("page", PAGES)
def test_every_key_that_a_page_names_exists(page):
    assert [key for key in sorted(named_keys(page)) if not exists(key)] == []


def test_the_pages_of_tuning_name_keys():
    assert len(named_keys("docs/tuning.md")) >= 15
    assert len(named_keys("docs/algorithms.md")) >= 15


def test_what_counts_as_a_key():
    assert exists("reward.terms.length_penalty.weight")
    assert exists("learner.fsdp")
    assert not exists("learner.fsdp.shards")
    assert KEY.findall("learner.offload=optimizer") == ["learner.offload"]
    assert KEY.findall("agentrl/learner/loss.py, docs/data.md, learner.update()") == []


@pytest.mark.parametrize("page", PAGES)
def test_yaml_of_a_page_fits_a_schema(page):
    for block in re.findall(r"```yaml\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL):
        values = yaml.safe_load(block)
        if isinstance(values, dict):  # a list is a file of another kind, such as turns of a played model
            fitting = [schema for schema in SCHEMAS if not list(unknown_keys(schema, values))]
            assert fitting, block
            fitting[0].model_validate(with_defaults(fitting[0], values))
