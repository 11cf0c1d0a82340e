"""Model-flops utilisation of the learner's step: scores and update of one packed batch, in bfloat16 on a GPU.

    python benchmarks/gpu_step.py                                   # shaped like Qwen2.5-0.5B
    python benchmarks/gpu_step.py --size 7b --lora-rank 16 --gradient-checkpointing
    python benchmarks/gpu_step.py --length 8192 --compile --microbatch-tokens 32768
    python benchmarks/gpu_step.py --peak-tflops 989                 # a GPU that is not in the table

Without a GPU, a model of two small layers runs the same code on the CPU in float32, whatever --size says;
utilisation is then printed only with --peak-tflops.

Only the operations that the model needs are counted. A forward has 2 per matrix parameter and token (with the
head, without the embedding, which is a lookup), and 2 x length x width x layers per token for causal
attention. A backward has twice as many. Recomputed activations and logits are not counted, so gradient
checkpointing lowers the figure.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import write_result
from transformers import initialization

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.learner import LearnerConfig
from agentrl.config.model import ModelConfig, ModelFromScratchConfig
from agentrl.config.model_flops import ModelFlops
from agentrl.config.model_size import ModelSize
from agentrl.learner.batch import Sample
from agentrl.learner.device_peaks import find_peak
from agentrl.learner.learner import Learner, LearnerSpec
from agentrl.learner.packing import pack
from agentrl.learner.sharding import own_part
from agentrl.ports import ReservedPort

QWEN2_HALF_BILLION = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}
LARGER: dict[str, dict[str, Any]] = {
    "0.5b": {},
    "1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
    },
    "3b": {
        "hidden_size": 2048,
        "intermediate_size": 11_008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
    },
    "7b": {
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}
"""Sizes of Qwen2.5, as changes of the smallest one."""
SMALL = QWEN2_HALF_BILLION | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one batch: tokens, and FLOPs of a forward; a backward has twice as many."""

    num_tokens: int
    forward_flops: float


def count_work(sizes: dict[str, Any], lengths: Sequence[int]) -> Work:
    """Count the operations of sequences of these lengths; every token goes through the head.

    Those of an adapter are not counted: the figure is that of the whole model's matrices.
    """
    size = ModelSize.of({**sizes, "model_type": "qwen2"})
    assert size is not None, "sizes of a Qwen2"
    return Work(sum(lengths), float(ModelFlops(size).forward(lengths, num_scored=sum(lengths))))


def make_batch(
    vocabulary: int, *, num_tokens: int, mean_length: int, length: int | None = None
) -> list[Sample]:
    """Return sequences of exponential length, or all of `length`, without prompts, `num_tokens` in all.

    The loss covers all tokens but the first of each sequence.
    """
    rng = np.random.default_rng(0)
    samples: list[Sample] = []
    left, fixed = num_tokens, length
    while left > 1:
        length = min(left, fixed or max(2, int(rng.exponential(mean_length))))
        mask = np.arange(length) >= 1
        behavior = np.full(length, -np.log(vocabulary), np.float32)
        advantages = np.full(length, rng.normal(), np.float32)
        ids = rng.integers(0, vocabulary, length).astype(np.int32)
        samples.append(Sample(len(samples), ids, mask, mask, behavior, advantages))
        left -= length
    return samples


def open_learner(
    sizes: dict[str, Any], options: LearnerConfig, *, dtype: str, attention: str, lora_rank: int = 0
) -> Learner:
    model = ModelConfig.model_validate({"dtype": dtype, "attention": attention, "lora": {"rank": lora_rank}})
    from_scratch = ModelFromScratchConfig(architecture="qwen2", sizes=sizes)
    spec = LearnerSpec(model, options, AlgorithmConfig(), "decoupled", 0, 1.0, 1000, None, from_scratch)
    # Values of billions of weights are drawn on the device: one thread of a CPU takes minutes.
    with ReservedPort() as port, initialization.no_init_weights():
        learner = Learner(spec, rank=0, address="127.0.0.1", port=port.number)
    draw_weights(learner._policy.module)
    return learner


@torch.no_grad()
def draw_weights(module: torch.nn.Module) -> None:
    """Draw the weights where they are, except an adapter: matrices from N(0, 0.02^2); norms are 1."""
    for name, weight in module.named_parameters():
        own = own_part(weight)[0]
        if "lora_" in name:
            continue
        if own.ndim >= 2:
            own.normal_(std=0.02)
        else:
            own.fill_(1.0 if name.endswith("weight") else 0.0)


