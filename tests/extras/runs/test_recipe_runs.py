"""Each packaged recipe makes one step on a random tiny model of Qwen 2.5's architecture, with Qwen 2.5's chat
template.

Only the model, the data, sizes, lengths and counts differ from what its script runs.
"""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import orjson
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

import agentrl
from agentrl.chat.chat import Chat
from agentrl.chat.tiny import write_tiny_tokenizer
from agentrl.cluster.cluster import ray_session
from agentrl.config.cluster import ClusterConfig
from parts.converted import write_aime, write_gsm8k

pytestmark = pytest.mark.slow

RECIPES = sorted(file.stem for file in (Path(__file__).parents[3] / "configs" / "recipes").glob("*.yaml"))
AGENTS = {"gsm8k_tools": "tool_agent", "gsm8k_feedback": "interaction_agent"}
LENGTHS = (
    *(
        "data.max_prompt_tokens=2048",
        "agent.max_response_tokens=192",
        "learner.microbatch_tokens=2304",
        "rollout.num_actors=1",
    ),
    *(
        "rollout.max_concurrent_trajectories=64",
        "buffer.groups_per_step=4",
        "rollout.group_size=4",
        "trainer.steps=1",
    ),
)
TURN_TOKENS = {"gsm8k_tools": 24, "gsm8k_feedback": 24}
"""So that several turns fit into a response; of the recipes that bound turns."""


@pytest.fixture(scope="module", autouse=True)
def ray():
    """One Ray for the runs of all recipes."""
    with ray_session(ClusterConfig()):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2ForCausalLM of 2 x 32 with byte-level tokens and the chat template of Qwen 2.5."""
    folder = tmp_path_factory.mktemp("qwen")
    write_tiny_tokenizer(folder)
    trl = importlib.util.find_spec("trl")
    assert trl is not None, "trl is not installed: make setup"
    [package] = trl.submodule_search_locations
    (folder / "chat_template.jinja").write_text(
        (Path(package) / "chat_templates" / "qwen2_5.jinja").read_text()
    )
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    vocabulary = Chat.load(str(folder)).vocab_size
    config = Qwen2Config(
        vocab_size=vocabulary,
        max_position_embeddings=4096,
        initializer_range=0.1,
        tie_word_embeddings=True,
        **sizes,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def write_data(recipe: str, folder: Path) -> tuple[Path, Path]:
    """Write problems as GSM8K and AIME have them, and return the files that the recipe trains and validates
    on.
    """
    source = folder / "source"
    source.mkdir(parents=True)
    sums = [(a, a + 3) for a in range(2, 14)]
    if recipe.startswith("aime"):
        rows = [{"id": str(a), "problem": f"Find ${a} + {b}$.", "answer": f"{a + b}"} for a, b in sums]
        for name, part in (("train", rows), ("test", rows[:2])):
            (source / f"{name}.jsonl").write_bytes(b"\n".join(map(orjson.dumps, part)))
        write_aime(folder, source)
    else:
        rows = [
            {"question": f"Tom has {a} pens and gets {b}. How many?", "answer": f"{a} + {b}\n#### {a + b}"}
            for a, b in sums
        ]
        for name, part in (("train", rows), ("test", rows[:2])):
            (source / f"{name}.jsonl").write_bytes(b"\n".join(map(orjson.dumps, part)))
        write_gsm8k(folder, source, agent=AGENTS.get(recipe, "single_turn_agent"))
    return folder / "train.parquet", folder / "test.parquet"


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_step(world, model, recipe, tmp_path):
    train, val = write_data(recipe, tmp_path / "data")
    run_dir = tmp_path / "run"
    overrides = [
        "size=tiny",
        f"data.train_files=[{train}]",
        f"data.val_files=[{val}]",
        f"model.path={model}",
        f"trainer.run_dir={run_dir}",
        *LENGTHS,
    ]
    if recipe == "gsm8k_distill":
        overrides.append(f"algorithm.distillation.teacher={model}")
    if recipe in TURN_TOKENS:
        overrides.append(f"agent.max_turn_tokens={TURN_TOKENS[recipe]}")
    assert agentrl.train(agentrl.load_config(f"recipes/{recipe}", overrides)).step == 1
    result = json.loads((run_dir / "result.json").read_text())
    assert (result["step"], result["balanced"], result["counts"]["consumed"]) == (1, True, 4)
    [step] = world.records(run_dir).train
    assert math.isfinite(step["learner/grad_norm"])
    assert step["learner/num_tokens"] > 0
    assert ("learner/critic/grad_norm" in step) is (recipe == "gsm8k_ppo")
    assert "val/accuracy" in result["validation"]["final"]
    assert (run_dir / "policy" / "model.safetensors").is_file()
    assert (run_dir / "checkpoints" / "step_000001" / "manifest.json").is_file()
