"""What multiplies on a CPU, and how fast it should be."""

from dataclasses import replace

import pytest
import torch

from agentrl.algorithms.linear_kernels import OneDnnLinear, use_linear_kernels
from agentrl.config.learner import LearnerConfig
from agentrl.config.schema import Config
from agentrl.extras.doctor import processor
from agentrl.extras.doctor.cpu_peak import CorePeak
from agentrl.extras.doctor.processor import ProductSpeeds
from agentrl.extras.doctor.subject import Subject
from agentrl.granted import Granted

CORE = CorePeak("a core", 2e9, 64e9, "fma")


@pytest.mark.parametrize("kernels", ["torch", "onednn"])
def test_both_libraries_are_measured_and_the_one_of_the_config_is_in_use(kernels):
    config = Config(learner=LearnerConfig(linear_kernels=kernels))
    speeds = processor.measure_products(Subject(config, is_given=True))
    layer = torch.nn.Linear(1, 1)
    use_linear_kernels(layer, kernels, device="cpu")
    assert speeds.is_onednn == isinstance(layer, OneDnnLinear) == (kernels == "onednn")
    assert speeds.in_use == (speeds.onednn if kernels == "onednn" else speeds.torch)
    assert 1e8 < speeds.torch < 1e12
    assert 1e8 < speeds.onednn < 1e12


@pytest.mark.parametrize(
    ("speeds", "verdict", "cure"),
    [
        (ProductSpeeds(50e9, 60e9, is_onednn=False), "ok", ""),
        (ProductSpeeds(50e9, 66e9, is_onednn=False), "slow", "linear_kernels=onednn"),
        (ProductSpeeds(66e9, 50e9, is_onednn=True), "slow", "linear_kernels=torch"),
        (ProductSpeeds(10e9, 66e9, is_onednn=True), "ok", ""),
        (ProductSpeeds(10e9, None, is_onednn=False), "slow", "not built for this CPU"),
    ],
)
def test_the_library_in_use_is_judged_by_the_other_one_and_by_the_core(speeds, verdict, cure):
    found = processor.judge_products(speeds, CORE)
    assert (found.verdict, cure in found.cure) == (verdict, True), found


def test_without_a_known_core_only_the_libraries_are_compared():
    assert processor.judge_products(ProductSpeeds(1e9, 1e9, is_onednn=False), None).verdict == "ok"


def test_more_threads_than_cpus_are_slow():
    grant = Granted(4, "cgroup", 64, 1, "machine", 1)
    assert processor.judge_threads(4, grant, "2.13").verdict == "ok"
    found = processor.judge_threads(64, grant, "2.13")
    assert (found.verdict, "OMP_NUM_THREADS=4" in found.cure) == ("slow", True)
    assert processor.judge_threads(64, replace(grant, num_cpus=64), "2.13").verdict == "ok"


def test_a_number_format_that_the_cpu_lacks_is_slow():
    assert processor.judge_dtype("bfloat16", 90e9, 80e9).verdict == "ok"
    found = processor.judge_dtype("bfloat16", 8e9, 80e9)
    assert (found.verdict, "model.dtype=float32" in found.cure) == ("slow", True)
