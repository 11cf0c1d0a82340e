"""Peer of serving.py, run by the interpreter of vLLM's environment: vLLM's CPU build in this process.

Reads {"model", "dtype", "repeats", "workloads": [{"prompts", "lengths"}]} from standard input and prints one
JSON object, with the best of the repeats by number of requests.
"""

import json
import os
import sys
import time
from typing import Any

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


def main() -> None:
    given = json.load(sys.stdin)
    import torch
    from vllm import LLM, SamplingParams

    engine = LLM(
        given["model"],
        dtype=given["dtype"],
        max_model_len=1024,
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_num_seqs=max(len(workload["prompts"]) for workload in given["workloads"]),
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    torch.set_num_threads(1)
    found: dict[int, Any] = {}
    for workload in given["workloads"]:
        prompts = [{"prompt_token_ids": ids} for ids in workload["prompts"]]
        sampling = [
            SamplingParams(temperature=0, max_tokens=num, ignore_eos=True, logprobs=0, detokenize=False)
            for num in workload["lengths"]
        ]
        walls, cpus = [], []
        for _ in range(given["repeats"]):
            wall, cpu = time.perf_counter(), time.process_time()
            outputs = engine.generate(prompts, sampling, use_tqdm=False)
            walls.append(time.perf_counter() - wall)
            cpus.append(time.process_time() - cpu)
        num_new = sum(len(output.outputs[0].token_ids) for output in outputs)
        assert num_new == sum(workload["lengths"])
        found[len(prompts)] = {
            "tokens_per_s": round(num_new / min(walls), 1),
            "tokens_per_cpu_s": round(num_new / min(cpus), 1),
        }
    print(json.dumps({"requests": found}), flush=True)


if __name__ == "__main__":
    main()
