"""What only a GPU runs, as far as a CPU can prove it: arguments of flash attention, refusals, and the
benchmark of a GPU's step.
"""

import importlib.util
import inspect
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.modeling_flash_attention_utils import (
    FlashAttentionKwargs,
    _flash_attention_forward,
    prepare_fa_kwargs_from_position_ids,
)

from agentrl.errors import ConfigError
from agentrl.learner.attention import choose_attention, packed_arguments

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


def test_flash_attention_is_taken_and_refused_by_device_and_dtype(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: object() if name == "flash_attn" else find(name)
    )
    assert choose_attention("auto", device="cuda", dtype="bfloat16") == "flash_attention_2"
    assert choose_attention("auto", device="cuda", dtype="float32") == "flex_attention"
    assert choose_attention("auto", device="cpu", dtype="bfloat16") == "segment_sdpa"
    with pytest.raises(ConfigError, match="computes in bfloat16 or float16, but model"):
        choose_attention("flash_attention_2", device="cuda", dtype="float32")
    with pytest.raises(ConfigError, match="runs on GPUs, but the ranks compute on CPUs"):
        choose_attention("flash_attention_2", device="cpu", dtype="bfloat16")


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
