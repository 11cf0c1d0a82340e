"""Check `gpus`: products, memory and transfers of each GPU, and collectives between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from agentrl.errors import InfrastructureError
from agentrl.extras.doctor.collective import measure_all_reduce
from agentrl.extras.doctor.diagnosis import Diagnosis
from agentrl.extras.doctor.subject import Subject
from agentrl.learner.device_peaks import find_peak

SIZE = 8192
COPY_BYTES = 512 << 20
REPEATS = 10
NEEDED_BYTES = 3 * 2 * SIZE**2 + 3 * COPY_BYTES
"""To measure a GPU: matrices, copies, and what libraries need."""
MIN_PEAK_SHARE = 0.5
"""Of a GPU's peak in products of 8,192 columns; a whole, cool GPU reaches 0.6 to 0.8."""
MIN_OF_BEST = 0.8
"""Of equal GPUs in one machine: ranks wait for the slowest one."""
MIN_HOST_BYTES_PER_S = 5e9
"""From pinned memory. PCIe 3 with 16 lanes has 12, PCIe 4 has 25."""
MAX_TAKEN_SHARE = 0.1
"""Of the memory, by other programs."""
MIN_BUS_BYTES_PER_S = 5e9
"""Of an all-reduce between GPUs of one machine; through PCIe 4 about 15, through NVLink 100 and more."""
_DEVICE = Path("/dev/nvidia0")


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """What is free on one GPU."""

    index: int
    name: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class GpuSpeed:
    """One GPU. half_flops_per_s: in products of bfloat16. copy_bytes_per_s: read and written within its
    memory. host_bytes_per_s: from pinned memory of the host.
    """

    index: int
    name: str
    half_flops_per_s: float
    copy_bytes_per_s: float
    host_bytes_per_s: float
    free_bytes: int
    total_bytes: int


def diagnose(subject: Subject) -> Iterator[Diagnosis]:
    """Measure each GPU, then all of them together."""
    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        yield judge_absent(
            needed=_needed(subject), has_device=_DEVICE.exists(), built_for=torch.version.cuda or ""
        )
        return
    free = [_free(index) for index in range(num_gpus)]
    full = [own for own in free if own.free_bytes < NEEDED_BYTES]
    yield from map(judge_full, full)
    yield from judge_gpus([_measure(own) for own in free if own not in full])
    if full:
        return  # a collective would fail on them
    if num_gpus > 1:
        yield judge_peers(num_gpus, torch.cuda.can_device_access_peer)
        try:
            speed = measure_all_reduce(num_gpus, backend="nccl", num_bytes=COPY_BYTES)
        except InfrastructureError as error:
            cure = (
                "NCCL_DEBUG=INFO shows where it waits; /dev/shm and the links between GPUs are the suspects"
            )
            yield Diagnosis("NCCL", "wrong", str(error), cure)
        else:
            yield judge_all_reduce(num_gpus, speed)


def judge_absent(*, needed: int, has_device: bool, built_for: str) -> Diagnosis:
    """Judge a machine on which torch sees no GPU.

    Args:
        needed: GPUs that the config asks of this machine.
        has_device: the kernel has an NVIDIA GPU.
        built_for: CUDA version of torch; "": built without.
    """
    if has_device and not built_for:
        text = f"there is a GPU, but torch {torch.__version__} was built without CUDA"
        return Diagnosis("GPUs", "wrong", text, "pip install torch --index-url of a CUDA build (pytorch.org)")
    if has_device:
        text = f"there is a GPU, but torch (CUDA {built_for}) cannot use it"
        cure = "`nvidia-smi`: is the driver new enough for this CUDA? Is CUDA_VISIBLE_DEVICES set?"
        return Diagnosis("GPUs", "wrong", text, cure)
    if needed:
        text = f"none, but placement.pools asks for {needed} on this machine"
        return Diagnosis(
            "GPUs", "wrong", text, "cluster.address of a cluster that has them, or gpus_per_node=0"
        )
    return Diagnosis("GPUs", "ok", "none, and none is needed")


def judge_full(gpu: GpuMemory) -> Diagnosis:
    """Judge a GPU with too little free memory to be measured."""
    text = (
        f"{gpu.name}: {gpu.free_bytes / 2**30:.1f} of {gpu.total_bytes / 2**30:.0f} GiB free, too little to "
        "measure it or to run on it"
    )
    figures = {"free_bytes": float(gpu.free_bytes)}
    return Diagnosis(f"GPU {gpu.index}", "wrong", text, "`nvidia-smi` lists the programs; end them", figures)


def judge_gpus(speeds: Sequence[GpuSpeed]) -> Iterator[Diagnosis]:
    """Judge each GPU by its peak, by the best one of the same name, and by what is left of its memory."""
    for own in speeds:
        same = [other for other in speeds if other.name == own.name]
        problems = list(_problems(own, same))
        text = (
            f"{own.name}: {own.half_flops_per_s / 1e12:.0f} TFLOP/s in bfloat16, memory "
            f"{own.copy_bytes_per_s / 1e9:,.0f} GB/s, from the host {own.host_bytes_per_s / 1e9:.0f} GB/s, "
            f"{own.free_bytes / 2**30:.0f} of {own.total_bytes / 2**30:.0f} GiB free"
        )
        figures = {
            "half_flops_per_s": own.half_flops_per_s,
            "copy_bytes_per_s": own.copy_bytes_per_s,
            "host_bytes_per_s": own.host_bytes_per_s,
            "free_bytes": float(own.free_bytes),
        }
        part = f"GPU {own.index}"
        if problems:
            text = "; ".join([text, *(why for why, _ in problems)])
            yield Diagnosis(part, "slow", text, "; ".join(cure for _, cure in problems), figures)
        else:
            yield Diagnosis(part, "ok", text, figures=figures)


