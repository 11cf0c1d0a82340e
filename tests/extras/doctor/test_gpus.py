"""GPUs are judged by their peak, by their equals, and by what is left of their memory."""

from dataclasses import replace

import pytest

from agentrl.config.schema import Config
from agentrl.errors import InfrastructureError
from agentrl.extras.doctor import gpus
from agentrl.extras.doctor.collective import measure_all_reduce
from agentrl.extras.doctor.gpus import GpuMemory, GpuSpeed
from agentrl.extras.doctor.subject import Subject

GOOD = GpuSpeed(0, "NVIDIA H100 80GB HBM3", 700e12, 2.6e12, 50e9, 79 << 30, 80 << 30)


def judged(*speeds):
    return list(gpus.judge_gpus([replace(own, index=index) for index, own in enumerate(speeds)]))


def test_equal_gpus_at_their_speed_are_ok():
    assert {own.verdict for own in judged(GOOD, GOOD)} == {"ok"}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"half_flops_per_s": 300e12}, "30% of its peak"),
        ({"half_flops_per_s": 550e12}, "products: 79% of GPU 0"),
        ({"copy_bytes_per_s": 2e12}, "memory: 77% of GPU 0"),
        ({"host_bytes_per_s": 4e9}, "slow transfers from the host"),
        ({"free_bytes": 60 << 30}, "25% of its memory is taken"),
    ],
)
def test_a_gpu_behind_its_equals_is_slow(changes, text):
    first, second = judged(GOOD, replace(GOOD, **changes))
    assert first.verdict == "ok"
    assert second.verdict == "slow"
    assert text in second.text


def test_a_full_gpu_is_told_in_a_line_and_the_others_are_measured(monkeypatch):
    memory = [GpuMemory(0, GOOD.name, 79 << 30, 80 << 30), GpuMemory(1, GOOD.name, 300 << 20, 80 << 30)]
    monkeypatch.setattr(gpus.torch.cuda, "device_count", lambda: len(memory))
    monkeypatch.setattr(gpus, "_free", memory.__getitem__)
    monkeypatch.setattr(gpus, "_measure", lambda own: replace(GOOD, index=own.index))
    full, good = gpus.diagnose(Subject(Config(), False))
    assert (full.part, full.verdict) == ("GPU 1", "wrong")
    assert "0.3 of 80 GiB free, too little" in full.text
    assert (good.part, good.verdict) == ("GPU 0", "ok")


def test_gpus_of_other_names_are_no_measure():
    old = replace(GOOD, name="NVIDIA A100-SXM4-80GB", half_flops_per_s=250e12, copy_bytes_per_s=1.5e12)
    assert {own.verdict for own in judged(GOOD, replace(old, host_bytes_per_s=20e9))} == {"ok"}


@pytest.mark.parametrize(
    ("needed", "has_device", "built_for", "verdict"),
    [(0, False, "", "ok"), (8, False, "12.8", "wrong"), (0, True, "", "wrong"), (0, True, "12.8", "wrong")],
)
def test_a_machine_without_gpus_is_well_unless_it_needs_or_has_some(needed, has_device, built_for, verdict):
    found = gpus.judge_absent(needed=needed, has_device=has_device, built_for=built_for)
    assert found.verdict == verdict


def test_pairs_without_peer_access_are_named():
    assert gpus.judge_peers(4, lambda one, other: True).verdict == "ok"
    found = gpus.judge_peers(4, lambda one, other: {one, other} != {1, 3})
    assert (found.verdict, found.text) == ("slow", "2 of 12 pairs have none: 1-3, 3-1")


def test_the_bus_bandwidth_is_judged():
    assert gpus.judge_all_reduce(8, 100e9).verdict == "ok"
    assert gpus.judge_all_reduce(8, 1e9).verdict == "slow"


@pytest.mark.slow
def test_processes_reduce_over_gloo_as_gpus_do_over_nccl():
    assert measure_all_reduce(2, backend="gloo", num_bytes=1 << 20) > 0
    with pytest.raises(InfrastructureError, match="over no_backend failed"):
        measure_all_reduce(2, backend="no_backend", num_bytes=1 << 20)
