"""GSM8K's real rows through the whole pipeline."""

import json
import os
from pathlib import Path

import pytest

import agentrl
from parts.converted import write_gsm8k


def gsm8k_folder() -> Path:
    shared = Path(os.environ.get("AGENTRL_SHARED", Path(__file__).parents[4] / "shared"))
    folder = shared / "data/gsm8k"
    if not folder.is_dir():
        message = (
            f"needs GSM8K's original JSON lines in {folder}; set AGENTRL_SHARED to the folder that holds "
            "data/gsm8k"
        )
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return folder


@pytest.mark.slow
def test_three_steps_on_real_questions(world):
    data = world.folder / "gsm8k"
    write_gsm8k(data, gsm8k_folder(), agent="mixed")
    run_dir = world.folder / "gsm8k_run"
    overrides = [
        f"model.path={world.folder}/model",
        f"data.train_files=[{data}/train.parquet]",
        f"data.val_files=[{data}/test.parquet]",
        "data.max_train_rows=400",
        "data.max_val_rows=12",
        f"trainer.run_dir={run_dir}",
    ]
    agentrl.train(agentrl.load_config("configs/gsm8k_tiny.yaml", overrides))
    result = json.loads((run_dir / "result.json").read_text())
    assert (result["step"], result["balanced"], result["counts"]["consumed"]) == (3, True, 24)
    assert "val/accuracy" in result["validation"]["initial"]
