"""Configs of supervised training: what they amount to, on the command line too."""

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.extras.plan.explain_supervised import explain_supervised, find_warnings
from agentrl.extras.supervised.config import RMConfig, SFTConfig


def lines_of(config):
    return [" ".join(line.split()) for line in explain_supervised(config).splitlines()]


def test_a_run_of_imitation_by_hand():
    config = SFTConfig.model_validate(
        {
            "data": {"max_tokens": 500, "prompt_key": "q", "response_key": "a", "val_files": ["v.parquet"]},
            "learner": {
                "world_size": 2,
                "microbatch_tokens": 2048,
                "optimizer": {"lr": 1e-5, "schedule": "cosine", "warmup_updates": 1},
            },
            "trainer": {
                "batch_size": 20,
                "total_epochs": 3,
                "test_freq": 10,
                "save_freq": 5,
                "export": "best",
                "output": "out",
            },
        }
    )
    for line in (
        "conversations 20",
        "tokens at most 10,000 = 20 x 500",
        # 10 per rank, 4 of 500 tokens fit into 2,048
        "microbatches at most 3 on each of 2 ranks, of 2,048 tokens",
        "loss cross-entropy of the response, a mean over the tokens of the update",
        "updates 3 epochs of the training rows (trainer.total_epochs)",
        "learning rate 1e-05, cosine after 1 update of warm-up",
        "validation every 10 updates and at the end",
        "checkpoints every 5 updates and at the end, the last 3 kept",
        "model the weights of the lowest validation loss, in out",
    ):
        assert line in lines_of(config)
    assert not list(find_warnings(config))


def test_a_run_of_preferences_by_hand():
    config = RMConfig.model_validate(
        {"data": {"max_tokens": 500}, "trainer": {"batch_size": 20, "steps": 50}}
    )
    for line in (
        "pairs 20",
        "tokens at most 20,000 = 20 x 1,000 (both of a pair)",
        "loss -log sigmoid(chosen - rejected), a mean over the pairs of the update",
        "updates 50 (trainer.steps), 1,000 examples",
        "validation none: no data.val_files",
        "checkpoints never",
        "model the last weights, in reward_model",
    ):
        assert line in lines_of(config)
    assert not list(find_warnings(config))


@pytest.mark.parametrize(
    ("schema", "sections", "words"),
    [
        (
            SFTConfig,
            {"data": {"max_tokens": 99}, "learner": {"microbatch_tokens": 98}},
            "smaller than a conversation of 99 tokens",
        ),
        (
            RMConfig,
            {"data": {"max_tokens": 99}, "learner": {"microbatch_tokens": 197}},
            "than a pair, which is not split, of 198",
        ),
        (
            SFTConfig,
            {"learner": {"world_size": 8}, "trainer": {"batch_size": 4}},
            "some ranks have nothing to learn from",
        ),
        (RMConfig, {"trainer": {"test_freq": 5}}, "there is nothing to measure"),
        (
            SFTConfig,
            {"trainer": {"steps": 5}, "learner": {"optimizer": {"warmup_updates": 5}}},
            "the learning rate only rises",
        ),
        (
            SFTConfig,
            {"trainer": {"steps": 5, "total_epochs": 2}},
            "total_epochs=2 has no effect beside trainer.steps=5",
        ),
        (RMConfig, {"trainer": {"steps": 1000}}, "a crash in 1000 updates loses everything"),
    ],
)
def test_warnings(schema, sections, words):
    assert list(find_warnings(schema())) == []
    [warning] = find_warnings(schema.model_validate(sections))
    assert words in warning


def test_show_and_explain_know_the_command(tmp_path: Path):
    path = tmp_path / "rm.yaml"
    path.write_text("data: {rejected_key: worse}\n")
    shown = CliRunner().invoke(app, ["config", "show", str(path), "--for", "rm", "trainer.batch_size=3"])
    loaded = yaml.safe_load(shown.output)
    assert (loaded["data"]["rejected_key"], loaded["trainer"]["batch_size"]) == ("worse", 3)
    explained = CliRunner().invoke(app, ["config", "explain", str(path), "--for", "rm"])
    assert "-log sigmoid(chosen - rejected)" in explained.output
    assert (
        CliRunner().invoke(app, ["config", "explain", str(path)]).exit_code != 0
    )  # no key of `agentrl train`
