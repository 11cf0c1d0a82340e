"""Compiled against eager kernels of log-probabilities: errors against float64 (values, gradients), and time.

    python benchmarks/logprob_kernels.py                    # on a GPU: torch.compile's Triton kernels; else
    its C++ kernels of a CPU python benchmarks/logprob_kernels.py --interpret        # the Triton kernels
    without a GPU, by Triton's interpreter: minutes

`--interpret` needs the package triton, which torch for CPUs does not include:
`pip install --no-deps --target FOLDER triton`, with FOLDER in PYTHONPATH. The interpreter has no `libdevice`:
its exp and tanh are replaced by Triton's exp. Its gradients had errors of 2.5e-3, against 1.7e-3 of eager
ones; the cause, perhaps its rounding to bfloat16, is unknown.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
import types
from pathlib import Path
from typing import Any

import torch
from machine import write_result

from agentrl.algorithms.logprob_kernels import EAGER, ChunkKernels, HeadForm, compiled

FORMS = (HeadForm(), HeadForm(scale=2.0, softcap=5.0))
TEMPERATURE = 0.7


def interpret_triton() -> None:
    """Make torch.compile generate Triton kernels for a CPU, and Triton interpret them."""
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    import triton
    import triton.language as tl
    from torch._inductor import config
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget

    class Driver:
        """The part of a GPU driver that the code generator calls."""

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

    config.cpu_backend = "triton"
    triton.runtime.driver.set_active(Driver())
    triton_helpers.libdevice = types.SimpleNamespace(
        exp=lambda x: tl.exp(x), tanh=lambda x: 1 - 2 / (tl.exp(2 * x) + 1)
    )


def compare(
    kernels: ChunkKernels, num_tokens: int, vocabulary: int, form: HeadForm, device: str
) -> dict[str, Any]:
    """Return the largest errors against float64 on the same bfloat16 products, and seconds of a second
    call."""
    torch.manual_seed(0)
    products = (3 * torch.randn(num_tokens, vocabulary, device=device)).bfloat16()
    targets = torch.randint(vocabulary, (num_tokens,), device=device)
    upstream = torch.randn(2, num_tokens, device=device)
    exact = EAGER.values(products.double(), targets, TEMPERATURE, form)
    exact_gradient = EAGER.gradient(
        products.double(), targets, exact[1], *upstream.double(), TEMPERATURE, form
    )
    found: dict[str, Any] = {
        "num_tokens": num_tokens,
        "vocabulary": vocabulary,
        "scale": form.scale,
        "softcap": form.softcap,
    }
    for _ in range(2):
        started = time.perf_counter()
        logprobs, entropies = kernels.values(products, targets, TEMPERATURE, form)
        gradient = kernels.gradient(products, targets, entropies, *upstream, TEMPERATURE, form)
        if device == "cuda":
            torch.cuda.synchronize()
        found["seconds"] = time.perf_counter() - started
    found["logprob_error"] = float((logprobs - exact[0]).abs().max())
    found["entropy_error"] = float((entropies - exact[1]).abs().max())
    found["gradient_error"] = float((gradient - exact_gradient).norm() / exact_gradient.norm())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--interpret", action="store_true")
    parser.add_argument("--tokens", type=int, nargs="+", default=[6, 3])
    parser.add_argument("--vocabulary", type=int, default=300)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.interpret:
        interpret_triton()
    device = "cuda" if torch.cuda.is_available() and not arguments.interpret else "cpu"
    torch.set_grad_enabled(False)
    results = []
    for (name, kernels), form, num_tokens in itertools.product(
        {"eager": EAGER, "compiled": compiled()}.items(), FORMS, arguments.tokens
    ):
        found = compare(kernels, num_tokens, arguments.vocabulary, form, device)
        results.append({"kernels": name, "device": device, **found})
        errors = (
            f"logprob {found['logprob_error']:.1e}, entropy {found['entropy_error']:.1e}, gradient "
            f"{found['gradient_error']:.1e} relative"
        )
        print(
            f"{name:8} {num_tokens:5} x {arguments.vocabulary} {form}: {errors}; "
            f"{found['seconds'] * 1e3:.1f} ms",
            flush=True,
        )
    write_result(arguments.out, {"results": results})


if __name__ == "__main__":
    main()
