"""Settings of the checks on a GPU: `make test-gpu` (benchmarks/gpu/README.md).

All files here carry the marker `gpu`. None imports Ray.
"""

import gc
import json
import os
from pathlib import Path

import pytest
import torch

from agentrl.learner.ranks import leave_ranks
from parts.gpu import DEVICE, IS_GPU, SIZES, VOCABULARY, sized
from parts.learner import write_tiny_model

_MEASURED = pytest.StashKey[dict]()


def pytest_configure(config):
    config.stash[_MEASURED] = {}


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def gpu():
    """Fail, rather than skip, without the device: a suite that checked nothing must not pass."""
    if DEVICE not in ("cuda", "cpu"):
        pytest.fail(f"AGENTRL_GPU_DEVICE={DEVICE!r} should be cuda or cpu", pytrace=False)
    if IS_GPU and not torch.cuda.is_available():
        pytest.fail(
            "torch finds no GPU here; AGENTRL_GPU_DEVICE=cpu runs the same checks in small", pytrace=False
        )
    yield
    if torch.distributed.is_initialized():  # of a test that failed half-way
        leave_ranks()
    if IS_GPU:
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture
def measured(request):
    """Figures of the test, by name: listed at the end and written to AGENTRL_GPU_REPORT."""
    return request.config.stash[_MEASURED].setdefault(request.node.name, {})


def pytest_terminal_summary(terminalreporter, config):
    figures = {name: values for name, values in config.stash[_MEASURED].items() if values}
    if not figures:
        return
    device = torch.cuda.get_device_name() if IS_GPU and torch.cuda.is_available() else "cpu"
    terminalreporter.section(f"measured on {device}, torch {torch.__version__}")
    for name, values in figures.items():
        shown = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items())
        terminalreporter.write_line(f"{name}: {shown}")
    if report := os.environ.get("AGENTRL_GPU_REPORT"):
        facts = {"device": device, "torch": torch.__version__, "measured": figures}
        Path(report).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A random Qwen2, far from uniform; the same whenever it is written."""
    folder = tmp_path_factory.mktemp("model")
    spread = sized(0.06, 0.2)
    write_tiny_model(folder, VOCABULARY, **SIZES, initializer_range=spread, max_position_embeddings=16384)
    return folder
