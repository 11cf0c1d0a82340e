"""The environment of a real SGLang on a CPU: where it is kept, what a build that failed leaves, and the
stand-ins; without building it.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.config.compose import load_config
from sglang_cpu import environment
from sglang_cpu.environment import BuildError

STAND_INS = Path(environment.__file__).with_name("stand_ins.py")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "agentrl" / "sglang-cpu"


def test_each_recipe_has_a_folder_of_its_own(cache, tmp_path, monkeypatch):
    first = environment.environment_folder()
    assert first.parent == cache
    assert environment.environment_folder() == first
    monkeypatch.setattr(environment, "RECIPE", tmp_path / "requirements.txt")
    (tmp_path / "requirements.txt").write_text("sglang==0.5.24\n")
    assert environment.environment_folder() != first


def test_who_builds_it_is_told_where_it_is_missing():
    with pytest.raises(BuildError, match="run `make test-sglang`"):
        environment.built_python()


def test_a_build_starts_from_nothing_and_counts_only_when_it_is_whole(cache, monkeypatch):
    folder = environment.environment_folder()
    folder.mkdir(parents=True)
    (folder / "left by an interrupted build").touch()
    steps = []

    def run(command, purpose, log):
        steps.append(purpose)
        if "packages" in purpose:
            raise BuildError("no such package")

    monkeypatch.setattr(environment, "run", run)
    with pytest.raises(BuildError):
        environment.build(folder)
    assert len(steps) == 2
    assert not folder.exists()
    assert not environment.is_built(folder)


def test_a_step_that_failed_is_one_line(tmp_path):
    code = "import sys; print('collecting', 'packages', sep=chr(10)); sys.exit('no matching distribution')"
    with pytest.raises(BuildError) as failed:
        environment.run([sys.executable, "-u", "-c", code], "install its packages", tmp_path / "build.log")
    assert str(failed.value).startswith(
        "the SGLang environment could not install its packages: no matching distribution"
    )
    assert "\n" not in str(failed.value)


def test_absent_packages_can_be_imported_and_used_but_are_not_there():
    code = """
import importlib.util
import stand_ins
import sgl_kernel
from pynvml.anything import decorate, Base, CONSTANT

@decorate
def plain(): return 1
@decorate(an_option=2)
def with_options(): return 2
class Mine(Base[int]):
    field: CONSTANT | None = None
assert (plain(), with_options(), list(CONSTANT)) == (1, 2, [])
assert isinstance(Mine, type) and sgl_kernel.anything(1, 2).more
assert importlib.util.find_spec("pynvml") is None and importlib.util.find_spec("json") is not None
try:
    import not_a_stand_in
except ModuleNotFoundError:
    print("right")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=STAND_INS.parent, check=False, capture_output=True, text=True
    )
    assert (done.stdout.strip(), done.stderr) == ("right", "")


def test_the_packaged_arguments_make_a_run_use_such_servers():
    rollout = load_config("quickstart", ["server=sglang_cpu", "rollout.sglang.python=/opt/python"]).rollout
    assert (rollout.backend, rollout.sglang.args["device"], rollout.sglang.python) == (
        "sglang",
        "cpu",
        "/opt/python",
    )
    assert rollout.sglang.env["SGLANG_USE_CPU_ENGINE"] == "1"
