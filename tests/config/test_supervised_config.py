"""Configs of supervised training: what they amount to, on the command line too, and what a person sees of a
run.
"""

import pytest

from agentrl.config.supervised import RMConfig
from agentrl.tracking.job_console import PLAIN_INTERVAL_S, JobConsole
from agentrl.tracking.metrics import StepRecord


def test_pairs_share_no_prompt():
    with pytest.raises(ValueError, match="cannot be used for pairs, which are scored separately"):
        RMConfig.model_validate({"learner": {"shared_prefix": True}})


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def record(step, kind="train", **values):
    return StepRecord(kind, step, step, 0.0, {f"sft/{name}": value for name, value in values.items()})


def test_a_log_gets_the_first_line_the_last_and_some_between(capsys):
    clock = Clock()
    console = JobConsole("sft", total=40, restored_step=10, clock=clock)
    console.say("4 conversations")
    clock.now += 100.0
    console.set_total_steps(40)  # what came before is no update
    for step in range(1, 41):
        clock.now += PLAIN_INTERVAL_S / 10 if step > 10 else 0.0
        console.log(record(step, loss=2.0, entropy=1.0, grad_norm=0.5, lr=1e-3, epoch=1.0))
    console.log(record(40, kind="validation", loss=1.5))
    console.close()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "sft: 4 conversations"
    assert [line.split()[1] for line in lines[1:-1]] == ["11/40", "22/40", "33/40", "40/40"]
    assert (
        lines[1] == "sft 11/40  loss 2  entropy 1  grad_norm 0.5  lr 0.001  ETA 0:29"
    )  # 1 s an update, those of this process alone
    assert lines[-1] == "sft: update 40  loss 1.5"
