"""The packaged recipes for models of real sizes: they compose from anywhere, and their scripts are made of
commands that exist.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from agentrl.config.compose import load_config
from agentrl.errors import ConfigError

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs" / "recipes"
RECIPES = sorted(file.stem for file in FOLDER.glob("*.yaml"))
SCRIPTS = sorted(file.stem.removeprefix("run_") for file in FOLDER.glob("run_*.sh"))
SIZES = sorted(file.stem for file in (ROOT / "configs" / "size").glob("*.yaml"))


def test_every_recipe_has_a_script():
    assert RECIPES == SCRIPTS
    assert all(os.access(FOLDER / f"run_{name}.sh", os.X_OK) for name in SCRIPTS)


@pytest.mark.parametrize("size", SIZES)
def test_a_size_is_a_model_and_its_gpus(size):
    config = load_config(
        str(FOLDER / f"gsm8k_grpo{'_lora' if size.endswith('_lora') else ''}.yaml"), [f"size={size}"]
    )
    num_gpus = sum(pool.num_gpus for pool in config.placement.pools.values())
    assert num_gpus == {"tiny": 0, "0.5b": 2, "1.5b": 2, "3b": 4, "7b": 8, "7b_lora": 2}[size]
    assert config.model.path == (
        "" if size == "tiny" else f"Qwen/Qwen2.5-{size.removesuffix('_lora').upper()}-Instruct"
    )


def test_a_copy_of_a_recipe_works_in_a_folder_of_ones_own(tmp_path):
    copy = tmp_path / "mine.yaml"
    copy.write_text((FOLDER / "aime_dapo.yaml").read_text())
    assert load_config(str(copy)) == load_config("recipes/aime_dapo.yaml")


def test_the_page_lists_recipes_and_sizes():
    recipes = (ROOT / "docs" / "quickstart.md").read_text().partition("\n## Recipes\n")[2]
    listed = re.findall(r"^\| `([\w.]+)` \|", recipes, flags=re.MULTILINE)
    assert sorted(listed) == sorted([*RECIPES, *SIZES])


def test_recipes_are_named_where_a_config_is_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="nearest: recipes/gsm8k_grpo"):
        load_config("recipes/gsm8k_gropo")
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "gsm8k_grpo.yaml").write_text("trainer: {steps: 7}\n")
    assert (
        load_config("recipes/gsm8k_grpo.yaml").trainer.steps == 7
    )  # a file of one's own goes before a packaged one
