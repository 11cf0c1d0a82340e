"""Who owns a box, and what becomes of boxes that nobody owns."""

from __future__ import annotations

import dataclasses
import secrets
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.extras.boxes.audit import Containers
from agentrl.extras.boxes.leases import LABEL, BoxLease, own_lease, started_at, sweep
from parts.box_kinds import IMAGE, podman_command, why_no_podman


def test_a_lease_is_alive_as_long_as_the_very_process_that_wrote_it() -> None:
    own = own_lease()
    assert BoxLease.parse(str(own)) == own
    assert own.is_here
    assert own.is_alive
    assert not dataclasses.replace(own, started=own.started + 1).is_alive  # the number was given away
    assert not dataclasses.replace(own, boot="another").is_alive
    assert not dataclasses.replace(own, host="another").is_here
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        started = started_at(process.pid)
        assert started is not None
        lease = dataclasses.replace(own, pid=process.pid, started=started)
        assert lease.is_alive
        process.kill()
        process.stdin.close()
    assert not lease.is_alive
    with pytest.raises(ValueError):
        BoxLease.parse("no lease")


@pytest.mark.slow
def test_the_audit_removes_what_nobody_owns_and_nothing_else() -> None:
    if why := why_no_podman():
        pytest.skip(why)
    engine, own = podman_command(), own_lease()
    dead = dataclasses.replace(own, started=own.started + 1)
    elsewhere = dataclasses.replace(own, host="another")
    names = {f"test-{secrets.token_hex(4)}": lease for lease in (own, dead, elsewhere)}
    for name, lease in names.items():
        command = [*engine, "create", "--name", name, "--label", f"{LABEL}={lease}", IMAGE, "/usr/bin/true"]
        subprocess.run(command, check=True, capture_output=True)
    try:
        told = {box.name: box.ownership for box in Containers(engine).found()}
        assert told == dict(zip(names, ["in use", "nobody's", "another machine's"], strict=True))
        asked = ["boxes", "--command", " ".join(engine)]
        listed = CliRunner().invoke(app, asked)
        assert listed.exit_code == 1
        assert "nobody's" in listed.stdout
        removed = CliRunner().invoke(app, [*asked, "--remove"])
        assert removed.exit_code == 0
        assert {box.ownership for box in Containers(engine).found()} == {"in use", "another machine's"}
        assert sweep(Containers(engine)) == []
    finally:
        for name in names:
            subprocess.run([*engine, "rm", "--force", name], check=False, capture_output=True)
