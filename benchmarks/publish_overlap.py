"""Gain from overlap in the transport `distributed`: a bucket is sent while, or before, the next is gathered.

python benchmarks/publish_overlap.py [--hidden 512] [--bucket-mib 8] [--repeats 3]

The learner has one rank, and the peer only receives, over gloo. Gathering is the cast to bfloat16 and the
copy to the bucket.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time

import torch

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.learner import LearnerConfig
from agentrl.config.model import ModelConfig, ModelFromScratchConfig
from agentrl.learner.learner import Learner, LearnerSpec
from agentrl.ports import ReservedPort
from agentrl.sglang.process_group import broadcast, join_weights_group, leave_weights_group
from agentrl.weights.transport import plan_buckets

TIMEOUT_S = 300.0


def receive(port: int, sizes: list[int], rounds: int) -> None:
    torch.set_num_threads(1)
    group = join_weights_group(
        address="127.0.0.1", port=port, rank=1, world_size=2, name="g", backend="gloo", timeout_s=TIMEOUT_S
    )
    for _ in range(rounds):
        for size in sizes:
            broadcast(torch.empty(size, dtype=torch.uint8), group)
    leave_weights_group(group)


def publish(learner: Learner, buckets: list[list[str]], *, is_overlapped: bool) -> tuple[float, float, float]:
    """Return the seconds in total, of gathering, and of waiting for sends."""
    started = time.perf_counter()
    gather_s = wait_s = 0.0
    for index, names in enumerate(buckets):
        learner.send_bucket(names)
        if not is_overlapped or index == len(buckets) - 1:
            times = learner.finish_buckets()
            gather_s, wait_s = gather_s + times.gather_s, wait_s + times.wait_s
    return time.perf_counter() - started, gather_s, wait_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--bucket-mib", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = {
        "vocab_size": 16000,
        "hidden_size": options.hidden,
        "intermediate_size": 4 * options.hidden,
        "num_hidden_layers": 8,
    }
    scratch = ModelFromScratchConfig(architecture="qwen2", sizes=sizes)
    model = ModelConfig(path="benchmark", dtype="bfloat16")
    spec = LearnerSpec(
        model, LearnerConfig(), AlgorithmConfig(), "decoupled", 0, 1.0, 1, from_scratch=scratch
    )
    meeting, transfer = ReservedPort(), ReservedPort()
    learner = Learner(spec, rank=0, address="127.0.0.1", port=meeting.number)
    plan = plan_buckets(learner.tensor_specs(), max_bytes=options.bucket_mib * 2**20)
    buckets = [[s.name for s in bucket] for bucket in plan]
    bucket_bytes = [sum(s.num_bytes for s in bucket) for bucket in plan]
    port, rounds = transfer.number, 2 * options.repeats
    peer = multiprocessing.get_context("spawn").Process(target=receive, args=(port, bucket_bytes, rounds))
    peer.start()
    learner.join_weights_group("127.0.0.1", port, 2, "g", "gloo", TIMEOUT_S)
    print(f"{sum(bucket_bytes) / 2**20:.0f} MiB in {len(buckets)} buckets")
    for _ in range(options.repeats):
        for is_overlapped in (False, True):
            seconds, gather_s, wait_s = publish(learner, buckets, is_overlapped=is_overlapped)
            how = "overlapped" if is_overlapped else "in turn"
            print(
                f"{how:>10}: {seconds:.2f} s, gathering {gather_s / seconds:.0%}, waiting for what travels "
                f"{wait_s / seconds:.0%}"
            )
    learner.close()
    peer.join()


if __name__ == "__main__":
    main()
