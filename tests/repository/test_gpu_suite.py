"""The checks on a GPU (benchmarks/gpu/README.md): they run in small on a CPU, without Ray, and nothing is
missing where they run.
"""

import os
import re
import runpy
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PACK = runpy.run_path(str(ROOT / "benchmarks" / "gpu" / "pack.py"))
NO_RAY = """
import sys

class NoRay:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ray":
            raise ModuleNotFoundError("ray is not installed here", name="ray")

sys.meta_path.insert(0, NoRay())
"""
NOT_CARRIED = {"torch", "numpy", "hf-xet", "triton"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_check_runs_in_small_on_a_cpu_where_ray_is_not_installed(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(NO_RAY)
    environment = {
        **os.environ,
        "AGENTRL_GPU_DEVICE": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(tmp_path),
    }
    run = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True, "check": False}
    blocked = subprocess.run([sys.executable, "-c", "import ray"], **run)
    assert "ray is not installed here" in blocked.stderr
    suite = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--show-capture=no", "tests/gpu"]
    done = subprocess.run(suite, **run)
    assert done.returncode == 0, done.stdout[-3000:]
    [closing] = re.findall(r"^=*\s*(\d+ passed.*)$", done.stdout, re.MULTILINE)
    assert "skipped" not in closing


@pytest.mark.slow
def test_without_a_gpu_the_suite_says_so_and_fails():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu/test_tensor_transport.py"],
        cwd=ROOT,
        env={**os.environ, "AGENTRL_GPU_DEVICE": "cuda", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "torch finds no GPU here; AGENTRL_GPU_DEVICE=cpu runs the same checks in small" in done.stdout


def test_what_is_carried_needs_nothing_else():
    carried = PACK["missing"](PACK["with_limits"](PACK["ROOTS"]), PACK["read_there"](None), python="3.12")
    assert {"transformers", "pydantic-core", "antlr4-python3-runtime", "pluggy", "pyarrow"} <= set(carried)
    assert not NOT_CARRIED & set(carried)
    assert all(version == metadata.version(name) for name, version in carried.items())


def test_wheels_are_divided_over_calls():
    sizes = {"a": 30.0, "b": 25.0, "c": 20.0, "d": 4.0}
    parts = PACK["split"](sizes, limit_mib=50)
    assert sorted(name for part in parts for name in part) == sorted(sizes)
    assert all(sum(sizes[name] for name in part) <= 50 for part in parts)
    assert len(parts) == 2
    with pytest.raises(SystemExit, match=r"a has 30\.0 MiB, more than --limit-mib=29"):
        PACK["split"](sizes, limit_mib=29)


def test_what_the_machine_has_stays_away_unless_its_version_does_not_serve(tmp_path):
    there = tmp_path / "there.txt"
    there.write_text("# pip freeze\npydantic==2.14.3\nTransformers==5.1.0\nuvicorn\nhuggingface_hub==0.1\n")
    known = PACK["read_there"](there)
    assert known[canonicalize_name("huggingface_hub")] == "0.1"
    wanted = PACK["with_limits"](["pydantic", "transformers", "uvicorn"])
    assert wanted[0] == "pydantic>=2.11"
    carried = PACK["missing"](wanted, known, python="3.12")
    assert "transformers" in carried, "too old"
    assert "huggingface-hub" in carried, "too old for transformers"
    assert not {"pydantic", "pydantic-core", "annotated-types", "uvicorn"} & set(carried), (
        "and what only they need"
    )
