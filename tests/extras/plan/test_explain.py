"""The arithmetic that `agentrl config explain` prints, against numbers computed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config.explain_inputs import context_warning
from agentrl.config.schema import Config
from agentrl.extras.plan.explain import RunSize, explain, find_warnings
from agentrl.extras.plan.explain_cpu import cpu_model, memory_warning
from agentrl.extras.plan.input_warnings import input_warnings


def config(**sections: dict[str, Any]) -> Config:
    return Config.model_validate(sections)


HAND = config(
    data={"max_prompt_tokens": 200, "val_files": ["val.parquet"], "train_files": ["train.parquet"]},
    agent={"max_response_tokens": 300, "max_turns": 4},
    rollout={"group_size": 8, "num_actors": 2, "max_concurrent_trajectories": 100},
    buffer={"groups_per_step": 16, "max_staleness": 2},
    learner={"world_size": 2, "microbatch_tokens": 2048, "minibatches_per_step": 4, "epochs_per_step": 2},
    trainer={"total_epochs": 3, "test_freq": 5},
)


def test_numbers_by_hand() -> None:
    numbers = RunSize.of(HAND)
    assert numbers.trajectories == 128  # 16 groups of 8
    assert numbers.tokens == 64_000  # 128 x (200 + 300)
    assert numbers.updates == 8  # 4 minibatches x 2 epochs
    assert numbers.trajectories_per_rank_and_update == 16  # 4 groups of 8 over 2 ranks
    assert numbers.microbatches_per_rank_and_update == 4  # 4 trajectories of 500 fit into 2048
    assert numbers.capacity == 200
    assert numbers.admitted_groups == 48  # (2 + 1) x 16


def test_text_by_hand() -> None:
    lines = [" ".join(line.split()) for line in explain(HAND, num_train_rows=1600).splitlines()]
    for line in (
        "tasks (groups) 16",
        "trajectories 128 = 16 groups x 8",
        "tokens at most 64,000 = 128 x 500 (prompt + response)",
        "optimizer updates 8 = 4 per epoch x 2 epochs",
        "groups admitted 48 leased or ready = (2 + 1) x 16, 384 trajectories",
        "trajectories in flight at most 200 (room for 200 = 2 actors x 100)",
        "a publish abort: at most 100,000 tokens are prefilled anew = 200 trajectories in flight x 500",
        "one epoch 100.0 steps = 1,600 rows / 16",
        "steps 300 = 3 epochs of 1,600 rows",
        "importance weight proximal / behavior per token, at most 2",
    ):
        assert line in lines
    assert not list(find_warnings(HAND, num_train_rows=1600))


def test_a_reward_model_is_told() -> None:
    asked = config(
        reward={"terms": {"helpful": {"reward": "reward_model"}}},
        reward_model={"model": {"path": "judge"}, "max_tokens": 2048},
    )
    [line] = [
        " ".join(line.split())
        for line in explain(asked).splitlines()
        if line.strip().startswith("reward model")
    ]
    assert line == (
        "reward model judge on 1 rank (float32) scores every trajectory, at most 2,048 tokens; longer ones "
        "are cut at the beginning; asked by reward.terms.helpful"
    )
    assert "reward model" not in explain(HAND)


@pytest.mark.parametrize(
    ("sections", "mode", "weight"),
    [
        ({}, "decoupled (auto)", "proximal / behavior"),
        ({"buffer": {"max_staleness": 0}}, "on_policy (auto)", "none enters the loss"),
        (
            {"buffer": {"max_staleness": 0}, "learner": {"epochs_per_step": 2}},
            "decoupled (auto)",
            "proximal / behavior",
        ),
        ({"algorithm": {"mode": "bypass"}}, "bypass:", "none enters the loss"),
        ({"algorithm": {"correction": {"weight": "none"}}}, "decoupled (auto)", "not corrected"),
    ],
)
def test_the_mode_and_its_weight_are_said(sections: dict[str, Any], mode: str, weight: str) -> None:
    lines = explain(config(**sections)).splitlines()
    assert mode in next(line for line in lines if "policy mode" in line)
    assert weight in next(line for line in lines if "importance weight" in line)


def test_every_stage_of_the_correction_is_said() -> None:
    stages = {
        "far": {"lower": 0.5, "upper": 2.0},
        "spiky": {"statistic": "k3", "level": "sequence_max", "upper": 0.1},
    }
    correction = {
        "weight": "geometric",
        "floor": 0.2,
        "cap": 3.0,
        "outside": "mask",
        "self_normalize": True,
        "reject": stages,
    }
    correction |= {"m2po_threshold": 0.04, "opsm_delta": 0.1, "denominator": "original"}
    text = " ".join(
        explain(config(algorithm={"correction": correction}, buffer={"drop_constant_groups": True})).split()
    )
    for part in (
        "proximal / behavior in the geometric mean of the sequence, at least 0.2, at most 3, 0 outside, mean "
        "1 over the update",
        "rejected far: rho' in the mean of a sequence below 0.5 or above 2; rho' = proximal / behavior",
        "spiky: rho' - 1 - log rho' of the most extreme token of a sequence above 0.1",
        "m2po: the largest (log rho')^2 until their mean is at most 0.04",
        "opsm: sequences with A < 0 and a mean log(behavior / policy) above 0.1",
        "token_mean, rejected tokens counted",
        "without variance are dropped and replaced",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("algorithm", "part"),
    [
        (
            {"mode": "bypass", "correction": {"reject": {"far": {"upper": 2.0}}}},
            "rho' = learner at the start of the step / behavior",
        ),
        ({"policy_loss": "reinforce"}, "reinforce, weighted by the ratio per token, without a bound"),
        (
            {
                "policy_loss": "reinforce",
                "reinforce": {"weight": "sequence", "cap": 2.0, "floor": 0.5, "outside": "mask"},
            },
            "weighted by the ratio multiplied over the sequence, at least 0.5, at most 2, 0 outside",
        ),
        ({"policy_loss": "dppo_tv"}, "gain 0.2 of its probability, and is weighted by a ratio of at most 20"),
        ({"policy_loss": "dppo_tv", "dppo_tv": {"cap": None}}, "gain 0.2 of its probability"),
    ],
)
def test_what_bounds_the_ratio_is_said(algorithm: dict[str, Any], part: str) -> None:
    assert part in " ".join(explain(config(algorithm=algorithm)).split())


@pytest.mark.parametrize(
    ("sections", "word"),
    [
        ({"rollout": {"max_concurrent_trajectories": 4}}, "its members wait for each other"),
        ({"rollout": {"max_concurrent_trajectories": 100}}, "less than one batch of 128"),
        ({"rollout": {"embedded": {"num_blocks": 8}}}, "cache of 256 tokens"),
        ({"agent": {"max_turn_tokens": 2000}}, "agent.max_turn_tokens=2000"),
        ({"agent": {"trajectory_timeout_s": 20}}, "agent.tool_timeout_s=30"),
        ({"buffer": {"lease_timeout_s": 100}}, "(1 x agent.trajectory_timeout_s=600)"),
        ({"rollout": {"group_size": 1000, "max_concurrent_trajectories": 64}}, "(16 x agent.trajectory"),
        ({"learner": {"microbatch_tokens": 1000}}, "learner.microbatch_tokens=1000"),
        ({"learner": {"minibatches_per_step": 3}}, "unequal batches"),
        ({"learner": {"world_size": 200}}, "nothing to learn from"),
        ({"algorithm": {"constant_length": 100}}, "algorithm.constant_length=100"),
        ({"algorithm": {"correction": {"weight": "none"}}}, "old tokens"),
        ({"algorithm": {"gamma": 0.9}}, "algorithm.gamma=0.9 has no effect with algorithm.advantage=grpo"),
        (
            {"algorithm": {"advantage": "reinforce_plus_plus", "singleton": "raw"}},
            "algorithm.singleton=raw has no effect",
        ),
        ({"algorithm": {"correction": {"max_lag": 1}}}, "algorithm.correction.max_lag=1 has no effect"),
        ({"algorithm": {"mode": "bypass", "correction": {"floor": 0.5}}}, "no weight enters the loss"),
        ({"algorithm": {"policy_loss": "gpg"}, "learner": {"epochs_per_step": 2}}, "no trust region"),
        ({"algorithm": {"policy_loss": "gspo", "aggregation": "sequence_mean_token_mean"}}, "clips nothing"),
        ({"algorithm": {"policy_loss": "gspo", "clip_high": 4e-4}}, "weighs a sequence by its length"),
        (
            {"algorithm": {"sapo": {"tau_negative": 2.0}}},
            "algorithm.sapo have no effect with algorithm.policy_loss=ppo_clip",
        ),
        ({"algorithm": {"kl": {"off_policy_ratio": True}}}, "algorithm.kl.off_policy_ratio has no effect"),
        ({"eval": {"n": 4}}, "greedy attempts"),
        ({"rollout": {"greedy_baseline": "always"}}, "grpo, which does not use the greedy reward"),
        ({"algorithm": {"lam": 0.9}}, "algorithm.lam=0.9 has no effect with algorithm.advantage=grpo"),
        ({"algorithm": {"step_weight": 2.0}}, "step_weight=2.0 has no effect with algorithm.advantage=grpo"),
        ({"eval": {"top_p": 0.9}}, "no effect on greedy validation"),
        ({"trainer": {"test_freq": 5}}, "nothing to validate on"),
        ({"trainer": {"val_only": True}}, "nothing to validate on"),
        ({"trainer": {"steps": 1000}}, "a crash in 1000 steps"),
    ],
)
def test_each_warning_appears_where_it_should_and_only_there(sections: dict[str, Any], word: str) -> None:
    assert any(word in warning for warning in find_warnings(config(**sections)))
    assert not list(find_warnings(Config()))


def test_too_few_rows_are_said() -> None:
    assert any("15 training rows" in warning for warning in find_warnings(Config(), num_train_rows=15))
    assert not list(find_warnings(Config(), num_train_rows=16))


sizes = st.integers(1, 40)


@given(
    groups=sizes,
    size=sizes,
    ranks=sizes,
    minibatches=sizes,
    staleness=st.integers(0, 5),
    budget=st.integers(1, 5000),
)
def test_bounds_hold_whatever_the_sizes(
    groups: int, size: int, ranks: int, minibatches: int, staleness: int, budget: int
) -> None:
    """Packing full trajectories one after the other never needs more microbatches than promised."""
    minibatches = min(minibatches, groups)
    numbers = RunSize.of(
        config(
            algorithm={"singleton": "raw"},
            rollout={"group_size": size},
            buffer={"groups_per_step": groups, "max_staleness": staleness},
            learner={"world_size": ranks, "minibatches_per_step": minibatches, "microbatch_tokens": budget},
        )
    )
    longest = numbers.longest_tokens
    largest = max(groups // minibatches + (i < groups % minibatches) for i in range(minibatches)) * size
    share = max(len(range(rank, largest, ranks)) for rank in range(ranks))
    microbatches, room = 0, 0
    for _ in range(share):
        if room < longest:
            microbatches, room = microbatches + 1, max(budget, longest)
        room -= longest
    assert numbers.microbatches_per_rank_and_update == microbatches
    assert numbers.admitted_groups == sum(groups for _ in range(staleness + 1))


def test_an_estimator_is_warned_of_no_key_that_it_reads() -> None:
    with_critic = [
        {"advantage": name, "gamma": 0.9, "lam": 0.9, "bootstrap_truncated": True}
        for name in ("gae", "gae_turn")
    ]
    others = [
        {"advantage": "turn_group", "gamma": 0.9},
        {"advantage": "own.py:estimator", "lam": 0.9, "step_weight": 0.1},
    ]
    for algorithm in (*with_critic, *others):
        assert not list(find_warnings(config(algorithm=algorithm)))


VALIDATED = {"val_files": ["a.parquet"]}


@pytest.mark.parametrize(
    ("trainer", "said"),
    [
        (
            {"test_freq": -1, "val_before_train": False},
            "none: trainer.test_freq=-1 and trainer.val_before_train=false",
        ),
        ({"test_freq": -1, "val_before_train": True}, "before the first step; "),
        ({"test_freq": 5, "val_before_train": False}, "every 5 steps, at the end; "),
        ({"test_freq": 5, "val_before_train": True}, "before the first step, every 5 steps, at the end; "),
        ({"val_only": True}, "of the model as it is; "),
    ],
)
def test_validations_are_told_as_they_will_be_made(trainer, said):
    config = Config.model_validate({"data": VALIDATED, "trainer": trainer})
    [line] = [line for line in explain(config).splitlines() if line.strip().startswith("validation ")]
    assert line.split("validation", 1)[1].strip().startswith(said)
    assert ("never used" in explain(config)) is said.startswith("none")


@pytest.mark.parametrize(
    ("sections", "warning"),
    [
        (
            {"model": {"path": "Qwen/Qwen3-Next-80B-A3B"}},
            "model.path=Qwen/Qwen3-Next-80B-A3B will not run: it is a mixture of experts",
        ),
        (
            {"model": {"path": "Qwen/Qwen3-8B-FP8"}},
            "model.path=Qwen/Qwen3-8B-FP8 will not run: it is quantized",
        ),
        ({"model": {"path": "Qwen/Qwen3-VL-8B-Instruct"}}, "it is a model for images"),
        (
            {"rollout": {"backend": "sglang", "sglang": {"args": {"quantization": "fp8"}}}},
            "quantization=fp8 will not run",
        ),
        ({"rollout": {"backend": "sglang", "sglang": {"args": {"ep_size": 2}}}}, "ep_size is not tested"),
        (
            {
                "rollout": {
                    "backend": "sglang",
                    "num_servers": 2,
                    "sglang": {"args": {"tp_size": 2, "pp_size": 2}},
                },
                "placement": {
                    "pools": {"learning": {"gpus_per_node": 1}, "serving": {"gpus_per_node": 4}},
                    "roles": {"servers": "serving", "actor": "learning"},
                },
            },
            "asks for 4 GPUs per server (tp_size x pp_size), but each has 2",
        ),
    ],
)
def test_what_an_import_calls_an_obstacle_is_warned_of(sections, warning):
    def found(sections):
        warnings = find_warnings(Config.model_validate(sections))
        return [line for line in warnings if "will not run" in line or "not tested" in line]

    assert any(warning in line for line in found(sections)), found(sections)
    assert (
        found(
            {
                "model": {"path": "Qwen/Qwen2.5-7B"},
                "rollout": {"backend": "sglang", "sglang": {"args": {"tp_size": 1}}},
            }
        )
        == []
    )


SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


def on_cpu(folder: Path, sizes: dict[str, Any] = SMOLLM2, **sections: dict[str, Any]) -> Config:
    (folder / "config.json").write_text(json.dumps(sizes))
    return config(
        **{
            "model": {"path": str(folder), "dtype": "float32"},
            "data": {"max_prompt_tokens": 128},
            "agent": {"max_response_tokens": 112},
            "rollout": {"group_size": 8},
            "buffer": {"groups_per_step": 4},
            "learner": {"microbatch_tokens": 1024},
        }
        | sections
    )


def test_a_real_model_on_cpus_by_hand(tmp_path: Path) -> None:
    size = cpu_model(on_cpu(tmp_path))
    assert size is not None
    assert size.num_parameters == 134_515_008  # as transformers counts them
    assert size.kv_values_per_token == 30 * 2 * 3 * 64
    lines = [" ".join(line.split()) for line in explain(on_cpu(tmp_path), flops_per_s=90e9).splitlines()]
    for line in (
        "model 134.5 million parameters",
        # 16 x 134.5e6; 1.3 x 1,024 x (30 x 46.8e3 + 30e3); 6 x 2^24 x 4; 4 x 49,152 x 576 bytes
        "memory of a rank about 4.7 GiB = 2.0 GiB weights, gradients, AdamW's moments + 1.8 GiB activations "
        "of 1,024 tokens + 0.4 GiB logits + 0.1 GiB gradient of the head + 0.5 GiB process",
        "memory of a server about 2.7 GiB = 0.5 GiB weights, up to three times in a publish + 0.7 GiB KV "
        "cache of 16,384 tokens + 0.5 GiB process",
        # and 4 x 0.45 GiB: driver, Ray, replay buffer, one rollout actor
        "memory of the run about 9.2 GiB",
        # 72e9 / (6 x 134.5e6); 32 x 240 tokens
        "time of the updates about 89 tokens/s; at most 86 s per step, if every trajectory is full",
        # 18e9 / (2 x 134.5e6); 32 x 112 tokens
        "time of sampling about 67 tokens/s; at most 54 s per step",
    ):
        assert line in lines, lines
    untimed = explain(on_cpu(tmp_path))
    assert "memory of a rank" in untimed
    assert "GFLOP" not in untimed


def test_an_adapter_and_recomputed_activations_need_less(tmp_path: Path) -> None:
    lora = explain(
        on_cpu(
            tmp_path,
            model={"path": str(tmp_path), "dtype": "float32", "lora": {"rank": 16}},
            learner={"microbatch_tokens": 1024, "gradient_checkpointing": True},
        )
    )
    assert (
        "about 1.7 GiB = 0.1 GiB adapter with its gradients and AdamW's moments + 0.5 GiB frozen weights + "
        "0.3 GiB activations"
    ) in " ".join(lora.split())


def test_a_run_that_does_not_fit_into_the_memory_is_warned_of(tmp_path: Path) -> None:
    config = on_cpu(tmp_path)
    assert memory_warning(config, granted_bytes=10 << 30) is None
    assert memory_warning(config, granted_bytes=7 << 30) == (
        "this run needs about 9.2 GiB of memory: a rank 1 x 4.7 GiB, a server 1 x 2.7 GiB, the others "
        "1 x 1.8 GiB; but the machine grants 7.0 GiB: lower learner.microbatch_tokens or "
        "rollout.embedded.num_blocks, or set model.lora.rank"
    )
    joined = on_cpu(tmp_path, cluster={"address": "auto"})
    assert memory_warning(joined, granted_bytes=1) is None, "its processes may be elsewhere"
    assert memory_warning(HAND, granted_bytes=1) is None, "a model of unknown size"


def test_frozen_models_are_told_and_counted(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_text(json.dumps(SMOLLM2 | {"num_hidden_layers": 15}))
    started = {"model": {"path": str(tmp_path / "old")}, "num_servers": 2}
    attached = {"urls": ["http://127.0.0.1:1"]}
    agent = {"max_response_tokens": 112, "opponents": {"old": started, "far": attached}}
    asked = on_cpu(
        tmp_path, agent=agent, algorithm={"distillation": {"servers": started | {"num_servers": 1}}}
    )
    lines = [" ".join(line.split()) for line in explain(asked).splitlines()]
    folder = tmp_path / "old"
    for line in (
        f"agent.opponents.old {folder} on 2 servers that the run starts",
        "agent.opponents.far attached: http://127.0.0.1:1",
        f"algorithm.distillation.servers {folder} on 1 server that the run starts",
        "pool main no GPU: 1 x actor, 1 x servers, 3 x frozen_servers",
        # 15 x 3.54e6 + 28.3e6 parameters of 4 bytes; half of the cache of the policy
        "memory of a server of opponent_old 2 x about 1.7 GiB = 0.3 GiB weights, up to three times in a "
        "publish + 0.4 GiB KV cache of 16,384 tokens + 0.5 GiB process",
    ):
        assert line in lines, lines
    agent = {"max_response_tokens": 112, "opponents": {"old": started, "past": {"refresh_steps": 20}}}
    past = on_cpu(tmp_path, agent=agent)
    follows = "on 1 server that the run starts; the policy takes its place every 20 steps"
    assert f"agent.opponents.past {tmp_path} {follows}" in " ".join(explain(past).split())
    short = on_cpu(tmp_path, agent=agent, trainer={"steps": 20})
    assert f"{follows}, not before this run of 20 steps ends" in " ".join(explain(short).split())
    longer = on_cpu(tmp_path, agent=agent, trainer={"steps": 21})
    assert f"{follows}, not" not in " ".join(explain(longer).split())
    only = on_cpu(tmp_path, agent=agent, trainer={"val_only": True})
    assert [plan.key for plan in only.frozen_plans] == ["agent.opponents.old", "agent.opponents.past"]


def test_a_reference_and_a_critic_are_counted(tmp_path: Path) -> None:
    """Four bytes, or two in bfloat16, and 16 bytes for each of 134.5 million parameters."""
    algorithm = {"kl": {"coefficient": 0.1}, "advantage": "gae"}
    for dtype, gib in (("float32", "0.5"), ("bfloat16", "0.3")):
        model = {"path": str(tmp_path), "dtype": dtype}
        both = on_cpu(tmp_path, algorithm=algorithm, model=model)
        said = " ".join(explain(both).split())
        assert f"AdamW's moments + {gib} GiB frozen weights +" in said
        assert "+ 2.0 GiB critic +" in said


def test_ranks_share_what_is_frozen_too(tmp_path: Path) -> None:
    """Half of 0.5 GiB below an adapter, on each of two ranks."""
    model = {"path": str(tmp_path), "dtype": "float32", "lora": {"rank": 16}}
    two = on_cpu(tmp_path, model=model, learner={"microbatch_tokens": 1024, "world_size": 2})
    assert "= 0.3 GiB frozen weights +" in " ".join(explain(two).split())


@pytest.mark.parametrize("broken", [{}, {"model_type": "mamba"}, SMOLLM2 | {"vocab_size": "many"}])
def test_of_an_unknown_model_nothing_is_said(tmp_path: Path, broken: dict[str, Any]) -> None:
    assert "On CPUs" not in explain(on_cpu(tmp_path, broken))
    assert "On CPUs" not in explain(HAND)


def test_on_gpus_nothing_is_said_about_cpus(tmp_path: Path) -> None:
    placed = on_cpu(tmp_path, placement={"pools": {"main": {"gpus_per_node": 1}}})
    assert cpu_model(placed) is None


def publish_text(**sections: dict[str, Any]) -> str:
    [line] = [line for line in explain(config(**sections)).splitlines() if line.startswith("  a publish ")]
    return " ".join(line.split()).removeprefix("a publish ")


def test_what_a_publish_costs_in_each_pause_mode() -> None:
    advice = "rollout.weights.pause_mode=in_place prefills nothing anew"
    late: dict[str, Any] = {"max_staleness": 1, "groups_per_step": 4}
    size: dict[str, Any] = {"backend": "sglang", "group_size": 2, "max_concurrent_trajectories": 1000}
    lengths = {"data": {"max_prompt_tokens": 100}, "agent": {"max_response_tokens": 900}}

    def told(mode: str, staleness: dict[str, Any] = late, **more: dict[str, Any]) -> str:
        return publish_text(
            buffer=staleness, rollout={**size, "weights": {"pause_mode": mode}}, **lengths, **more
        )

    # 2 x 4 groups of 2 are admitted
    figures = "at most 16,000 tokens are prefilled anew = 16 trajectories in flight x 1,000"
    assert told("auto").startswith(f"retract: {figures}; {advice}")
    assert told("abort").startswith(f"abort: {figures}; {advice}")
    assert told("in_place").startswith("in_place: nothing is prefilled anew")
    assert advice not in told("retract", model={"lora": {"rank": 8}})
    assert told("retract", {"max_staleness": 0}) == "no trajectory is in flight, so nothing is prefilled anew"


def test_inputs_that_are_missing_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert explain(Config()).count("\n  - ") == 2
    assert list(input_warnings("", (), is_prepared=True)) == [
        "model.path is empty: set it to the folder of a model in Hugging Face format, or to a hub id",
        "data.train_files is empty: there is nothing to train on",
    ]
    lost = ["model.path=runs/nowhere does not exist here", "data.train_files: a.parquet does not exist here"]
    assert list(input_warnings("runs/nowhere", ("a.parquet",), is_prepared=False)) == lost
    assert list(input_warnings("./nowhere", ("a.parquet",), is_prepared=False))[:1] == [
        "model.path=./nowhere does not exist here"
    ]
    assert not list(input_warnings("runs/nowhere", ("a.parquet",), is_prepared=True))
    (tmp_path / "a.parquet").touch()
    for there in ("runs", "Qwen/Qwen3-8B", "s3://bucket/model"):
        assert not list(input_warnings(there, ("a.parquet", "s3://b/c.parquet"), is_prepared=False))
    assert not list(input_warnings(None, ("a.parquet",), is_prepared=False))


@pytest.mark.parametrize(
    ("prompt", "response", "end"),
    [
        (1000, 24, None),
        (1000, 25, ": after the longest prompt, 24 tokens are left of the response"),
        (1024, 1, ": no room is left for an answer"),
    ],
)
def test_what_does_not_fit_into_the_context_is_said(tmp_path: Path, prompt, response, end) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"max_position_embeddings": 1024}}')
    given = config(
        model={"path": str(tmp_path)},
        data={"max_prompt_tokens": prompt},
        agent={"max_response_tokens": response, "max_turn_tokens": 1},
    )
    said = context_warning(given)
    assert said is None if end is None else said is not None and said.endswith(end)
    assert end is None or f"{end}" in explain(given)
