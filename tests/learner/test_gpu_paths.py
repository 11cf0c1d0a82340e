"""What only a GPU runs, as far as a CPU can prove it: arguments of flash attention, refusals, and the
benchmark of a GPU's step.
"""

import importlib.util
import inspect
import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor, Shard
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.modeling_flash_attention_utils import (
    FlashAttentionKwargs,
    _flash_attention_forward,
    prepare_fa_kwargs_from_position_ids,
)

from agentrl.cluster.colocated import Colocation
from agentrl.config.learner import LearnerConfig
from agentrl.errors import ConfigError
from agentrl.learner.attention import Segments, choose_attention, packed_arguments, segment_sdpa, varlen
from agentrl.learner.sharding import home_of_weights, own_part, with_part
from parts.learner import learner_spec, lone_learner, tiny_sizes

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "gpu_step.py"


# -------------------------------------------------------------------------------------------- flash attention


def test_flash_attention_is_told_of_segments_as_transformers_would_infer_them():
    """The names are those that its forward takes, the values those it finds in restarting position ids, the
    lengths plain numbers.
    """
    lengths = [3, 1, 5]
    arguments = packed_arguments("flash_attention_2", lengths, device=torch.device("cpu"))
    assert set(arguments) == set(FlashAttentionKwargs.__annotations__)
    assert set(arguments) <= set(inspect.signature(_flash_attention_forward).parameters)
    position_ids = torch.cat([torch.arange(length) for length in lengths])
    (starts_q, starts_k), (longest_q, longest_k) = prepare_fa_kwargs_from_position_ids(position_ids)
    for name, expected in (("cu_seq_lens_q", starts_q), ("cu_seq_lens_k", starts_k)):
        torch.testing.assert_close(arguments[name], expected)  # dtype included: the kernel reads int32
    assert (arguments["max_length_q"], arguments["max_length_k"]) == (int(longest_q), int(longest_k))
    assert type(arguments["max_length_q"]) is int


@pytest.mark.parametrize(
    ("installed", "half", "single"),
    [
        ({"flash_attn", "triton"}, "flash_attention_2", "flex_attention"),
        ({"triton"}, "segment_sdpa", "flex_attention"),
        (set(), "segment_sdpa", "segment_sdpa"),
    ],
)
def test_attention_is_chosen_by_device_dtype_and_what_is_installed(monkeypatch, installed, half, single):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in installed else None)
    assert choose_attention("auto", device="cuda", dtype="bfloat16") == half
    assert choose_attention("auto", device="cuda", dtype="float32") == single
    assert choose_attention("auto", device="cpu", dtype="bfloat16") == "segment_sdpa"


def test_flash_attention_is_refused_by_device_and_dtype(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match="computes in bfloat16 or float16, but model"):
        choose_attention("flash_attention_2", device="cuda", dtype="float32")
    with pytest.raises(ConfigError, match="runs on GPUs, but the ranks compute on CPUs"):
        choose_attention("flash_attention_2", device="cpu", dtype="bfloat16")


SHAPES = {
    "alone": ([7], None),
    "several": ([3, 1, 5], None),
    "prefix": ([4, 3, 2, 1, 6], [-1, 0, 0, -1, 0]),
}


