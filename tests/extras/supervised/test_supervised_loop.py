"""The loop of supervised training with a learner of a few lines: which weights come out, whenever the run was
stopped.
"""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.cluster.workers import LocalWorker
from agentrl.config.trainer import TrainerConfig
from agentrl.controller.checkpoint import find_checkpoint
from agentrl.extras.supervised.config import SFTConfig
from agentrl.extras.supervised.data import Examples
from agentrl.extras.supervised.loop import Loop, Order, SupervisedJob, SupervisedProgress
from agentrl.learner.batch import Sample
from agentrl.tracking.console import QuietConsole
from agentrl.tracking.metrics import MetricsFile, read_metrics
from agentrl.tracking.tracker import Trackers

SAMPLES = tuple(Sample.supervised(i, np.arange(2, dtype=np.int32), np.array([False, True])) for i in range(3))


class Stopped(Exception):
    pass


class CountingLearner:
    """Its weights are the number of updates made; their validation loss is given.

    Dies in the update behind `stop`.
    """

    def __init__(self, losses, stop=None):
        self.losses, self.stop, self.num_updates = losses, stop, 0

    def parity_tokens(self):
        return 1.0

    def shared_prefix(self):
        return False

    def supervised_update(self, shards):
        if self.num_updates == self.stop:
            raise Stopped
        self.num_updates += 1
        return {"loss": 1.0, "is_skipped": 0.0}

    def measure(self, shards):
        return {"loss": self.losses[self.num_updates - 1], "num_tokens": 1.0}

    def export(self, folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "config.json").write_text(str(self.num_updates))

    def start_save(self, folder):
        (Path(folder) / "updates").write_text(str(self.num_updates))

    def finish_save(self):
        return []

    def find_damage(self, checkpoint, below, how, part, num_parts):
        return []

    def load(self, folder):
        self.num_updates = int((Path(folder) / "updates").read_text())


def run(folder, losses, *, export, test_freq, save_freq, stop=None, **learner_options):
    """Run, or go on from the newest checkpoint; return which update's weights came out."""
    trainer = {
        "steps": len(losses),
        "batch_size": 2,
        "export": export,
        "test_freq": test_freq,
        "save_freq": save_freq,
    }
    data = {"val_files": ["held_out.jsonl"]}
    config = SFTConfig.model_validate(
        {"trainer": {**trainer, "output": str(folder / "policy")}, "data": data, "learner": learner_options}
    )
    job = SupervisedJob("sft", "conversation", config, config.model, Examples(SAMPLES), Examples(SAMPLES))
    (job.run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
    checkpoint = find_checkpoint(job.run_dir / "checkpoints", TrainerConfig())
    progress = (
        SupervisedProgress("same") if checkpoint is None else SupervisedProgress.resumed(checkpoint, "same")
    )
    learner = CountingLearner(losses, stop)
    if checkpoint is not None:
        learner.load(checkpoint.learner)
    trackers = Trackers(MetricsFile(job.run_dir / "metrics.jsonl"), QuietConsole())
    with trackers:
        Loop(job, Order.of(3, config.trainer), LocalWorker(learner), trackers, progress).run(
            checkpoint.step if checkpoint else 0
        )
    return int((folder / "policy" / "config.json").read_text())


losses = st.lists(st.integers(1, 5).map(float), min_size=1, max_size=6)


@given(
    losses=losses,
    export=st.sampled_from(["last", "best"]),
    test_freq=st.integers(1, 3),
    save_freq=st.integers(1, 3),
    stop=st.integers(0, 6),
)
def test_the_last_or_the_best_weights_come_out_also_of_a_stopped_run(
    tmp_path_factory, losses, export, test_freq, save_freq, stop
):
    folder = tmp_path_factory.mktemp("run")
    options = {"export": export, "test_freq": test_freq, "save_freq": save_freq}
    try:
        run(folder, losses, **options, stop=stop)
        assert stop >= len(losses)
    except Stopped:
        assert stop < len(losses)
    validated = [step for step in range(1, len(losses) + 1) if step % test_freq == 0 or step == len(losses)]
    expected = len(losses) if export == "last" else min(validated, key=lambda step: (losses[step - 1], step))
    assert run(folder, losses, **options) == expected


@pytest.mark.parametrize(("budget", "over"), [(1, 2.0), (2, 0.0), (99, 0.0)])
def test_rows_longer_than_a_microbatch_are_counted(tmp_path, budget, over):
    run(tmp_path, [1.0], export="last", test_freq=1, save_freq=-1, microbatch_tokens=budget)
    values = read_metrics(tmp_path / "policy_run" / "metrics.jsonl")[0].values
    assert values["sft/microbatches_over_budget"] == over
    assert values["sft/microbatch_tokens_max"] == (2.0 if budget < 4 else 4.0)


def test_a_best_policy_that_was_removed_is_replaced_by_the_last(tmp_path):
    options = {"export": "best", "test_freq": 1, "save_freq": 1}
    assert run(tmp_path, [1.0, 2.0], **options) == 1
    (tmp_path / "policy" / "config.json").unlink()
    assert run(tmp_path, [1.0, 2.0], **options) == 2