def seconds_of(work: Callable[[], object], *, warmups: int, repeats: int) -> float:
    """Return the median wall-clock seconds of a call, without warm-up calls, which compile and allocate."""
    seconds = []
    for count in range(warmups + repeats):
        started = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if count >= warmups:
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def peak_tflops(given: float | None) -> float | None:
    """Return the GPU's peak in dense bfloat16; None on a CPU.

    Raises:
        SystemExit: the GPU is not in the table, and `given` is None.
    """
    if given is not None or not torch.cuda.is_available():
        return given
    name = torch.cuda.get_device_name()
    peak = find_peak(name, torch.bfloat16)
    if peak is None:
        raise SystemExit(
            f"the peak of {name!r} is not in the table; give its dense bfloat16 TFLOP/s as --peak-tflops"
        )
    return peak / 1e12


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time scoring and update of one batch, and relate them to the peak."""
    has_gpu = torch.cuda.is_available()
    peak = peak_tflops(arguments.peak_tflops)
    sizes = QWEN2_HALF_BILLION | LARGER[arguments.size] if has_gpu else dict(SMALL)
    num_tokens = arguments.tokens or (65_536 if has_gpu else 1024)
    options = LearnerConfig(
        microbatch_tokens=arguments.microbatch_tokens,
        compile=arguments.compile,
        gradient_checkpointing=arguments.gradient_checkpointing or arguments.activation_offload,
        activation_offload=arguments.activation_offload,
        offload=arguments.offload,
        logprob_kernels=arguments.logprob_kernels,
    )
    batch = make_batch(
        sizes["vocab_size"],
        num_tokens=num_tokens,
        mean_length=arguments.mean_length if has_gpu else 64,
        length=arguments.length if has_gpu else None,
    )
    work = count_work(sizes, [sample.num_tokens for sample in batch])
    # Frozen weights need no gradient of their own: a third of the backward's products is left out.
    update_flops = work.forward_flops * (2 if arguments.lora_rank else 3)
    learner = open_learner(
        sizes,
        options,
        dtype="bfloat16" if has_gpu else "float32",
        attention=arguments.attention,
        lora_rank=arguments.lora_rank,
    )
    [microbatches] = pack(
        batch, max_tokens=options.microbatch_tokens, world_size=1, parity_tokens=learner.parity_tokens()
    )
    scored = learner.score(microbatches)
    times = {"warmups": arguments.warmups, "repeats": arguments.repeats}
    score_s = seconds_of(lambda: learner.score(microbatches), **times)
    update_s = seconds_of(lambda: learner.update(scored), **times)
    learner.close()
    result = asdict(work) | {
        "num_microbatches": len(microbatches),
        "score_s": score_s,
        "update_s": update_s,
        "peak_tflops": peak,
    }
    result |= {
        "device": torch.cuda.get_device_name() if has_gpu else "cpu",
        "sizes": sizes,
        "lora_rank": arguments.lora_rank,
        "learner": options.model_dump(mode="json"),
    }
    result["gpu_bytes_max"] = torch.cuda.max_memory_allocated() if has_gpu else None
    for name, flops, seconds in (
        ("score", work.forward_flops, score_s),
        ("update", update_flops, update_s),
    ):
        result[f"{name}_tflops"] = flops / seconds / 1e12
        result[f"{name}_mfu"] = None if peak is None else flops / seconds / 1e12 / peak
    return result


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, help="of the batch; without: 65,536 on a GPU, 1,024 on a CPU")
    parser.add_argument("--mean-length", type=int, default=1024, help="of the sequences on a GPU")
    parser.add_argument("--length", type=int, help="of all sequences on a GPU, in place of random ones")
    parser.add_argument("--size", choices=sorted(LARGER), default="0.5b", help="parameters, on a GPU")
    parser.add_argument("--lora-rank", type=int, default=0, help="train an adapter; 0: all weights")
    parser.add_argument("--offload", choices=["none", "optimizer", "parameters"], default="none")
    parser.add_argument("--microbatch-tokens", type=int, default=16_384)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--logprob-kernels", default="eager")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--activation-offload", action="store_true", help="with gradient checkpointing")
    parser.add_argument("--peak-tflops", type=float)
    parser.add_argument("--warmups", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse()
    result = measure(arguments)
    print(f"{result['device']}: {result['num_tokens']:,} tokens in {result['num_microbatches']} microbatches")
    for name in ("score", "update"):
        mfu = result[f"{name}_mfu"]
        share = "peak unknown" if mfu is None else f"MFU {mfu:.1%} of {result['peak_tflops']:.0f} TFLOP/s"
        seconds = result[f"{name}_s"]
        print(
            f"{name:6} {seconds:7.3f} s  {result['num_tokens'] / seconds:9,.0f} tokens/s  "
            f"{result[f'{name}_tflops']:8.3f} TFLOP/s  {share}"
        )
    if result["gpu_bytes_max"] is not None:
        print(f"at most {result['gpu_bytes_max'] / 2**30:.1f} GiB of the GPU")
    write_result(arguments.out, result)


if __name__ == "__main__":
    main()