def _problems(own: GpuSpeed, same: Sequence[GpuSpeed]) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a GPU, and the cure. `same`: all GPUs of its name."""
    peak = find_peak(own.name, torch.bfloat16)
    if peak is not None and own.half_flops_per_s < MIN_PEAK_SHARE * peak:
        share = own.half_flops_per_s / peak
        yield (
            f"{share:.0%} of its peak",
            "`nvidia-smi -q -d PERFORMANCE,POWER`: heat, power cap, other programs",
        )
    columns: tuple[tuple[str, Callable[[GpuSpeed], float]], ...] = (
        ("products", lambda gpu: gpu.half_flops_per_s),
        ("memory", lambda gpu: gpu.copy_bytes_per_s),
        ("transfers from the host", lambda gpu: gpu.host_bytes_per_s),
    )
    for what, read in columns:
        best = max(same, key=read)
        if read(own) < MIN_OF_BEST * read(best):
            yield (
                f"{what}: {read(own) / read(best):.0%} of GPU {best.index}",
                "compare both in `nvidia-smi -q`",
            )
    if own.host_bytes_per_s < MIN_HOST_BYTES_PER_S:
        yield "slow transfers from the host", "`nvidia-smi -q`: how many PCIe lanes does it have?"
    taken = 1 - own.free_bytes / max(1, own.total_bytes)
    if taken > MAX_TAKEN_SHARE:
        yield f"{taken:.0%} of its memory is taken", "`nvidia-smi` lists the programs; end them"


def judge_peers(num_gpus: int, can_access: Callable[[int, int], bool]) -> Diagnosis:
    """Judge whether each GPU can read the memory of each other one."""
    pairs = [(one, other) for one in range(num_gpus) for other in range(num_gpus) if one != other]
    blocked = [pair for pair in pairs if not can_access(*pair)]
    if blocked:
        shown = ", ".join(f"{one}-{other}" for one, other in blocked[:4])
        text = f"{len(blocked)} of {len(pairs)} pairs have none: {shown}"
        cure = (
            "`nvidia-smi topo -m`; IOMMU, ACS or the virtual machine may forbid it; NCCL copies by the host"
        )
        return Diagnosis("peer access", "slow", text, cure)
    return Diagnosis("peer access", "ok", f"all {len(pairs)} pairs")


def judge_all_reduce(num_gpus: int, bus_bytes_per_s: float) -> Diagnosis:
    """Judge the bus bandwidth of an all-reduce, as nccl-tests define it."""
    text = f"all-reduce between {num_gpus} GPUs: {bus_bytes_per_s / 1e9:.0f} GB/s of bus bandwidth"
    figures = {"bus_bytes_per_s": bus_bytes_per_s}
    if bus_bytes_per_s < MIN_BUS_BYTES_PER_S:
        cure = "`nvidia-smi topo -m`; NCCL_DEBUG=INFO shows the transport that was chosen"
        return Diagnosis("NCCL", "slow", text, cure, figures)
    return Diagnosis("NCCL", "ok", text, figures=figures)


def _needed(subject: Subject) -> int:
    """Return the GPUs that the config asks of this machine; 0 if it joins a cluster."""
    config = subject.config
    if not subject.is_given or config.cluster.address is not None:
        return 0
    return sum(pool.num_gpus for pool in config.placement.pools_in_use.values())


def _free(index: int) -> GpuMemory:
    """Return what is free on a GPU; nothing if not even the driver's own part fits."""
    properties = torch.cuda.get_device_properties(index)
    try:
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        free, total = 0, properties.total_memory
    return GpuMemory(index, properties.name, free, total)


def _measure(own: GpuMemory) -> GpuSpeed:
    device = torch.device("cuda", own.index)
    torch.cuda.set_device(device)
    with torch.inference_mode():
        product_s = _product_s(device)
        copy_s, host_s = _copy_s(device)
    torch.cuda.empty_cache()
    return GpuSpeed(
        own.index,
        own.name,
        2.0 * SIZE**3 / product_s,
        2.0 * COPY_BYTES / copy_s,
        COPY_BYTES / host_s,
        own.free_bytes,
        own.total_bytes,
    )


def _product_s(device: torch.device) -> float:
    """Return the seconds of one product."""
    left = torch.ones(SIZE, SIZE, device=device, dtype=torch.bfloat16)
    right, out = torch.ones_like(left), torch.empty_like(left)
    return _seconds(lambda: torch.mm(left, right, out=out))


def _copy_s(device: torch.device) -> tuple[float, float]:
    """Return the seconds of a copy within the GPU's memory, and of one from the host."""
    source = torch.zeros(COPY_BYTES, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    pinned = torch.zeros(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    within_s = _seconds(lambda: target.copy_(source))
    return within_s, _seconds(lambda: target.copy_(pinned, non_blocking=True))


def _seconds(operation: Callable[[], Tensor]) -> float:
    """Return the mean duration of an operation on the current GPU, by the GPU's own clock."""
    for _ in range(2):  # the first call chooses a kernel
        operation()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(REPEATS):
        operation()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / REPEATS
