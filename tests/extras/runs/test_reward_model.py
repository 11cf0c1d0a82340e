"""A reward model from pairs to a run of PPO: trained, exported, the same scores elsewhere, one term of the
reward, start of the critic.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import agentrl
from agentrl.adapters.catalog import open_plugins
from agentrl.chat.chat import Chat
from agentrl.extras.supervised.config import load_rm_config
from agentrl.data.checked_dataset import OfferedTools
from agentrl.data.trajectories import decode, read_parquet
from agentrl.extras.supervised.train import train_reward_model
from agentrl.types import Task

SIZES = (
    "{hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2, "
    "num_key_value_heads: 2}"
)


pytestmark = pytest.mark.usefixtures("one_ray")


@dataclass(frozen=True)
class Judge:
    """A trained reward model, in transformers' hands, and what its training measured on the held-out
    pairs.
    """

    folder: Path
    held_out: list[dict]
    validations: dict[int, dict]

    @torch.no_grad()
    def scores(self, texts):
        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        model = AutoModelForSequenceClassification.from_pretrained(self.folder).eval()
        assert model.config.pad_token_id == tokenizer.pad_token_id
        batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        return model(**batch).logits[:, 0].numpy()


def write_pairs(path, rng, count):
    """The answer with a digit is preferred."""

    def row():
        words = ["".join(rng.choice(list("abcde"), size=4)) for _ in range(2)]
        return {"prompt": "Say.", "chosen": f"{words[0]}{rng.integers(10)}", "rejected": words[1]}

    rows = [row() for _ in range(count)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return rows


@pytest.fixture(scope="module")
def judge(world):
    rng = np.random.default_rng(0)
    write_pairs(world.folder / "pairs.jsonl", rng, 256)
    held_out = write_pairs(world.folder / "held_out.jsonl", rng, 64)
    config = world.folder / "rm.yaml"
    config.write_text(
        f"""
data: {{train_files: [{world.folder}/pairs.jsonl], val_files: [{world.folder}/held_out.jsonl]}}
from_scratch: {{architecture: qwen2, sizes: {SIZES}}}
learner: {{world_size: 2, microbatch_tokens: 512, optimizer: {{lr: 1.0e-2}}}}
trainer: {{total_epochs: 6, batch_size: 32, test_freq: 12, output: {world.folder}/judge, export: best}}
"""
    )
    folder = train_reward_model(load_rm_config(str(config)))
    records = map(json.loads, (world.folder / "judge_run/metrics.jsonl").read_text().splitlines())
    return Judge(
        folder, held_out, {record["step"]: record for record in records if record["kind"] == "validation"}
    )


def test_a_reward_model_learns_and_scores_elsewhere_as_here(judge):
    assert list(judge.validations) == [12, 24, 36, 48]
    best = min(judge.validations.values(), key=lambda record: record["val/loss"])
    assert best["val/accuracy"] > 0.9
    tokenizer = AutoTokenizer.from_pretrained(judge.folder)

    def texts(key):
        talks = [
            [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[key]}]
            for row in judge.held_out
        ]
        return [
            tokenizer.apply_chat_template(talk, tokenize=False).rstrip("\n") for talk in talks
        ]  # up to the end of the turn

    margins = judge.scores(texts("chosen")) - judge.scores(texts("rejected"))
    assert np.mean(margins > 0) == best["val/accuracy"]
    assert np.mean(margins) == pytest.approx(best["val/margin"], rel=1e-5)


@pytest.mark.slow
def test_ppo_learns_from_it_beside_a_rule_and_its_critic_begins_as_it(world, judge):
    run_dir = world.folder / "with_reward_model"
    config = agentrl.load_config(
        str(world.config),
        [
            f"trainer.run_dir={run_dir}",
            "trainer.steps=2",
            "algorithm=ppo",
            f"critic.model.path={judge.folder}",
            f"data.val_files=[{world.folder}/data/val.parquet]",
            "reward.terms={helpful: {reward: reward_model, weight: 0.5}}",
            f"reward_model={{model: {{path: {judge.folder}}}, world_size: 2, microbatch_tokens: 300}}",
        ],
    )
    result = agentrl.train(config)
    assert result.step == 2
    assert result.counts.is_balanced
    assert not result.counts.dropped

    validated = decode(read_parquet(run_dir / "validation/step_000000.parquet"))
    trained = [decode(read_parquet(run_dir / f"trajectories/step_{step:06d}.parquet")) for step in (1, 2)]
    for trajectories in (*trained, validated):
        scores = [t.metrics["reward/helpful"] for t in trajectories]
        np.testing.assert_allclose(
            scores, expected(config, judge, trajectories), rtol=1e-6
        )  # float32, in other batches
        for t in trajectories:
            [event] = [event for event in t.rewards if event.name == "helpful"]
            assert event.value == pytest.approx(0.5 * t.metrics["reward/helpful"])
            assert event.position == np.flatnonzero(t.action_mask)[-1]
            assert t.reward == pytest.approx(t.metrics["reward/arithmetic"] + event.value)

    records = world.records(run_dir)
    assert records.train[0]["learner/critic/value_mean"] != 0.0, (
        "the judge's head: another one would begin at 0"
    )
    for step, trajectories in enumerate(trained, start=1):
        mean = np.mean([t.metrics["reward/helpful"] for t in trajectories])
        assert records.train[step - 1]["rollout/reward/helpful"] == pytest.approx(mean)
        assert records.train[step - 1]["rollout/reward/helpful/truncated"] == 0.0
    assert records.validation[0]["val/reward/helpful"] == pytest.approx(
        np.mean([t.metrics["reward/helpful"] for t in validated])
    )


def expected(config, judge, trajectories):
    """Return what transformers says of the conversations, written in the judge's own template."""
    chat, plugins = Chat.load(str(judge.folder)), open_plugins(config.agent)
    offered = OfferedTools(config.agent, plugins)

    def text(t):
        tools = offered.schemas(Task(t.task_id, t.data_source, t.messages, t.agent_name))
        last = max(i for i, message in enumerate(t.messages) if message.role == "assistant")
        return chat.decode(chat.render_whole(t.messages[: last + 1], tools)).rstrip("\n")

    return judge.scores([text(t) for t in trajectories])
