"""Checks end by themselves or are ended; whatever one of them does, the others have their say."""

import os
import time
from pathlib import Path

import pytest

import parts.ill_check
from agentrl.config.schema import Config
from agentrl.config.trainer import TrainerConfig
from agentrl.errors import UserError
from agentrl.extras.doctor.checks import CHECKS, Check, choose_checks
from agentrl.extras.doctor.diagnosis import Diagnosis
from agentrl.extras.doctor.examine import examine
from agentrl.extras.doctor.subject import Subject

ENDS = {
    "works": "two\nlines",
    "crashes": "its process was ended by SIGSEGV",
    "exits": "its process exited with status 3: the last words",
    "raises": "ZeroDivisionError: no reason",
    "refuses": "a key is wrong; use another",
    "hangs": "gave no answer within 10 s",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Run all ill checks and a healthy one; return their diagnoses by name, and a file of the hanging one."""
    file = tmp_path_factory.mktemp("ill") / "pid"
    checks = [Check(how, "ill_check", 10.0 if how == "hangs" else 120.0) for how in ENDS]
    healthy = next(check for check in CHECKS if check.name == "limits")
    subject = Subject(Config(trainer=TrainerConfig(run_dir=str(file))), is_given=True)
    done = {}
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(Path(parts.ill_check.__file__).parent))
        everything = examine(
            subject, [*checks, healthy], on_done=lambda check, own: done.update({check.name: own})
        )
    assert everything == [own for check in (*checks, healthy) for own in done[check.name]]
    return done, file


def test_a_healthy_check_beside_them_has_its_say(found):
    assert {own.part for own in found[0]["limits"]} >= {"open files", "processes"}


def test_what_a_check_yields_arrives_and_what_its_libraries_print_does_not(found):
    assert found[0]["works"] == [
        Diagnosis("works", "ok", "said before the end"),
        Diagnosis("works", "slow", "two\nlines", "a cure", {"x_per_s": 1.5}),
    ]


@pytest.mark.parametrize("how", [how for how in ENDS if how != "works"])
def test_a_check_that_ends_badly_is_a_finding(found, how):
    end = found[0][how][-1]
    assert end.verdict == "wrong"
    assert end.text.startswith(ENDS[how])
    assert "--debug" in end.cure


def test_what_a_killed_check_has_started_is_gone(found):
    file = found[1]
    if file.is_file():  # else it was killed before it started anything
        deadline = time.monotonic() + 60
        while is_running(int(file.read_text())):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def is_running(pid):
    try:
        os.kill(pid, 0)
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_checks_are_chosen_by_name_and_those_of_a_machine_go_to_the_nodes():
    assert choose_checks([], on_cluster=False) == CHECKS
    assert [check.name for check in choose_checks(["ray", "disks"], on_cluster=False)] == ["disks", "ray"]
    assert [check.name for check in choose_checks(["ray", "disks"], on_cluster=True)] == ["ray", "cluster"]
    with pytest.raises(UserError, match="no check 'disk'; available: python, processor"):
        choose_checks(["disk"], on_cluster=False)
