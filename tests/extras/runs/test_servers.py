"""Servers of a run that goes on: started and attached ones side by side, one that joins, one that leaves, one
that hangs.
"""

import json
import os
import re
import signal
from collections import Counter

import httpx
import pytest
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.cluster.control import ControlRequest, ask, read_servers
from agentrl.config.rollout import EmbeddedServerConfig
from agentrl.data.trajectories import decode, read_parquet
from agentrl.errors import ConfigError
from agentrl.extras.embedded.launch import EmbeddedServer
from agentrl.servers.health import generates
from agentrl.servers.supervisor import Supervisor


@pytest.fixture
def elsewhere(world, tmp_path):
    """A server that is not the run's own."""
    supervisor = Supervisor(
        EmbeddedServer(EmbeddedServerConfig(), "float32"),
        log_file=tmp_path / "s.log",
        start_timeout_s=180,
        max_restarts=0,
    )
    yield supervisor.start(str(world.folder / "model"), "default")
    supervisor.stop()


def agentrl(*arguments):
    return CliRunner().invoke(app, ["servers", *map(str, arguments)], catch_exceptions=False).output


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_servers_join_leave_and_hang_while_agents_go_on(world, elsewhere):
    """Colocated: the same path of pause, release, learn, resume, publish runs in every step, whoever is
    there.
    """
    folder = world.folder / "elastic"
    run = world.start(
        "train",
        str(world.config),
        f"trainer.run_dir={folder}",
        "trainer.steps=1000",
        "buffer.max_staleness=2",
        f"rollout.urls=[{elsewhere}]",
        "rollout.num_servers=1",
        "rollout.colocated=true",
        "rollout.server_hang_timeout_s=15",
    )

    def servers():
        return {server.url or server.name: server for server in read_servers(folder).servers}

    def is_ready(num_servers):
        return len(servers()) == num_servers and all(server.state == "ready" for server in servers().values())

    run.wait_until(lambda: world.num_steps(folder) >= 2, timeout_s=300)
    assert "1 attached and 1 embedded server(s)" in run.output()
    table = agentrl("list", folder)
    assert re.search(rf"{re.escape(elsewhere)} +embedded \(attached\) +(ready|needs_weights)", table), table
    assert "embedded (started)" in table
    (started,) = [server.url for server in servers().values() if server.origin == "started"]
    body = {"model_path": "/nowhere"}
    answers = {
        url: httpx.post(f"{url}/update_weights_from_disk", json=body, timeout=60).status_code
        for url in (started, elsewhere)
    }
    assert answers == {started: 401, elsewhere: 400}, "the run's own asks for a key that nobody else has"

    assert "joins: when it generates, it receives the weights, is checked and then serves" in agentrl(
        "add", folder, "--start"
    )
    with pytest.raises(ConfigError, match="already serves this run"):
        ask(folder, ControlRequest(verb="attach", server=elsewhere), timeout_s=120)
    with pytest.raises(ConfigError, match="is on another machine"):
        ask(folder, ControlRequest(verb="attach", server="http://10.1.2.3:30000"), timeout_s=120)
    run.wait_until(lambda: is_ready(3), timeout_s=300)
    assert "joined and gets version" in run.output()

    assert f"{elsewhere} left" in agentrl("drain", folder, elsewhere)
    run.wait_until(lambda: elsewhere not in servers())
    assert generates(elsewhere, api_key=None, timeout_s=60), "it is left as it was found, not paused"

    steps = world.num_steps(folder)
    pids = [int(p.pid) for p in run.processes() if "agentrl.extras.embedded" in " ".join(p.cmdline())]
    os.kill(pids[0], signal.SIGSTOP)
    run.wait_until(lambda: "was restarted and gets version" in run.output(), timeout_s=300)
    # The watchdog finds it, or the publish that it was stopped in.
    found = (
        r"the server hung: it sent nothing for rollout\.server_hang_timeout_s=15; restart 1 of 3"
        r"|did not load version \d+: .* restarting it"
    )
    assert re.search(found, run.output()), run.output()
    run.wait_until(lambda: world.num_steps(folder) >= steps + 3, timeout_s=300)

    run.interrupt()
    assert run.wait() == 130, run.output()
    assert run.left_behind() == []
    with pytest.raises(ConfigError, match="no run is active"):
        read_servers(folder)

    groups = Counter()
    for path in sorted((folder / "trajectories").glob("*.parquet")):
        groups.update({t.group_id for t in decode(read_parquet(path))})
    assert set(groups.values()) == {1}, "a group was trained twice"
    assert all(r["rollout/lag/max"] <= 2 for r in world.records(folder).train)
    versions = [json.loads(line)["version"] for line in (folder / "versions.jsonl").read_text().splitlines()]
    assert versions == sorted(set(versions))
