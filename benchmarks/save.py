"""CPU seconds that a checkpoint costs the controller and the ranks: to save it, and to verify it.

    python benchmarks/save.py --out docs/results/save.json

A random model with a gigabyte of state (weights and Adam's moments in float32), in Ray actors on gloo.
`one_thread` is the comparison: one thread of the controller hashes what the ranks wrote. CPU seconds of the
ranks are the sum over ranks. Every save but the first also removes the checkpoint before it.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import ray
from machine import write_result

from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.pools import Seat
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.learner import LearnerConfig
from agentrl.config.model import ModelConfig, ModelFromScratchConfig
from agentrl.config.trainer import TrainerConfig
from agentrl.controller.checkpoint import find_checkpoint, save_checkpoint
from agentrl.controller.learner import start_learner
from agentrl.controller.verification import verify_by_ranks
from agentrl.learner.learner import Learner, LearnerSpec


def start(num_ranks: int, hidden: int) -> WorkerGroup[Learner]:
    sizes = {
        "vocab_size": 64 * hidden,
        "hidden_size": hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "intermediate_size": 4 * hidden,
    }
    spec = LearnerSpec(
        ModelConfig(),
        LearnerConfig(world_size=num_ranks),
        AlgorithmConfig(),
        "decoupled",
        seed=0,
        temperature=1.0,
        total_updates=1,
        from_scratch=ModelFromScratchConfig(architecture="qwen2", sizes=sizes),
    )
    return start_learner(spec, [Seat()] * num_ranks)


def measured(call: Callable[[], Any], ranks: list[psutil.Process]) -> tuple[Any, dict[str, float]]:
    """Return the result of `call`, and the CPU seconds of this process and of the ranks meanwhile."""

    def seconds() -> tuple[float, float, float]:
        used = [process.cpu_times() for process in ranks]
        return time.process_time(), sum(own.user + own.system for own in used), time.monotonic()

    before = seconds()
    result = call()
    spent = [after - start for after, start in zip(seconds(), before, strict=True)]
    return result, dict(
        zip(("controller_cpu_s", "ranks_cpu_s", "wall_s"), (round(s, 3) for s in spent), strict=True)
    )


def hash_all(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                hashlib.file_digest(file, "sha256")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=768, help="768: a gigabyte of state")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    group = start(arguments.ranks, arguments.hidden)
    ranks = [psutil.Process(pid) for pid in group.pids()]
    runs = []
    with TemporaryDirectory() as folder:
        parent = Path(folder)
        for step in range(1, arguments.repeats + 1):
            checkpoint, save = measured(
                lambda step=step: save_checkpoint(
                    parent,
                    step=step,
                    version=step,
                    save_learner=partial(group.run, Learner.save),
                    buffer_state=b"buffer",
                    keep_last=1,
                ),
                ranks,
            )
            num_bytes = sum(path.stat().st_size for path in checkpoint.folder.rglob("*") if path.is_file())
            run = {"bytes": num_bytes, "save": save}
            _, run["find"] = measured(lambda: find_checkpoint(parent, TrainerConfig()), ranks)
            for how in ("sample", "full"):
                _, run[how] = measured(
                    lambda how=how, found=checkpoint: verify_by_ranks(found, group, how, say=print), ranks
                )
            _, run["one_thread"] = measured(lambda found=checkpoint: hash_all(found.folder), ranks)
            print(run)
            runs.append(run)
    group.stop()
    ray.shutdown()
    write_result(arguments.out, {"ranks": arguments.ranks, "runs": runs})


if __name__ == "__main__":
    main()
