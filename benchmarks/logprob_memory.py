"""Peak memory of log-probabilities with gradient: by chunks of hidden states, or torch's on all logits.

    python benchmarks/logprob_memory.py     # --tokens 8192: plain would need about 24 GB there

Each path runs in its own process. Reported is the growth of the peak resident set, without hidden states, the
weight and the targets. On a GPU (`--device cuda`) it is the allocator's peak. If a path does not fit into the
free memory, as many tokens as fit are measured, and peak and time are scaled up: both are proportional to the
number of tokens.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch
from machine import write_result
from torch.nn.functional import linear

from agentrl.algorithms.logprobs import linear_logprobs_and_entropy, logprobs_and_entropy

PATHS = ("chunked", "logits", "plain")
HIDDEN = 64
TENSORS = {"logits": 4, "plain": 6}
"""Number of f32[tokens, vocabulary] tensors that a path allocates at once, plus one as margin."""
SHARE_OF_FREE = 0.7


def run_path(path: str, tokens: int, vocabulary: int, device: str) -> dict[str, float]:
    """Run forward and backward once and return its peak memory and its time."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    hidden = torch.randn(tokens, HIDDEN, device=device, requires_grad=True)
    weight = torch.randn(vocabulary, HIDDEN, device=device, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,), device=device)
    logprobs_of(
        path, hidden[:8], weight, targets[:8]
    ).sum().backward()  # the libraries' own buffers are not counted
    before = held_bytes(device)
    started = time.perf_counter()
    logprobs_of(path, hidden, weight, targets).sum().backward()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    return {
        "peak_bytes": peak_bytes(device) - before,
        "seconds": seconds,
        "checksum": float(weight.grad.double().square().sum()),
    }


def logprobs_of(path: str, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if path == "chunked":
        return sum(
            linear_logprobs_and_entropy(hidden, weight, targets, temperature=1.0),
            torch.zeros((), device=hidden.device),
        )
    if path == "logits":
        return sum(
            logprobs_and_entropy(linear(hidden, weight), targets, temperature=1.0),
            torch.zeros((), device=hidden.device),
        )
    log_p = torch.log_softmax(linear(hidden, weight), -1)
    return log_p.gather(-1, targets[:, None])[:, 0] - (log_p.exp() * log_p).sum(-1)


def held_bytes(device: str) -> int:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    return psutil.Process().memory_info().rss


def peak_bytes(device: str) -> int:
    return (
        torch.cuda.max_memory_allocated()
        if device == "cuda"
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )


def tokens_that_fit(path: str, vocabulary: int, device: str) -> int:
    if path not in TENSORS:
        return sys.maxsize
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else psutil.virtual_memory().available
    return max(1, int(SHARE_OF_FREE * free / (4 * vocabulary * TENSORS[path])))


def compare(tokens: int, vocabulary: int, device: str) -> dict[str, dict[str, float]]:
    """Return {path: peak and time} of each path in a fresh process."""
    results = {}
    for path in PATHS:
        measured = min(tokens, tokens_that_fit(path, vocabulary, device))
        arguments = [
            sys.executable,
            __file__,
            "--path",
            path,
            "--tokens",
            str(measured),
            "--vocabulary",
            str(vocabulary),
        ]
        output = subprocess.run(
            [*arguments, "--device", device], check=True, capture_output=True, text=True
        ).stdout
        own: dict[str, float] = json.loads(output)
        results[path] = (
            own
            | {name: own[name] * tokens / measured for name in ("peak_bytes", "seconds")}
            | {"measured_tokens": measured}
        )
        note = (
            "" if measured == tokens else f"  scaled from {measured:,} tokens: the free memory holds no more"
        )
        print(
            f"{path:8} {results[path]['peak_bytes'] / 2**20:9,.0f} MiB  {results[path]['seconds']:6.1f} "
            f"s{note}",
            flush=True,
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--path", choices=PATHS, help="measure this path in this process")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.path:
        print(json.dumps(run_path(arguments.path, arguments.tokens, arguments.vocabulary, arguments.device)))
        return
    print(f"{arguments.tokens:,} tokens x {arguments.vocabulary:,} vocabulary, float32, forward and backward")
    results = compare(arguments.tokens, arguments.vocabulary, arguments.device)
    share = results["chunked"]["peak_bytes"] / results["plain"]["peak_bytes"]
    print(
        f"chunked / plain: {share:.3f} of the memory, "
        f"{results['chunked']['seconds'] / results['plain']['seconds']:.2f} of the time"
    )
    sizes = {"tokens": arguments.tokens, "vocabulary": arguments.vocabulary, "device": arguments.device}
    write_result(arguments.out, {**sizes, "share": share, **results})


if __name__ == "__main__":
    main()
