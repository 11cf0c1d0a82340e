"""Plans: they pass the schema, fit their GPUs, and get no slower with more of them; bad input is one line."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.config.compose import load_config
from agentrl.config.schema import Config
from agentrl.errors import ConfigError
from agentrl.extras.plan.command import base_values
from agentrl.extras.plan.estimate import StepEstimate
from agentrl.extras.plan.explain_memory import GB, memory_lines, rank_memory, refuse_too_large, server_memory
from agentrl.extras.plan.gpus import GPUS
from agentrl.extras.plan.layouts import FrozenNeeds, splits, splits_beside
from agentrl.extras.plan.measure import Simulated
from agentrl.extras.plan.model_presets import PRESETS, known_size
from agentrl.extras.plan.plan import Plan, make_plan
from agentrl.extras.plan.plan_text import Checked, check, plan_lines
from agentrl.extras.plan.scaled import MOST_ATTEMPTS, scaled, whole
from agentrl.extras.plan.simulate import simulate
from agentrl.extras.plan.written import config_yaml

MODELS = ("qwen2.5-1.5b", "qwen3-8b", "qwen2.5-32b", "qwen3-30b-a3b", "llama-3.1-70b")


def base(model: str = "qwen3-8b", gpu: str = "h100", context: int = 16384, groups: int = 32) -> Config:
    return Config.model_validate(base_values(model, gpu=gpu, context=context, groups=groups))


@cache
def planned(model: str, gpu: str, num_gpus: int, context: int) -> Plan | None:
    """Return the plan; None if nothing fits."""
    config, size = base(model, gpu, context), known_size(model)
    assert size is not None
    try:
        return make_plan(config, size, num_gpus)
    except ConfigError:
        return None


gpu_counts = st.sampled_from([2, 4, 7, 8, 16, 24, 32, 64])


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(MODELS),
    st.sampled_from(["h100", "h200", "b200"]),
    gpu_counts,
    st.sampled_from([4096, 32768]),
)
def test_a_plan_fits(model: str, gpu: str, num_gpus: int, context: int) -> None:
    plan = planned(model, gpu, num_gpus, context)
    if plan is None:
        return
    config = plan.config
    refuse_too_large(config)
    rank, server = rank_memory(config, "actor"), server_memory(config)
    assert rank is not None
    assert server is not None
    assert rank.peak_bytes <= GPUS[gpu].memory_gb * GB
    assert server.num_cached_tokens(GPUS[gpu].memory_gb * GB) >= context
    pools = config.placement.pools
    assert sum(pool.num_gpus for pool in pools.values()) <= num_gpus
    assert pools["learning"].num_gpus == config.learner.world_size
    assert pools["serving"].num_gpus == config.rollout.num_started * config.simulation.server.gpus
    assert config.data.max_prompt_tokens + config.agent.max_response_tokens == context


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(MODELS), st.sampled_from(["h100", "b200"]), gpu_counts, gpu_counts)
def test_more_gpus_never_predict_a_slower_step(model: str, gpu: str, one: int, other: int) -> None:
    fewer, more = (planned(model, gpu, num, 8192) for num in sorted((one, other)))
    if fewer is not None:
        assert more is not None
        assert more.best.estimate.step_s <= fewer.best.estimate.step_s


@given(st.integers(2, 80), st.integers(2, 80), st.sampled_from([4, 8]))
def test_fewer_gpus_have_fewer_splits(one: int, other: int, node: int) -> None:
    fewer, more = (set(splits(num, node)) for num in sorted((one, other)))
    assert fewer <= more
    assert all(own.learner.num_gpus + own.servers.num_gpus <= own.needs for own in more)


def test_the_written_config_loads_as_the_plan(tmp_path: Path) -> None:
    plan = planned("qwen3-30b-a3b", "h100", 64, 32768)
    assert plan is not None
    file = tmp_path / "plan.yaml"
    file.write_text(config_yaml(plan.config, plan_lines(plan, [], num_gpus=64)))
    loaded = load_config(str(file))
    assert loaded == plan.config
    assert loaded.learner.expert_parallel > 1
    assert dict(memory_lines(loaded))["a server's GPU"].endswith("tokens")


FROZEN = (
    {"agent": {"opponents": {"past": {"refresh_steps": 10}}}},
    {
        "agent": {
            "opponents": {
                "a": {"model": {"path": "qwen2.5-32b"}, "num_servers": 2},
                "b": {"refresh_steps": 5},
            }
        }
    },
    {"algorithm": {"distillation": {"coefficient": 1.0, "servers": {"model": {"path": "qwen3-14b"}}}}},
)


@cache
def planned_beside(index: int, num_gpus: int) -> Plan | None:
    values = base_values("qwen3-8b", context=8192, groups=32)
    own = FROZEN[index]
    config = Config.model_validate({**values, **own, "agent": {**values["agent"], **own.get("agent", {})}})
    try:
        return make_plan(config, _size("qwen3-8b"), num_gpus)
    except ConfigError:
        return None


@settings(max_examples=12, deadline=None)
@given(st.integers(0, len(FROZEN) - 1), gpu_counts, gpu_counts)
def test_servers_of_frozen_models_have_gpus_of_their_own(index: int, one: int, other: int) -> None:
    fewer, more = (planned_beside(index, num) for num in sorted((one, other)))
    if fewer is not None:
        assert more is not None
        assert more.best.estimate.step_s <= fewer.best.estimate.step_s
    if more is None:
        return
    config = more.config
    refuse_too_large(config)
    pools, node = config.placement.pools, config.simulation.gpus_per_node
    plans = config.frozen_plans
    tp = {plan.rollout.sglang.args["tp_size"] for plan in plans}
    count = sum(plan.rollout.num_started for plan in plans)
    assert {pools["frozen"].num_gpus} == {count * own for own in tp}
    assert sum(pool.num_gpus for pool in pools.values()) <= max(one, other)
    nodes = [own for pool in pools.values() for own in [pool.gpus_per_node] * pool.nodes]
    assert max(nodes) <= node
    # First fit, as Ray packs them: whole groups of a node.
    free: list[int] = [node] * max(1, max(one, other) // node)
    for size in nodes:
        place = next(index for index, left in enumerate(free) if left >= size)
        free[place] -= size


@given(st.integers(1, 6), st.sampled_from([1, 2, 4]), st.integers(2, 80), st.integers(2, 80))
def test_fewer_gpus_have_fewer_splits_beside_frozen_servers(
    count: int, tp: int, one: int, other: int
) -> None:
    frozen = FrozenNeeds(count, tp)
    fewer, more = (set(splits_beside(frozen, num, 8)) for num in sorted((one, other)))
    assert fewer <= more
    for own in more:
        assert own.frozen is not None
        assert own.frozen.num_gpus == count * tp
        assert (
            own.learner.num_gpus + own.servers.num_gpus + own.frozen.num_gpus <= own.needs <= max(one, other)
        )


def test_a_plan_with_opponents_loads_and_names_their_servers(tmp_path: Path) -> None:
    plan = planned_beside(1, 16)
    assert plan is not None
    file = tmp_path / "plan.yaml"
    lines = plan_lines(plan, [], num_gpus=16)
    file.write_text(config_yaml(plan.config, lines))
    assert load_config(str(file)) == plan.config
    [line] = [line for line in lines if line.startswith("frozen ")]
    tp = plan.config.agent.opponents["a"].sglang_args["tp_size"]
    assert (
        line
        == f"frozen      3 servers of {tp}: agent.opponents.a, agent.opponents.b; no step waits for them here"
    )
    [checked] = check(replace(plan, others=()), plan.config)
    assert checked.simulated.step_s > 0


def test_512_gpus_are_planned_in_whole_nodes() -> None:
    plan = planned("qwen3-235b-a22b", "h200", 512, 32768)
    assert plan is not None
    assert plan.config.cluster.address == "auto"
    assert all(pool.gpus_per_node == 8 for pool in plan.config.placement.pools.values())
    assert plan.config.learner.fsdp.shard_size in (None, 64, 128)


def test_an_estimate_is_near_its_simulation() -> None:
    """Queues and idle servers are left out of it, so it is a little smaller."""
    plan = planned("qwen3-8b", "h100", 16, 8192)
    assert plan is not None
    [checked] = check(replace(plan, others=()), base(context=8192))
    assert plan.best.estimate.step_s == pytest.approx(checked.simulated.step_s, rel=0.25)


def test_a_smaller_simulation_has_the_same_load_per_server() -> None:
    plan = planned("qwen2.5-1.5b", "h100", 64, 4096)
    assert plan is not None
    whole = plan.config.model_copy(
        update={"buffer": plan.config.buffer.model_copy(update={"groups_per_step": 512})}
    )
    small, factor = scaled(whole)
    assert factor > 1
    attempts = small.buffer.groups_per_step * small.attempts_per_group
    assert attempts <= MOST_ATTEMPTS or small.rollout.num_started == 1
    assert small.buffer.groups_per_step * factor == pytest.approx(512)
    assert small.rollout.num_started * factor == pytest.approx(whole.rollout.num_started, rel=0.06)
    assert small.simulation.learner.mfu * factor == pytest.approx(whole.simulation.learner.mfu)


def test_a_plan_keeps_what_overrides_ask() -> None:
    """Also arguments of the servers, to which a plan adds its own."""
    asked = ["rollout.sglang.args={attention_backend: fa3}", "model.lora.rank=32", "simulation.turns.mean=3"]
    result = CliRunner().invoke(app, ["plan", "qwen3-8b", "--estimate", *asked], catch_exceptions=False)
    assert result.exit_code == 0
    for line in ("attention_backend: fa3", "tp_size: ", "rank: 32", "mean: 3.0"):
        assert line in result.stdout


def test_a_smaller_simulation_gives_back_the_tokens_of_the_run() -> None:
    """The same attempts per server and as slow a learner, and a fraction of the tokens."""
    plan = planned("qwen2.5-1.5b", "h100", 64, 4096)
    assert plan is not None
    small, factor = scaled(plan.config)
    found = simulate(small)
    own = whole(found, factor)
    assert own.tokens_per_s == pytest.approx(factor * found.tokens_per_s)
    tokens = own.tokens_per_step / (plan.config.buffer.groups_per_step * plan.config.attempts_per_group)
    assert tokens == pytest.approx(found.mean_tokens)


def test_the_command(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PRESETS["qwen2.5-0.5b"]))
    out = tmp_path / "plan.yaml"
    arguments = [
        *["--gpus", "8", "--context", "4096", "--groups", "4", "--group-size", "4", "--max-staleness", "1"],
        "--out",
        str(out),
    ]
    result = CliRunner().invoke(app, ["plan", str(folder), *arguments], catch_exceptions=False)
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"{folder} on 8 h100: ")
    assert sum(line.startswith(("* ", "  ")) for line in lines) >= 3
    config = load_config(str(out))
    assert (config.model.path, config.buffer.max_staleness) == (str(folder), 1)
    explained = CliRunner().invoke(app, ["config", "explain", str(out)], catch_exceptions=False)
    assert explained.exit_code == 0, explained.stdout
    tried = CliRunner().invoke(
        app, ["plan", "qwen3-8b", "--estimate", "simulation.turns.mean=3"], catch_exceptions=False
    )
    assert "    mean: 3.0" in tried.stdout.splitlines()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("gpt-9", r"model.path='gpt-9' has no config.json of a known architecture; .* qwen3-8b"),
        ("qwen3-8b --gpus 0", r"--gpus 0: learner and servers have GPUs of their own; use at least 2"),
        ("qwen3-8b --gpus 1000000", r"--gpus 1,000,000: use at most 4,096"),
        ("qwen3-8b --max-staleness -1", r"--max-staleness -1: use 0 or more"),
        ("qwen3-8b --groups 0", r"buffer.groups_per_step: 0 is wrong; it must be at least 1$"),
        ("qwen3-8b --group-size 1", r"rollout.group_size=1 with algorithm.advantage=grpo.* or gae$"),
        (
            "qwen3-8b learner.world_size=33",
            r"learner.world_size=33: a plan decides learner.world_size itself, here \d+; leave it out$",
        ),
        (
            "qwen3-8b buffer.max_staleness=7",
            r"a plan decides buffer.max_staleness itself, here \d; leave it out; use --max-staleness",
        ),
        ("qwen3-8b --out missing/plan.yaml", r"--out missing/plan.yaml: the folder missing does not exist"),
        ("qwen3-8b --gpus 12", r"--gpus 12: nodes have 8 GPUs; use 8 or 16"),
        ("qwen3-8b --gpus 1", r"--gpus 1: learner and servers have GPUs of their own; use at least 2"),
        ("qwen3-8b --context 1000", r"--context 1000 leaves nothing beside --prompt-tokens 1024"),
        ("qwen3-8b --answer-tokens 99999", r"--answer-tokens 99999: use at least 1 and at most .* = 15360"),
        ("qwen3-8b --out plan.txt", r"--out plan.txt: a config must end in .yaml"),
        (
            "qwen3-235b-a22b --gpus 16",
            r"the learner of 235.1 billion parameters has 8 h100, .*; use --gpus \d+$",
        ),
        (
            "qwen3-235b-a22b --gpu a100 --context 200000",
            r"no server of up to 8 a100 \(80 GB each\).* --gpu h200",
        ),
        ("qwen2.5-32b --gpus 2 --context 131072", r"use --gpus \d+$"),
        (
            "qwen3-8b agent.opponents.a.model.path=qwen3-8b --gpus 2",
            r"a server needs 1 of the 2 GPUs, the servers of frozen models 1, and .*; use --gpus 3$",
        ),
        (
            "qwen3-8b agent.opponents.a.model.path=gpt-9",
            r"agent.opponents.a.model.path='gpt-9' has no config.json of a known architecture; use such a",
        ),
        (
            "qwen3-8b agent.opponents.a.model.path=qwen3-235b-a22b --context 200000",
            r"agent.opponents.a: no server of up to 8 h100 has room for 'qwen3-235b-a22b'.* --context$",
        ),
    ],
)
def test_bad_input_is_answered_in_a_line(arguments: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        CliRunner().invoke(app, ["plan", *arguments.split(), "--estimate"], catch_exceptions=False)
    assert "\n" not in str(caught.value)


def test_the_gpus_that_a_refusal_names_suffice() -> None:
    with pytest.raises(ConfigError) as caught:
        make_plan(base("qwen3-235b-a22b"), _size("qwen3-235b-a22b"), 16)
    named = int(str(caught.value).rpartition("--gpus ")[2])
    assert (
        make_plan(base("qwen3-235b-a22b"), _size("qwen3-235b-a22b"), named).config.learner.world_size < named
    )


def _size(model: str):  # type: ignore[no-untyped-def]
    size = known_size(model)
    assert size is not None
    return size


def test_a_plan_that_waits_for_the_longest_attempt_does_not_advise_more_servers() -> None:
    plan = planned("qwen3-8b", "h100", 16, 4096)
    assert plan is not None
    estimate = StepEstimate(learner_s=1.0, servers_s=2.0, longest_s=9.0, max_staleness=1)
    plan = replace(plan, best=replace(plan.best, estimate=estimate))
    busy = Simulated(
        step_s=10.0,
        step_p95_s=10.0,
        phases={"take": 9.0, "learn": 1.0},
        servers={"sampling": 0.95, "prefill": 0.0, "paused": 0.0, "down": 0.0, "idle": 0.05},
        running=1.0,
        waiting=0.0,
        most_in_flight=1,
        kv_share=0.1,
        leasing_share=0.0,
        lags={0: 1.0},
        tokens_per_step=1.0,
        sampled_per_step=1.0,
        mean_tokens=1.0,
        longest_tokens=1.0,
        redone_share=0.0,
        dropped={},
        num_failures=0,
    )
    lines = "\n".join(plan_lines(plan, [Checked(plan.best, busy, 1.0)], num_gpus=16))
    assert "simulation  the longest attempt" in lines
    assert "more servers" not in lines
