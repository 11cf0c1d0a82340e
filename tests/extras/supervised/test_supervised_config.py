"""Configs of supervised training: what they amount to, on the command line too, and what a person sees of a
run.
"""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.config.compose import dump_config
from agentrl.extras.supervised.config import RMConfig, SFTConfig, load_rm_config, load_sft_config
from agentrl.extras.supervised.console import PLAIN_INTERVAL_S, JobConsole
from agentrl.tracking.metrics import StepRecord


def test_pairs_share_no_prompt():
    with pytest.raises(ValueError, match="cannot be used for pairs, which are scored separately"):
        RMConfig.model_validate({"learner": {"shared_prefix": True}})


CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*sft*.yaml")))
def test_packaged_configs_load_and_survive_a_dump(name, tmp_path):
    config = load_sft_config(str(CONFIGS / name))
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump_config(config))
    assert load_sft_config(str(copy)) == config


def test_an_empty_file_is_the_schema(tmp_path):
    (tmp_path / "empty.yaml").write_text("")
    assert load_sft_config(str(tmp_path / "empty.yaml")) == SFTConfig()
    assert load_rm_config(str(tmp_path / "empty.yaml")) == RMConfig()


@pytest.mark.parametrize("schema", [SFTConfig, RMConfig])
def test_the_one_role_is_the_actor(schema):
    one_gpu = schema.model_validate({"placement": {"pools": {"a": {"gpus_per_node": 1}}}})
    assert one_gpu.placement.device_of("actor") == "cuda"
    with pytest.raises(ValueError, match="its largest role, actor, uses 1 of them"):
        schema.model_validate({"placement": {"pools": {"a": {"gpus_per_node": 2}}}})
    profiled = schema.model_validate({"profiler": {"nsight": {"roles": ["actor"]}}})
    assert profiled.profiler.nsight.roles == ("actor",)
    with pytest.raises(ValueError, match="roles names servers, which this run does not have; it has: actor"):
        schema.model_validate({"profiler": {"nsight": {"roles": ["servers"]}}})


def test_a_config_for_an_unknown_command_is_one_line(tmp_path):
    (tmp_path / "run.yaml").write_text("")
    for words in (["config", "show"], ["config", "explain"]):
        done = CliRunner().invoke(app, [*words, str(tmp_path / "run.yaml"), "--for=dpo"])
        assert str(done.exception) == "--for=dpo: no such config; known: rm, sft, train"


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
