"""`agentrl doctor` as a user starts it."""

import json
import os
import subprocess
import sys

import pytest
import ray
from ray.cluster_utils import Cluster

from agentrl.extras.doctor.checks import CHECKS
from agentrl.extras.doctor.diagnosis import Diagnosis
from agentrl.extras.doctor.report import lines_of
from parts.learner import write_tiny_model


def run(folder, *words, open_files=4096):
    """Run the command with a limit of open files."""
    limited = ["bash", "-c", f'ulimit -n {open_files} && exec "$@"', "bash"]
    return subprocess.run(
        [*limited, sys.executable, "-m", "agentrl.cli", "doctor", *words],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=folder,
        env={**os.environ, "COLUMNS": "400"},
    )


def test_lines_for_people_and_a_summary(tmp_path):
    done = run(tmp_path, "--only", "limits")
    *lines, last = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines[0].startswith("ok     open files          4,096; ")
    assert last.startswith("0 wrong, ")
    assert list(tmp_path.iterdir()) == []


def test_json_for_machines_and_status_1_if_something_is_wrong(tmp_path):
    done = run(tmp_path, "--json", "--only", "limits", open_files=300)
    report = json.loads(done.stdout)
    assert done.returncode == 1, done.stderr
    assert not report["is_well"]
    first = report["diagnoses"][0]
    assert (first["part"], first["verdict"]) == ("open files", "wrong")
    assert set(first) == {"part", "verdict", "text", "cure", "figures", "node"}


def test_an_unknown_check_or_config_is_one_line(tmp_path):
    done = run(tmp_path, "--only", "disk")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: no check 'disk'; available: python")


def test_what_others_wrote_cannot_move_the_cursor():
    lines = lines_of(Diagnosis("server", "wrong", "a\x1b[2Jb\nc", "d\re", node="10.0.0.1"))
    assert lines[0].startswith("wrong  server on 10.0.0.1")
    assert lines[0].endswith(r"a\x1b[2Jb c")
    assert lines[1].strip() == "cure: d e"


@pytest.mark.slow
def test_everything_on_this_machine(tmp_path):
    write_tiny_model(tmp_path / "model", 384)
    done = run(
        tmp_path,
        *("quickstart", f"model.path={tmp_path / 'model'}", "trainer.run_dir=run", "--json"),
        "rollout.weights.transport=distributed",
    )
    report = json.loads(done.stdout)
    found = {own["part"]: own for own in report["diagnoses"]}
    expected = {"packages", "products", "GPUs", "memory", "shared memory", "locks", "sandbox", "ray actor"}
    assert expected | {"publish", "clock", "ports"} <= set(found)
    assert "distributed: " in found["publish"]["text"]
    # The tokenizer is missing, and nothing else.
    assert [part for part, own in found.items() if own["verdict"] == "wrong"] == ["template"], found


@pytest.mark.slow
def test_every_node_of_a_cluster_is_examined_and_compared(tmp_path):
    options = {"num_cpus": 1, "include_dashboard": False}
    nodes = Cluster(initialize_head=True, head_node_args=options)
    try:
        nodes.add_node(num_cpus=1)
        nodes.wait_for_nodes()
        words = (
            "quickstart",
            f"cluster.address={nodes.address}",
            "--cluster",
            "--json",
            "--only",
            "python,limits",
        )
        done = run(tmp_path, *words)
    finally:
        ray.shutdown()
        nodes.shutdown()
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = [own["part"] for own in report["diagnoses"]]
    assert parts.count("packages") == parts.count("open files") == 2
    assert len({own["node"] for own in report["diagnoses"] if own["part"] == "packages"}) == 2
    together = {own["part"]: own["verdict"] for own in report["diagnoses"] if not own["node"]}
    assert together == dict.fromkeys(["cluster", "versions", "hardware", "clocks", "shared run folder"], "ok")


def test_the_help_names_every_check(tmp_path):
    done = run(tmp_path, "--help")
    assert all(check.name in done.stdout for check in CHECKS)
