"""docs/config.md says what the schema says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from agentrl.config.keys import iter_keys, iter_sections
from agentrl.config.schema import Config
from agentrl.extras.plan.config_reference import render, type_words
from agentrl.extras.supervised.config import SFTConfig

FILE = Path(__file__).parents[3] / "docs" / "config.md"
KEYS = [*iter_keys(Config), *iter_keys(SFTConfig)]


def test_the_file_is_current() -> None:
    assert FILE.read_text(encoding="utf-8") == render(), "run `make docs`"


def test_every_key_is_described() -> None:
    for key, field in KEYS:
        assert len(field.description or "") > 3, key
        assert field.description.endswith("."), key
        assert type_words(field), key
        assert not field.is_required(), f"{key}: the schema is the place of defaults"


def test_every_section_is_described() -> None:
    for key, section in (*iter_sections(Config), *iter_sections(SFTConfig)):
        assert (section.__doc__ or "").strip().endswith("."), key


def rows(text: str) -> dict[str, str]:
    """Return key -> default of all tables."""
    cells = [line.split("|") for line in text.splitlines() if line.startswith("| `")]
    return {cell[1].strip(" `"): cell[3].strip()[1:-1] for cell in cells}


def test_every_key_has_a_row_with_its_default() -> None:
    training, _, _ = render().partition("# Supervised training")
    found = {key: default for key, default in rows(training).items() if "<name>" not in key}
    assert sorted(found) == sorted(".".join(key) for key, _ in iter_keys(Config))
    for key, _ in iter_keys(Config):
        default: Any = Config().model_dump(mode="json")
        for part in key:
            default = default[part]
        assert yaml.safe_load(found[".".join(key)]) == default, key


def test_a_bound_and_null_are_in_the_type() -> None:
    fields = dict(iter_keys(Config))
    assert type_words(fields["trainer", "steps"]) == "whole number, at least 1, or null"
    assert type_words(fields["algorithm", "kl_cov", "share"]) == "number, above 0, below 1"
    assert type_words(fields["rollout", "weights", "pause_mode"]) == "`auto` `abort` `retract` `in_place`"
    named = "`disk` `distributed` `tensor` or an entry point of agentrl.transports"
    assert type_words(fields["rollout", "weights", "transport"]) == named
    assert type_words(fields["learner", "optimizer", "betas"]) == "list of 2 numbers"