def by_rows(query_THD, key_KGD, value_KGD, bounds, *, scaling, window):
    """Read the arguments as FlashAttention documents them: one query row after the other, in plain numpy."""
    query, key, value = (t.detach().double().numpy() for t in (query_THD, key_KGD, value_KGD))
    out, group = np.zeros_like(query), query.shape[1] // key.shape[1]
    bounds_q, bounds_k = bounds.queries.tolist(), bounds.keys.tolist()
    for first, end, first_k, end_k in zip(bounds_q, bounds_q[1:], bounds_k, bounds_k[1:], strict=False):
        assert end - first <= bounds.longest_query
        assert end_k - first_k <= bounds.longest_key
        for row in range(first, end):
            last = end_k - (end - row) + 1  # the queries belong to the last keys
            begin = first_k if window is None else max(first_k, last - window)
            for head in range(query.shape[1]):
                scores = key[begin:last, head // group] @ query[row, head] * scaling
                weights = np.exp(scores - scores.max())
                out[row, head] = weights / weights.sum() @ value[begin:last, head // group]
    return torch.from_numpy(out)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_kernel_for_all_segments_is_told_what_the_loop_over_segments_computes(shape, window):
    lengths, prefixes = SHAPES[shape]
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, h, sum(lengths), 8, dtype=torch.float64) for h in (4, 2, 2))
    options = {"scaling": 0.3, "sliding_window": window}
    segments = Segments(lengths, prefixes)
    expected, _ = segment_sdpa(torch.nn.Identity(), query, key, value, None, segments=segments, **options)
    found = varlen(query, key, value, segments, kernel=by_rows, **options)
    torch.testing.assert_close(found.transpose(1, 2), expected)
    assert segments.bounds(query.device) is segments.bounds(query.device), "computed once for all layers"


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_torchs_flash_attention_takes_the_arguments_and_has_a_gradient(shape, window):
    """Without values: on the meta device, where the operator checks and returns shapes alone."""
    lengths, prefixes = SHAPES[shape]
    heads = [
        torch.empty(1, h, sum(lengths), 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for h in (4, 2, 2)
    ]
    out = varlen(*heads, Segments(lengths, prefixes), scaling=None, sliding_window=window)
    assert out.shape == heads[0].shape
    gradients = torch.autograd.grad(out.sum(), heads)
    assert [g.shape for g in gradients] == [h.shape for h in heads]


# ---------------------------------------------------------------------------------------- memory that is lent


def test_colocated_servers_get_their_memory_back_after_the_ranks_gave_theirs():
    calls = []

    class Servers:
        urls = ("http://one", "http://two")

        def talk(self, urls, action):
            verb = action.keywords["action"]
            calls.append(getattr(verb, "__name__", "pause").strip("<>"))
            return {}

    class Rollouts:
        def set_servers(self, urls, *, version):
            calls.append(f"no servers, version {version}")

    colocation = Colocation(Servers(), Rollouts(), say=calls.append)
    with colocation.lend(version=4, give_back=lambda: calls.append("give back")):
        calls.append("learn")
    assert calls == [
        "lambda",
        "no servers, version 4",
        "release_memory",
        "learn",
        "give back",
        "resume_memory",
    ]


@pytest.mark.parametrize(
    ("offload", "home"), [("none", "cuda"), ("optimizer", "cuda"), ("parameters", "cpu")]
)
def test_weights_are_filled_where_fsdp_expects_them(offload, home):
    config = LearnerConfig(offload=offload)
    assert home_of_weights(config, torch.device("cuda", 1)).type == home
    assert home_of_weights(config, torch.device("cpu")).type == "cpu"


def test_a_part_of_a_sharded_tensor_is_replaced_where_it_lies():
    sizes = tiny_sizes(32)
    with lone_learner(learner_spec(sizes=sizes, learner=LearnerConfig(offload="parameters"))) as learner:
        weight = next(iter(learner._policy.tensors.values()))
        mesh = learner.place.mesh
        sharded = DTensor.from_local(weight.detach().clone(), mesh, [Shard(0)])
        other = with_part(sharded, torch.full_like(own_part(sharded)[0], 3.0))
        assert (other.placements, other.device_mesh) == (sharded.placements, mesh)
        assert torch.equal(other.full_tensor(), torch.full(sharded.shape, 3.0, dtype=sharded.dtype))
        plain = torch.zeros(2)
        assert with_part(plain, torch.ones(2)).tolist() == [1, 1]


# --------------------------------------------------------------------------------------- the step's benchmark


@pytest.fixture(autouse=True)
def modules_beside_the_benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARK.parent))


def test_the_operations_counted_are_those_of_torch():
    """torch counts dense attention, with the pairs of tokens that a causal mask hides."""
    benchmark = runpy.run_path(str(BENCHMARK))
    sizes, length = benchmark["SMALL"], 64
    work = benchmark["count_work"](sizes, [length])
    model = AutoModelForCausalLM.from_config(Qwen2Config(**sizes), attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.zeros(1, length, dtype=torch.int64), use_cache=False)
    hidden = 2.0 * length * (length - 1) * sizes["hidden_size"] * sizes["num_hidden_layers"]
    assert counter.get_total_flops() == pytest.approx(
        work.forward_flops + hidden, rel=1e-3
    )  # rotary angles are a product too
    assert benchmark["count_work"](sizes, [length] * 3).forward_flops == 3 * work.forward_flops


def test_the_benchmark_draws_every_weight():
    benchmark = runpy.run_path(str(BENCHMARK))
    options = LearnerConfig()
    learner = benchmark["open_learner"](benchmark["SMALL"], options, dtype="float32", attention="auto")
    weights = dict(learner._policy.module.named_parameters())
    learner.close()
    spreads = {name: float(weight.std()) for name, weight in weights.items() if weight.ndim >= 2}
    assert all(0.018 < spread < 0.022 for spread in spreads.values()), spreads
    vectors = {name: set(weight.tolist()) for name, weight in weights.items() if weight.ndim < 2}
    assert {name: {1.0} if "norm" in name else {0.0} for name in vectors} == vectors


def test_the_benchmark_of_a_gpus_step_takes_its_whole_way_on_a_cpu(tmp_path, monkeypatch, capsys):
    out = tmp_path / "step.json"
    options = [
        "--tokens",
        "200",
        "--microbatch-tokens",
        "100",
        "--warmups",
        "0",
        "--repeats",
        "1",
        "--peak-tflops",
        "1",
        "--out",
        str(out),
    ]
    monkeypatch.setattr(sys, "argv", [str(BENCHMARK), *options])
    runpy.run_path(str(BENCHMARK), run_name="__main__")
    result = json.loads(out.read_text())
    assert result["num_tokens"] == 200
    assert result["num_microbatches"] >= 2
    assert result["update_mfu"] == pytest.approx(3 * result["forward_flops"] / result["update_s"] / 1e12)
    assert "MFU" in capsys.readouterr().out
