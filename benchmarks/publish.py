"""What a publish costs: the ranks, which gather and broadcast or write the weights, and the controller.

    python benchmarks/publish.py --out docs/results/publish.json

Four ranks of a random model in bfloat16 and two receivers, over gloo. `whole` is how it was done before: each
weight is gathered in float32 on every rank, then rounded, and rank 0 alone writes files. `raw` broadcasts
buffers of the same size that nobody has to gather. With `sources` all ranks send buckets in turn. The
controller calls 64, 256 and 512 ranks. A few Ray actors stand in for all of them, because the controller's
share does not depend on what an actor does; `each` waits for one rank at a time, as it was done before. All
ways take turns, and medians are reported.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import groupby, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray
import torch
import torch.distributed as dist
from machine import write_result
from safetensors.torch import save_file

from agentrl.cluster.deadlines import CallDeadlines
from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.host import host_class
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.learner import LearnerConfig
from agentrl.config.model import ModelConfig, ModelFromScratchConfig
from agentrl.learner.buckets import BucketGatherer, BucketSender, plan_buckets
from agentrl.learner.dispatch import dispatch
from agentrl.learner.joint_files import PartsWriter, lay_out
from agentrl.learner.learner import Learner, LearnerSpec
from agentrl.learner.model import Policy
from agentrl.learner.sharding import gather
from agentrl.ports import ReservedPort
from agentrl.servers.process_group import broadcast, flatten, join_weights_group, leave_weights_group

TIMEOUT_S = 300.0
NUM_RANKS, NUM_RECEIVERS = 4, 2
WAYS = ("raw", "whole", "parts", "sources")
WORLD_SIZES = (64, 256, 512)
NUM_ACTORS = 4
GROUPS = [f"source {rank}" for rank in range(NUM_RANKS)]


def spec(kind: str, hidden: int) -> LearnerSpec:
    sizes = {"vocab_size": 16 * hidden, "hidden_size": hidden}
    more = {
        "qwen2": {"intermediate_size": 4 * hidden, "num_hidden_layers": 8},
        "qwen3_moe": {
            "moe_intermediate_size": hidden,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 2,
        },
    }
    return LearnerSpec(
        ModelConfig(path="benchmark", dtype="bfloat16"),
        LearnerConfig(world_size=NUM_RANKS),
        AlgorithmConfig(),
        "decoupled",
        0,
        1.0,
        1,
        from_scratch=ModelFromScratchConfig(architecture=kind, sizes=sizes | more[kind]),
    )


# ---------------------------------------------------------------------------------------- ranks and receivers


class WholeGatherer(BucketGatherer):
    """Gathers each weight in the learner's dtype on every rank and rounds it afterwards.

    Experts are rounded before, but summed over all ranks.
    """

    def gather(self, names: Sequence[str], *, to: int = 0) -> torch.Tensor | None:
        flat = flatten(whole_weights(self._policy, names))
        return flat if self._rank == to else None


def whole_weights(policy: Policy, names: Sequence[str]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for is_whole, some in groupby(names, key=lambda name: name in policy.tensors):
        found += (
            [gather(policy.tensors[name]).to(policy.published_dtype) for name in some]
            if is_whole
            else [tensor for _, tensor in policy.full_tensors(list(some))]
        )
    return found


class RawGatherer(BucketGatherer):
    """Gathers nothing."""

    def gather(self, names: Sequence[str], *, to: int = 0) -> torch.Tensor | None:
        if self._rank != to:
            return None
        return torch.empty(
            sum(math.prod(self._policy.pieces[name].shape) for name in names)
            * self._policy.published_dtype.itemsize,
            dtype=torch.uint8,
        )


GATHERERS = {"raw": RawGatherer, "whole": WholeGatherer, "parts": BucketGatherer, "sources": BucketGatherer}
SOURCES = {"sources": tuple(range(NUM_RANKS))}


def write_whole(learner: Learner, folder: Path) -> None:
    """Let rank 0 write what is gathered on every rank."""
    policy = learner._policy
    names = list(policy.pieces)
    tensors = {
        name: tensor.contiguous() for name, tensor in zip(names, whole_weights(policy, names), strict=True)
    }
    if learner.place.is_first:
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        with (folder / "model.safetensors").open("rb") as file:
            os.fsync(file.fileno())


def measured(call: Callable[[], Any]) -> dict[str, float]:
    """Return the wall seconds of `call`, until all ranks are done, and the CPU seconds of all ranks."""
    dist.barrier()
    started, used = time.perf_counter(), time.process_time()
    call()
    used_all = torch.tensor([time.process_time() - used], dtype=torch.float64)
    dist.all_reduce(used_all)
    return {"wall_s": time.perf_counter() - started, "cpu_s": float(used_all)}


def rank_main(
    kind: str,
    rank: int,
    options: argparse.Namespace,
    ports: Sequence[int],
    folder: Path,
    sizes: Any,
    results: Any,
) -> None:
    torch.set_num_threads(1)
    learner = Learner(spec(kind, options.hidden), rank=rank, address="127.0.0.1", port=ports[0])
    specs = learner.tensor_specs()
    plan = plan_buckets(specs, max_bytes=options.bucket_mib * 2**20)
    buckets = [[s.name for s in b] for b in plan]
    for _ in range(NUM_RECEIVERS if rank == 0 else 0):
        sizes.put([sum(s.num_bytes for s in b) for b in plan])
    learner.join_weights_groups("127.0.0.1", ports[1], 1 + NUM_RECEIVERS, GROUPS, "gloo", TIMEOUT_S)
    found: dict[str, list[dict[str, float]]] = {}
    for turn in range(1 + options.repeats):
        for way in WAYS:
            gatherer = GATHERERS[way](learner._policy, rank=rank)
            sender = BucketSender(gatherer, learner._weights_group, sources=SOURCES.get(way, (0,)))
            found.setdefault(f"send_{way}", []).append(measured(lambda sender=sender: sender.send(buckets)))
        whole, parts = folder / f"whole{turn}", folder / f"parts{turn}"
        found.setdefault("write_whole", []).append(measured(lambda to=whole: write_whole(learner, to)))
        found.setdefault("write_parts", []).append(measured(lambda to=parts: export(learner, to)))
        if rank == 0:
            files = [each / "model.safetensors" for each in (whole, parts)]
            assert files[0].read_bytes() == files[1].read_bytes(), "both ways write the same bytes"
            for file in files:
                file.unlink()
    if rank == 0:
        # The first turn connects the ranks.
        later = {name: turns[1:] for name, turns in found.items()}
        results.put((sum(s.num_bytes for s in specs), len(buckets), later))
    learner.close()


def export(learner: Learner, folder: Path) -> None:
    """Write as `Learner.export` does, without the config and tokenizer, which this model does not have."""
    layout, file = lay_out(learner.tensor_specs()), folder / "model.safetensors"
    if learner.place.is_first:
        folder.mkdir()
        layout.create(file)
    dist.barrier()
    writer = PartsWriter(learner._policy)
    writer.write(file, layout)
    assert writer.error is None


def receiver_main(number: int, port: int, sizes: Any, num_turns: int) -> None:
    torch.set_num_threads(1)
    groups = [
        join_weights_group(
            address="127.0.0.1",
            port=port,
            rank=number,
            world_size=1 + NUM_RECEIVERS,
            name=name,
            backend="gloo",
            timeout_s=TIMEOUT_S,
        )
        for name in GROUPS
    ]
    own_sizes = sizes.get()
    for _, way in product(range(num_turns), WAYS):
        num_sources = len(SOURCES.get(way, (0,)))
        for index, size in enumerate(own_sizes):
            broadcast(torch.empty(size, dtype=torch.uint8), groups[index % num_sources])
    for group in groups:
        leave_weights_group(group)


def measure_ranks(kind: str, options: argparse.Namespace) -> dict[str, object]:
    fork = multiprocessing.get_context("fork")
    sizes, results = fork.SimpleQueue(), fork.SimpleQueue()
    ports = [ReservedPort() for _ in range(2)]
    numbers = [port.number for port in ports]
    with TemporaryDirectory() as folder:
        processes = [
            fork.Process(target=rank_main, args=(kind, rank, options, numbers, Path(folder), sizes, results))
            for rank in range(NUM_RANKS)
        ]
        processes += [
            fork.Process(target=receiver_main, args=(number, numbers[1], sizes, 1 + options.repeats))
            for number in range(1, 1 + NUM_RECEIVERS)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    assert all(process.exitcode == 0 for process in processes), "a rank or a receiver failed"
    num_bytes, num_buckets, found = results.get()
    medians = {
        name: {key: round(statistics.median(turn[key] for turn in turns), 3) for key in turns[0]}
        for name, turns in found.items()
    }
    share = {
        way: round(
            statistics.median(
                raw["wall_s"] / own["wall_s"]
                for raw, own in zip(found["send_raw"], found[f"send_{way}"], strict=True)
            ),
            2,
        )
        for way in WAYS[1:]
    }
    return {
        "ranks": NUM_RANKS,
        "receivers": NUM_RECEIVERS,
        "bytes": num_bytes,
        "buckets": num_buckets,
        **medians,
        "share_of_raw_rate": share,
    }


# --------------------------------------------------------------------------------------------- the controller


class Trivial:
    """A worker that does nothing."""

    @dispatch("all")
    def send_buckets(self, bucket_bytes: int) -> int:
        return bucket_bytes


def call_each(hosts: Sequence[Any]) -> None:
    """Call all ranks, and wait for one after the other among all that are pending."""
    refs = [host.call.options(name="send").remote("send_buckets", "first", 2**28) for host in hosts]
    pending = dict.fromkeys(refs)
    while pending:
        done, _ = ray.wait(list(pending), timeout=TIMEOUT_S, fetch_local=False)
        pending.pop(done[0])
        ray.get(done)
    ray.get(refs)


def measure_controller(options: argparse.Namespace) -> list[dict[str, object]]:
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    host = host_class(Trivial)
    actors = [host.remote() for _ in range(NUM_ACTORS)]
    ray.get([actor.start.remote(_Unplaced, (), ("", 0), rank=0) for actor in actors])
    rows: list[dict[str, object]] = []
    for world_size in WORLD_SIZES:
        hosts = [actors[rank % NUM_ACTORS] for rank in range(world_size)]
        group: WorkerGroup[Trivial] = WorkerGroup(hosts, name="ranks", deadlines=CallDeadlines(TIMEOUT_S))
        ways = {
            "each": lambda hosts=hosts: call_each(hosts),
            "one": lambda g=group: g.run(Trivial.send_buckets, 1),
        }
        used: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(1 + options.calls):
            for way, call in ways.items():
                started = time.process_time()
                call()
                if turn:  # the first one connects
                    used[way].append(1000 * (time.process_time() - started))
        rows.append(
            {"ranks": world_size}
            | {f"{way}_cpu_ms": round(statistics.median(times), 1) for way, times in used.items()}
            | {f"{way}_least_cpu_ms": round(min(times), 1) for way, times in used.items()}
        )
    ray.shutdown()
    return rows


class _Unplaced(Trivial):
    def __init__(self, *, rank: int, address: str, port: int) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=1024, help="1024: 300 MB in bfloat16")
    parser.add_argument("--bucket-mib", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--calls", type=int, default=9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ranks = {kind: measure_ranks(kind, options) for kind in ("qwen2", "qwen3_moe")}
    for kind, measurements in ranks.items():
        for name, value in measurements.items():
            print(f"{kind} {name}: {value}")
    controller = measure_controller(options)
    for row in controller:
        print(row)
    write_result(options.out, {"ranks": ranks, "controller": controller})


if __name__ == "__main__":
    main()
