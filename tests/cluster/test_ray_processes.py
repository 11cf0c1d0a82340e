"""Ray's own processes die: the run ends at once, with one line of ours, and leaves nothing behind."""

import subprocess
import sys

import psutil
import pytest

RUN = """
import os, signal, sys, time
import ray
from agentrl.config.cluster import ClusterConfig
from agentrl.cluster.cluster import ray_session
from agentrl.cluster.ray_processes import local_processes

with ray_session(ClusterConfig(num_cpus=1)):
    @ray.remote
    class Actor:
        def pid(self): return os.getpid()
        def wait(self): time.sleep(3600)
    actor = Actor.remote()
    processes = local_processes()
    assert sorted(processes) == ["gcs_server", "raylet"], processes
    print(ray.get(actor.pid.remote()), *(process.pid for process in processes.values()), flush=True)
    os.kill(processes[sys.argv[1]].pid, signal.SIGKILL)
    ray.get(actor.wait.remote())
"""
QUICKLY_S = 30.0
"""Ray's own end comes after a minute; on a loaded machine everything takes some times longer."""


@pytest.mark.parametrize("name", ["gcs_server", pytest.param("raylet", marks=pytest.mark.slow)])
def test_the_death_of_a_process_of_ray_ends_the_run_in_one_line(name):
    running = subprocess.Popen(
        [sys.executable, "-c", RUN, name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    pids = [int(pid) for pid in running.stdout.readline().split()]
    assert len(pids) == 3, running.communicate()[1]
    _, said = running.communicate(timeout=QUICKLY_S)
    assert running.returncode == 1
    ours = [line for line in said.splitlines() if line.startswith("error")]
    assert len(ours) == 1, said
    assert ours[0].startswith(f"error (infrastructure): {name} of Ray (")
    assert ours[0].endswith("died and the run cannot continue; the same command resumes it")
    assert "Traceback" not in said
    left = [process for pid in pids if psutil.pid_exists(pid) for process in [psutil.Process(pid)]]
    _, alive = psutil.wait_procs(left, timeout=QUICKLY_S)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


LEAVES = """
import sys, time
import psutil, ray
from agentrl.config.cluster import ClusterConfig
from agentrl.cluster.cluster import ray_session

with ray_session(ClusterConfig(num_cpus=1)):
    print(*(process.pid for process in psutil.Process().children(recursive=True)), flush=True)
    time.sleep(3600)
"""
GONE_S = 10.0


def test_a_killed_driver_leaves_none_of_rays_processes():
    running = subprocess.Popen([sys.executable, "-c", LEAVES], stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    started = [psutil.Process(int(pid)) for pid in running.stdout.readline().split()]
    assert any("DashboardAgent" in " ".join(process.cmdline()) for process in started)
    running.kill()
    running.wait(QUICKLY_S)
    _, alive = psutil.wait_procs(started, timeout=GONE_S)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
