"""What `agentrl config explain` says about the memory of GPUs, by hand, and when it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.config.schema import Config
from agentrl.errors import ConfigError
from agentrl.extras.plan.explain import explain
from agentrl.extras.plan.explain_memory import memory_lines, rank_memory, refuse_too_large, server_memory

QWEN7 = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
QWEN30_A3 = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
NUM_7B, NUM_30B = 7_615_616_512, 30_532_122_624
"""As Hugging Face counts Qwen2.5-7B and Qwen3-30B-A3B."""
APART = {
    "pools": {"learning": {"gpus_per_node": 8}, "serving": {"gpus_per_node": 8}},
    "roles": {"actor": "learning", "servers": "serving"},
}
SHARED = {"pools": {"all": {"gpus_per_node": 8}}, "roles": {}}


def on_gpus(folder: Path, sizes: dict[str, Any] = QWEN7, **sections: dict[str, Any]) -> Config:
    (folder / "config.json").write_text(json.dumps(sizes))
    own: dict[str, dict[str, Any]] = {
        "model": {"path": str(folder), "dtype": "bfloat16"},
        "learner": {"world_size": 8, "gradient_checkpointing": True},
        "rollout": {"backend": "sglang", "num_servers": 8},
        "placement": APART,
    }
    merged = {name: {**own.get(name, {}), **given} for name, given in {**own, **sections}.items()}
    return Config.model_validate(merged)


def lines_of(config: Config) -> dict[str, str]:
    return dict(memory_lines(config))


def parts_of(text: str) -> dict[str, float]:
    """Return the parts behind the equals sign, in GB."""
    terms = text.partition(" = ")[2].split(" + ")
    return {name: float(size) for size, _, name in (term.partition(" ") for term in terms)}


def test_a_dense_model_by_hand(tmp_path: Path) -> None:
    parts = parts_of(lines_of(on_gpus(tmp_path))["a learner rank"])
    gb = NUM_7B / 8 / 1e9
    assert parts["weights"] == parts["gradients"] == pytest.approx(4 * gb, abs=0.06)
    assert parts["optimizer state"] == pytest.approx(8 * gb, abs=0.06)
    # The input of 28 layers, one layer again, and three more: bfloat16, 16,384 tokens.
    again = 16 * 3584 + 2 * (3 * 3584 + 2 * 512) + 4 * 28 + 8 * 18944
    on_the_way = 2 * (2 * 3584 + 3 * 18944)
    assert parts["activations"] == pytest.approx(
        16384 * (2 * 3584 * 28 + again + 6 * 3584 + on_the_way) / 1e9, abs=0.06
    )
    assert parts["logits"] == pytest.approx(6 * 4 * 2**27 / 1e9, abs=0.06)


def test_offloaded_inputs_of_layers_are_in_the_hosts_memory(tmp_path: Path) -> None:
    learner: dict[str, Any] = {"microbatch_tokens": 131_072, "sequence_parallel": 4}
    long = {"learner": learner, "cluster": {"gpu_memory_gb": 42}}
    config = on_gpus(tmp_path, **long)
    kept = rank_memory(config, "actor")
    assert kept is not None
    # Of 32,768 tokens of the rank: 28 layers, and 3 at most on the GPU.
    layer = 2 * 3584 * 32_768
    with pytest.raises(ConfigError, match=r"learner\.activation_offload=true"):
        refuse_too_large(config)
    learner["activation_offload"] = True
    config = on_gpus(tmp_path, **long)
    refuse_too_large(config)
    away = rank_memory(config, "actor")
    assert away is not None
    assert kept.working["activations"] - away.working["activations"] == pytest.approx(25 * layer)
    assert away.host == {"inputs of layers": 27 * layer}
    assert "and 6.3 inputs of layers in the host's memory" in dict(memory_lines(config)).values()


def test_offloading_activations_of_cpu_ranks_is_called_useless(tmp_path: Path) -> None:
    on_cpus = {
        "placement": {
            "pools": {"cpus": {"gpus_per_node": 0}, "serving": {"gpus_per_node": 8}},
            "roles": {"actor": "cpus", "servers": "serving"},
        }
    }
    learner = {"activation_offload": True, "gradient_checkpointing": True}
    said = "learner.activation_offload=true copies activations on CPU ranks and saves nothing"
    assert said in explain(on_gpus(tmp_path, learner=learner, **on_cpus))
    assert said not in explain(on_gpus(tmp_path, learner=learner))


def test_a_mixture_keeps_all_experts_and_activations_of_the_chosen(tmp_path: Path) -> None:
    config = on_gpus(tmp_path, QWEN30_A3)
    memory = rank_memory(config, "actor")
    assert memory is not None
    assert memory.state["weights"] == 4 * NUM_30B / 8
    denser = rank_memory(on_gpus(tmp_path, {**QWEN30_A3, "num_experts_per_tok": 16}), "actor")
    assert denser is not None
    assert denser.state == memory.state
    assert denser.working["activations"] > memory.working["activations"]


def test_servers_divide_weights_and_cache_over_their_gpus(tmp_path: Path) -> None:
    config = on_gpus(
        tmp_path,
        rollout={"backend": "sglang", "num_servers": 2, "sglang": {"args": {"tp_size": 4}}},
        cluster={"gpu_memory_gb": 80},
    )
    server = server_memory(config)
    assert server is not None
    assert server.weights == 2 * NUM_7B / 4
    assert server.cache_per_token == 2 * 28 * 2 * 4 * 128 / 4
    assert server.num_cached_tokens(80e9) == int((0.85 * 80e9 - server.weights) / server.cache_per_token)
    [line] = [text for name, text in memory_lines(config) if name == "a server's GPU"]
    # 256 trajectories at most on two servers; 1,024 tokens of prompt and 512 of response.
    assert line == (
        "3.8 GB weights + KV cache of 14.3 kB per token; 128 trajectories of 1,536 tokens would fill 2.8 GB, "
        "and there is room for 4,477,691 tokens"
    )
    eight = on_gpus(
        tmp_path, rollout={"backend": "sglang", "num_servers": 1, "sglang": {"args": {"tp_size": 8}}}
    )
    copied = server_memory(eight)
    assert copied is not None
    assert copied.cache_per_token == server.cache_per_token, "eight ranks keep copies of four heads"


def test_what_does_not_fit_is_refused_with_its_largest_parts_and_what_would_fit(tmp_path: Path) -> None:
    fits = {"gpu_memory_gb": 80}
    refuse_too_large(on_gpus(tmp_path))
    refuse_too_large(on_gpus(tmp_path, cluster=fits))
    large = on_gpus(tmp_path, cluster=fits, learner={"gradient_checkpointing": False})
    with pytest.raises(ConfigError) as refused:
        refuse_too_large(large)
    [line] = str(refused.value).splitlines()
    assert line.startswith("a GPU of pool learning needs about 1")
    assert "but cluster.gpu_memory_gb=80: actor's activations 1" in line
    assert "; it would fit with learner.gradient_checkpointing=true, or learner.microbatch_tokens=" in line


def test_every_cure_that_is_named_works(tmp_path: Path) -> None:
    alone = {
        "pools": {"learning": {"gpus_per_node": 1}, "serving": {"gpus_per_node": 8}},
        "roles": {"actor": "learning", "servers": "serving"},
    }
    small = on_gpus(tmp_path, cluster={"gpu_memory_gb": 80}, placement=alone, learner={"world_size": 1})
    with pytest.raises(ConfigError) as refused:
        refuse_too_large(small)
    cures = str(refused.value).partition("it would fit with ")[2]
    assert cures == (
        "learner.offload=parameters, or learner.world_size=4 on as many GPUs, or model.lora.rank=32"
    )
    refuse_too_large(
        on_gpus(
            tmp_path,
            cluster={"gpu_memory_gb": 80},
            placement=alone,
            learner={"world_size": 1, "offload": "parameters"},
        )
    )
    four = {**alone, "pools": {"learning": {"gpus_per_node": 4}, "serving": {"gpus_per_node": 8}}}
    refuse_too_large(
        on_gpus(tmp_path, cluster={"gpu_memory_gb": 80}, placement=four, learner={"world_size": 4})
    )


def test_two_changes_are_named_where_one_is_too_little(tmp_path: Path) -> None:
    two = {**APART, "pools": {"learning": {"gpus_per_node": 2}, "serving": {"gpus_per_node": 8}}}
    config = on_gpus(
        tmp_path,
        cluster={"gpu_memory_gb": 80},
        placement=two,
        learner={"world_size": 2, "gradient_checkpointing": False},
    )
    with pytest.raises(ConfigError, match=r"learner\.gradient_checkpointing=true and learner\.offload="):
        refuse_too_large(config)


def test_servers_without_room_for_one_trajectory_are_refused(tmp_path: Path) -> None:
    config = on_gpus(
        tmp_path,
        cluster={"gpu_memory_gb": 20},
        agent={"max_response_tokens": 40_000},
        learner={"offload": "parameters", "microbatch_tokens": 1024, "sequence_parallel": 4},
        rollout={"num_servers": 8, "sglang": {"args": {"mem_fraction_static": 0.8}}},
    )
    with pytest.raises(ConfigError, match=r"has room for [\d,]+ tokens of KV cache|pool learning"):
        refuse_too_large(config)


def test_roles_that_share_a_gpu_add_up_unless_servers_release_theirs(tmp_path: Path) -> None:
    cluster = {"gpu_memory_gb": 80}
    learner = {"microbatch_tokens": 4096}
    rollout = {"num_servers": 8, "sglang": {"args": {"mem_fraction_static": 0.7}}}
    shared = on_gpus(tmp_path, cluster=cluster, placement=SHARED, learner=learner, rollout=rollout)
    with pytest.raises(ConfigError, match="a GPU of pool all needs about"):
        refuse_too_large(shared)
    refuse_too_large(
        on_gpus(
            tmp_path,
            cluster=cluster,
            placement=SHARED,
            learner=learner,
            rollout={**rollout, "colocated": True},
        )
    )


def test_servers_of_frozen_models_add_up_and_release_nothing(tmp_path: Path) -> None:
    tiny = {**QWEN7, "num_hidden_layers": 14}
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps(tiny))
    old = {"model": {"path": str(tmp_path / "small")}, "num_servers": 8, "sglang_args": {"tp_size": 2}}
    given = {"agent": {"opponents": {"old": old}}, "cluster": {"gpu_memory_gb": 80}}
    own = {"backend": "sglang", "num_servers": 8, "sglang": {"args": {"mem_fraction_static": 0.5}}}
    config = on_gpus(tmp_path, rollout=own, **given)
    # Half of 28 layers of 233 million parameters and both embeddings, over two ranks, two bytes each.
    assert memory_lines(config)[2][0] == "a frozen server's GPU"
    assert memory_lines(config)[2][1].startswith("agent.opponents.old: 4.4 GB weights + KV cache of 14.3 kB")
    assert lines_of(config)["GPU of pool serving"] == "about 80.0 GB, 100% of 80.0 GB"
    refuse_too_large(config)
    own["sglang"] = {"args": {"mem_fraction_static": 0.6}}
    config = on_gpus(tmp_path, rollout=own, **given)
    with pytest.raises(ConfigError, match=r"a GPU of pool serving needs about 96\.0 GB"):
        refuse_too_large(config)
    old["sglang_args"] = {"tp_size": 1, "mem_fraction_static": 0.3}
    refuse_too_large(on_gpus(tmp_path, rollout=own, **given))
    colocated = {**given, "placement": SHARED, "cluster": {"gpu_memory_gb": 100}}
    own["colocated"] = True
    with_old = on_gpus(tmp_path, rollout=own, **colocated)
    without = on_gpus(tmp_path, rollout=own, **(colocated | {"agent": {}}))
    used = [float(lines_of(one)["GPU of pool all"].split()[1]) for one in (with_old, without)]
    assert used[0] - used[1] == pytest.approx(30, abs=0.2)


def test_critic_and_reward_model_have_lines_of_their_own(tmp_path: Path) -> None:
    config = on_gpus(
        tmp_path,
        algorithm={"advantage": "gae", "kl": {"coefficient": 0.1}},
        reward={"terms": {"helpful": {"reward": "reward_model"}}},
        reward_model={"model": {"path": str(tmp_path), "dtype": "bfloat16"}, "world_size": 8},
        learner={"offload": "optimizer"},
    )
    lines = lines_of(config)
    gb = NUM_7B / 8 / 1e9
    assert parts_of(lines["a learner rank"])["frozen weights"] == pytest.approx(2 * gb, abs=0.06)
    assert "logits" not in lines["a critic rank"]
    assert parts_of(lines["a reward model's rank"])["weights"] == pytest.approx(2 * gb, abs=0.06)
    assert f"and {8 * gb:.1f} optimizer state in the host's memory" in lines.values()
    actor, critic, judge = (rank_memory(config, role) for role in ("actor", "critic", "reward_model"))  # type: ignore[arg-type]
    assert actor is not None
    assert critic is not None
    assert judge is not None
    state = actor.state_bytes + critic.state_bytes + judge.state_bytes
    most = max(own.working_bytes for own in (actor, critic, judge))
    assert lines["GPU of pool learning"] == f"about {(state + most) / 1e9:.1f} GB"


def test_of_an_unknown_model_nothing_is_refused(tmp_path: Path) -> None:
    config = on_gpus(tmp_path, {"model_type": "gpt2"}, cluster={"gpu_memory_gb": 1})
    refuse_too_large(config)
    assert "not known" in lines_of(config)["a learner rank"]
    assert "\nMemory\n" not in explain(Config()), "no GPUs"


def test_no_gpu_has_no_memory() -> None:
    with pytest.raises(ValidationError, match="gpu_memory_gb"):
        Config.model_validate({"cluster": {"gpu_memory_gb": 0}})


def test_the_command_explains_and_then_refuses(tmp_path: Path) -> None:
    config = on_gpus(tmp_path, cluster={"gpu_memory_gb": 20}).model_dump(mode="json", exclude_unset=True)
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(config))
    explained = CliRunner().invoke(app, ["config", "explain", str(file)])
    assert "\nMemory\n  a learner rank " in explained.stdout
    assert isinstance(explained.exception, ConfigError), "whose exit code is 2"
    fits = CliRunner().invoke(app, ["config", "explain", str(file), "cluster.gpu_memory_gb=null"])
    assert fits.exit_code == 0, fits.output
