"""Measures an all-reduce between processes of this machine, one per GPU.

`python -m agentrl.extras.doctor.collective RANK NUM_RANKS PORT BACKEND NUM_BYTES` is one of them.
"""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from agentrl.errors import InfrastructureError
from agentrl.ports import ReservedPort

JOIN_S = 25.0
REPEATS = 5


def measure_all_reduce(num_ranks: int, *, backend: str, num_bytes: int) -> float:
    """Return the bus bandwidth of an all-reduce in bytes per second: what each link carries.

    Args:
        backend: nccl, one process per GPU; or gloo, on the CPU.

    Raises:
        InfrastructureError: a process failed, or did not join the others in time.
    """
    with ReservedPort() as port:
        ranks = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    __name__,
                    *map(str, (rank, num_ranks, port.number, backend, num_bytes)),
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(num_ranks)
        ]
        try:
            ended = [process.communicate(timeout=2 * JOIN_S) for process in ranks]
        except subprocess.TimeoutExpired:
            raise InfrastructureError(
                f"{num_ranks} processes did not reduce over {backend} within {2 * JOIN_S:g} s"
            ) from None
        finally:
            for process in ranks:
                process.kill()
                process.wait(JOIN_S)
    for process, (_, errors) in zip(ranks, ended, strict=True):
        if process.returncode != 0:
            last = (errors.strip().splitlines() or ["no message"])[-1]
            raise InfrastructureError(f"an all-reduce of {num_ranks} processes over {backend} failed: {last}")
    slowest = max(float(output.strip().splitlines()[-1]) for output, _ in ended)
    return 2 * (num_ranks - 1) / num_ranks * num_bytes / slowest


def main() -> None:
    """Be one rank: join, reduce a few times, print the seconds of one all-reduce."""
    rank, num_ranks, port, backend, num_bytes = sys.argv[1:]
    device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", int(rank))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend=backend,
        init_method=f"tcp://127.0.0.1:{port}",
        rank=int(rank),
        world_size=int(num_ranks),
        timeout=timedelta(seconds=JOIN_S),
    )
    numbers = torch.ones(int(num_bytes) // torch.float32.itemsize, device=device)
    dist.all_reduce(numbers)  # connects
    _wait_for(device)
    start = time.monotonic()
    for _ in range(REPEATS):
        dist.all_reduce(numbers)
    _wait_for(device)
    sys.stdout.write(f"{(time.monotonic() - start) / REPEATS}\n")
    dist.destroy_process_group()


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
