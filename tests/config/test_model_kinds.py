"""Models that would be trained in vain: servers would go on with their old weights.

They are refused before anything is published.
"""

import json
import shutil

import pytest
import torch
import trio
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.cluster.workers import LocalWorker
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.learner import LearnerConfig
from agentrl.config.model import ModelConfig
from agentrl.config.model_kind import (
    EXPERTS,
    MULTIMODAL,
    QUANTIZED,
    TESTED_EXPERTS,
    find_obstacles,
    has_experts,
)
from agentrl.config.rollout import WeightsConfig
from agentrl.errors import ConfigError
from agentrl.learner.architecture import check_head_on_sglang, check_policy, check_replay
from agentrl.learner.learner import LearnerSpec
from agentrl.types import TensorSpec
from agentrl.weights.publish import Publisher
from agentrl.weights.verify import check_known, read_shapes
from parts.experts import CONFIGS, write_experts
from parts.learner import lone_learner, write_tiny_model
from parts.played_server import played_sglang

VOCABULARY = 61


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    write_tiny_model(folder, VOCABULARY)
    return folder


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A mixture of experts whose architecture is not tested."""
    folder = tmp_path_factory.mktemp("experts")
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    config = GptOssConfig(**sizes, intermediate_size=16, num_local_experts=4, num_experts_per_tok=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def published(folder):
    """What the learner would publish of a folder: the names and shapes of the model in memory."""
    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    once = {
        tensor.data_ptr(): (name, tensor) for name, tensor in reversed(state.items())
    }  # tied ones by their first name
    return [
        TensorSpec(name, "float32", tuple(tensor.shape), 4 * tensor.numel()) for name, tensor in once.values()
    ]


def test_untested_experts_are_refused_with_what_works_instead(experts):
    with pytest.raises(ConfigError) as caught:
        check_policy(ModelConfig(path=str(experts)))
    assert str(caught.value) == (
        f"model.path={str(experts)!r} (gpt_oss) is a mixture of experts of an architecture that is not "
        "tested; tested are Mixtral, OLMoE, Qwen2-MoE and Qwen3-MoE; use one of these or a dense model, "
        "unquantized"
    )


def test_tested_experts_are_known_by_their_config_and_their_names_are_those_of_the_files(tmp_path):
    for name in TESTED_EXPERTS:
        write_experts(tmp_path / name, name)
        check_policy(ModelConfig(path=str(tmp_path / name)))
        assert find_obstacles(str(tmp_path / name)) == []
        assert has_experts(json.loads((tmp_path / name / "config.json").read_text()))
        # The names in memory are not those of the files.
        with pytest.raises(ConfigError, match=r"experts\.\w+_proj .*nearest: .*experts.*would skip it"):
            check_known(published(tmp_path / name), tmp_path / name)
    assert set(TESTED_EXPERTS) == set(CONFIGS)


def test_routing_of_a_dense_model_cannot_be_replayed(dense, tmp_path):
    with pytest.raises(ConfigError) as caught:
        check_replay(ModelConfig(path=str(dense)))
    assert str(caught.value) == (
        f"rollout.replay_experts=true needs a mixture of experts, and model.path={str(dense)!r} is dense; "
        "remove it"
    )
    write_experts(tmp_path / "experts")
    check_replay(ModelConfig(path=str(tmp_path / "experts")))


def test_experts_with_a_tied_head_are_not_served_by_sglang(dense, tmp_path):
    """Its mixtures of experts never tie the head, which would stay empty."""
    for name, is_tied in (("tied", True), ("untied", False)):
        write_experts(tmp_path / name, is_tied=is_tied)
    check_head_on_sglang(ModelConfig(path=str(tmp_path / "untied")))
    check_head_on_sglang(ModelConfig(path=str(dense)))
    with pytest.raises(ConfigError, match=r"ties its output head .* use rollout\.backend=embedded"):
        check_head_on_sglang(ModelConfig(path=str(tmp_path / "tied")))


def test_training_refuses_experts_with_one_line_before_it_starts_anything(experts, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    words = [
        f"model.path={experts}",
        f"data.train_files=[{rows}]",
        f"trainer.run_dir={tmp_path / 'run'}",
        "model.tool_format=none",
    ]
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"rollout": played_sglang()}))
    done = CliRunner().invoke(app, ["train", str(config), *words])
    assert done.exit_code != 0
    said = done.output + str(done.exception)
    assert "is a mixture of experts" in said, said
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_model_that_is_trained_is_the_one_that_servers_know(dense, tmp_path):
    check_known(published(dense), dense)
    bare = tmp_path / "bare"  # as a base model is saved: without the prefix of the class with a head
    shutil.copytree(dense, bare)
    weights = load_file(bare / "model.safetensors")
    save_file(
        {name.removeprefix("model."): tensor for name, tensor in weights.items()}, bare / "model.safetensors"
    )
    check_known(published(dense), bare)
    assert read_shapes(dense)["model.norm.weight"] == (32,)
    (tmp_path / "none").mkdir()
    check_known(published(dense), tmp_path / "none")  # weights in another format cannot be compared


def test_a_weight_of_another_shape_is_refused(dense, tmp_path):
    folder = tmp_path / "other"
    shutil.copytree(dense, folder)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"model.norm.weight": torch.ones(7)}, folder / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"publish model\.norm\.weight \[32\], which has the shape \[7\] in its files"
    ):
        check_known(published(dense), folder)


def test_the_first_publish_compares_before_it_touches_a_server(dense, tmp_path):
    folder = tmp_path / "stripped"
    shutil.copytree(dense, folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors")
    spec = LearnerSpec(
        ModelConfig(path=str(dense)), LearnerConfig(), AlgorithmConfig(), "decoupled", 3, 1.0, 20
    )
    with lone_learner(spec) as learner:
        workers = LocalWorker(learner)

        def publish(model):
            publisher = Publisher(
                workers, WeightsConfig(), folder=tmp_path / "out", pause_mode="abort", model=model
            )
            return trio.run(publisher.publish, 1, [])

        with pytest.raises(
            ConfigError, match=r"publish model\.norm\.weight \[32\], which its files do not contain"
        ):
            publish(folder)
        assert not (tmp_path / "out").exists()
        publish(dense)
        assert (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "what"),
    [
        *(
            (name, EXPERTS)
            for name in (
                "Qwen/Qwen3-Next-80B-A3B-Instruct",
                "Qwen/Qwen3.5-35B-A3B",
                "openai/gpt-oss-20b",
                "x/phi-3.5-moe",
            )
        ),
        *(
            (name, EXPERTS)
            for name in (
                "deepseek-ai/DeepSeek-V3",
                "deepseek-ai/deepseek-v2-lite",
                "moonshotai/Moonlight-16B",
                "zai/GLM-4.5",
            )
        ),
        *(
            (name, QUANTIZED)
            for name in ("Qwen/Qwen3-8B-FP8", "x/Qwen2.5-7B-Instruct-AWQ", "x/llama-GPTQ-Int4")
        ),
        *(
            (name, MULTIMODAL)
            for name in (
                "Qwen/Qwen3-VL-8B-Instruct",
                "OpenGVLab/InternVL2_5-4B",
                "zai/glm-4.1v-9b",
                "Qwen/Qwen2.5-Omni-7B",
            )
        ),
    ],
)
def test_names_of_the_hub_tell_of_what_cannot_be_trained(name, what):
    assert find_obstacles(name) == [what]


@pytest.mark.parametrize(
    "name",
    [
        *(
            "Qwen/Qwen2.5-7B-Instruct",
            "Qwen/Qwen3-8B",
            "meta-llama/Llama-3.1-8B",
            "deepseek-ai/deepseek-llm-7b-chat",
            "google/gemma-2-2b-it",
        ),
        *(
            "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
            "deepseek-ai/deepseek-math-7b-instruct",
            "THUDM/glm-4-9b-chat",
            "Qwen/Qwen2.5-Math-7B",
        ),
        *(
            "mistralai/Mistral-7B-v0.3",
            "XiaomiMiMo/MiMo-7B-RL",
            "models/evolved-3b",
            "microsoft/phi-4",
            "allenai/OLMo-2-1124-7B",
        ),
        *(
            "Qwen/Qwen3-30B-A3B",
            "Qwen/Qwen3-Coder-480B-A35B-Instruct",
            "Qwen/Qwen1.5-MoE-A2.7B",
            "Qwen/Qwen2-57B-A14B",
            "mistralai/Mixtral-8x7B-v0.1",
            "allenai/OLMoE-1B-7B-0924",
        ),
    ],
)
def test_names_of_models_that_can_be_trained_tell_of_nothing(name):
    assert find_obstacles(name) == []


def test_a_local_folder_is_judged_by_its_config_not_by_its_name(tmp_path):
    folder = tmp_path / "Qwen3-30B-A3B-FP8"
    folder.mkdir()
    file = folder / "config.json"
    for description, found in [
        ({"model_type": "qwen3", "num_experts": 0}, []),
        ({"num_local_experts": 1}, []),
        ({"n_routed_experts": 64}, [EXPERTS]),
        ({"model_type": "qwen3_moe", "num_experts": 64}, []),
        ({"model_type": "qwen3_next", "num_experts": 64}, [EXPERTS]),
        ({"text_config": {"num_experts": [4, 8]}, "vision_config": {"depth": 2}}, [EXPERTS, MULTIMODAL]),
        ({"quantization_config": {"quant_method": "fp8"}}, [QUANTIZED]),
    ]:
        file.write_text(json.dumps(description))
        assert find_obstacles(str(folder)) == found
    file.write_text("{")
    assert find_obstacles(str(folder)) == []
