"""Ranks that share rows learn as ranks that do not: every scene on one rank, on two that share, on four as
two pairs and as four.

The file is also the program that forks the ranks of each world; each rank plays all scenes and the tests look
at what rank 0 wrote.
"""

import json
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.numpy import load_file, save_file
from transformers import LlamaConfig, Qwen2Config

from agentrl.config.algorithm import AlgorithmConfig, ClipCovConfig, KLConfig
from agentrl.config.correction import CorrectionConfig, RejectionConfig
from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.config.model import ModelConfig
from agentrl.errors import ConfigError
from agentrl.learner.batch import Sample
from agentrl.learner.layout import check_folder
from agentrl.learner.learner import Learner
from agentrl.learner.packing import pack
from agentrl.learner.score_head import ScoreHead
from agentrl.learner.sequence_parallel import check_sequence_parallel
from parts.learner import learner_spec, reserved_ports, tiny_sizes
from parts.ranks import run_program, run_ranks

VOCABULARY = 61
SIZES = tiny_sizes(VOCABULARY, intermediate_size=47)
TIMEOUT_S = 200.0
WORLDS = {
    "pair": (2, 2),
    "two_pairs": (4, 2),
    "four": (4, 4),
}  # ranks, ranks that share a row; two key-value heads on four ranks

PLAIN = AlgorithmConfig(
    aggregation="sequence_mean_token_mean", entropy_coefficient=0.01, kl=KLConfig(coefficient=0.1)
)
# sums and order statistics over the tokens of all ranks, in which each token counts once
SELECTIVE = AlgorithmConfig(
    policy_loss="clip_cov",
    clip_cov=ClipCovConfig(share=0.2, lower=-9.0, upper=9.0),
    correction=CorrectionConfig(
        self_normalize=True,
        reject={"far": RejectionConfig(level="token", lower=0.05, upper=8.0)},
        m2po_threshold=0.7,
    ),
)


def samples(count, *, shortest=6, longest=18, seed=5):
    rng = np.random.default_rng(seed)
    found = []
    for index in range(count):
        length = int(rng.integers(shortest, longest))
        starts = (
            (0, length // 2) if index % 3 == 0 else (0,)
        )  # a row that a template edited: two segments of one sequence
        mask = rng.random(length) < 0.6
        mask[list(starts)], mask[-1] = False, True
        tokens, behavior = rng.integers(0, VOCABULARY, length), rng.normal(-3, 1, length)
        advantages = rng.normal(size=length)
        found.append(
            Sample(
                index,
                tokens.astype(np.int32),
                mask,
                mask,
                behavior.astype(np.float32),
                advantages.astype(np.float32),
                starts,
            )
        )
    return found


BATCH = samples(7)
TINY = [
    Sample(
        0,
        *(
            np.array(c, t)
            for c, t in (([3, 5], np.int32), ([0, 1], bool), ([0, 1], bool), ([0, -1], "f4"), ([0, 1], "f4"))
        ),
    )
]


def pairs(count):
    """A preferred and a rejected answer each, as two segments of one sample; the last token of each is what
    is read.
    """
    rng = np.random.default_rng(9)
    found = []
    for index in range(count):
        first, second = rng.integers(4, 9, 2)
        mask = np.zeros(first + second, bool)
        mask[[first - 1, -1]] = True
        found.append(
            Sample.supervised(
                index, rng.integers(0, VOCABULARY, first + second).astype(np.int32), mask, (0, int(first))
            )
        )
    return found


def play(rank, world_size, sequence_parallel, ports, folder):
    """Play all scenes on one rank; rank 0 writes what it saw."""
    learner_config = LearnerConfig(
        world_size=world_size,
        sequence_parallel=sequence_parallel,
        collective_timeout_s=TIMEOUT_S,
        optimizer=OptimizerConfig(lr=1e-2),
    )

    def shard_of(batch):
        return pack(batch, max_tokens=40, world_size=learner_config.dp_size)[rank // sequence_parallel]

    def start(stack, *, dtype=torch.float32, algorithm=PLAIN, score_head=None, **changes):
        config = learner_config.model_copy(update=changes)
        spec = learner_spec(
            sizes=SIZES, learner=config, algorithm=algorithm, master_dtype=dtype, score_head=score_head
        )
        learner = Learner(spec, rank=rank, address="127.0.0.1", port=ports.pop(0))
        stack.callback(learner.close)
        return learner

    facts = {}
    with ExitStack() as stack:
        learner = start(stack)
        use_sgd(learner)
        facts["float32"] = [learner.update(learner.score(shard_of(BATCH))) for _ in range(3)]
        weights = {name: learner._policy.full_tensor(name).numpy() for name in learner._policy.tensors}
        facts["usage"] = learner.usage()
    with ExitStack() as stack:
        learner = start(stack, dtype=torch.float64, algorithm=SELECTIVE, gradient_checkpointing=True)
        facts["selective"] = [learner.update(learner.score(shard_of(BATCH))) for _ in range(2)]
        facts["tiny"] = learner.update(
            learner.score(shard_of(TINY))
        )  # fewer tokens than ranks, and elsewhere a filler
    with ExitStack() as stack:
        learner = start(stack, dtype=torch.float64, score_head=ScoreHead(pad_token_id=VOCABULARY - 1))
        facts["pairs"] = [learner.supervised_update(shard_of(pairs(5))), learner.measure(shard_of(pairs(3)))]
    if rank == 0:
        save_file(weights, str(folder / "weights.safetensors"))
        (folder / "facts.json").write_text(json.dumps(facts))


def use_sgd(learner):
    """AdamW in float32 amplifies rounding, so that weights are compared after plain descent."""
    learner._stepper.optimizer = torch.optim.SGD(learner._policy.module.parameters(), lr=1e-2)


# ----------------------------------------------------------------------------------------------------- worlds


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    play(0, 1, 1, reserved_ports(3), folder)
    return folder


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("worlds")
    run_program(__file__, folder, timeout_s=TIMEOUT_S)
    return folder


@pytest.fixture(params=WORLDS)
def together(worlds, request):
    return worlds / request.param


def facts_of(folder):
    return json.loads((folder / "facts.json").read_text())


# ------------------------------------------------------------------------------------------------------ tests


def test_ranks_that_share_rows_learn_as_one(alone, together):
    one, many = facts_of(alone)["float32"], facts_of(together)["float32"]
    for step, other in zip(one, many, strict=True):
        assert (other["loss"], other["grad_norm"]) == pytest.approx(
            (step["loss"], step["grad_norm"]), rel=1e-5
        )
    ours, theirs = load_file(alone / "weights.safetensors"), load_file(together / "weights.safetensors")
    for name in ours:
        np.testing.assert_allclose(theirs[name], ours[name], rtol=0, atol=1e-6, err_msg=name)


def test_each_token_counts_once(alone, together):
    one, many = facts_of(alone), facts_of(together)
    assert 0 < one["selective"][0]["correction/rejected/far"] < 1
    for step, other in zip(one["selective"], many["selective"], strict=True):
        assert other == pytest.approx(step, rel=1e-9, abs=1e-11)
    tokens = {
        name: facts["usage"]["update_tokens_per_s"] * facts["usage"]["update_s"]
        for name, facts in (("one", one), ("many", many))
    }
    assert tokens["many"] == pytest.approx(tokens["one"]) == 3 * sum(s.num_tokens for s in BATCH)


def test_a_row_of_fewer_tokens_than_ranks(alone, together):
    assert facts_of(together)["tiny"] == pytest.approx(facts_of(alone)["tiny"], rel=1e-9, abs=1e-11)


def test_scores_of_pairs_are_read_on_any_rank(alone, together):
    for step, other in zip(facts_of(alone)["pairs"], facts_of(together)["pairs"], strict=True):
        assert other == pytest.approx(step, rel=1e-9, abs=1e-11)


@pytest.mark.parametrize(
    ("config", "size", "reason"),
    [
        (
            Qwen2Config(num_attention_heads=14, num_key_value_heads=2),
            4,
            "does not divide the 14 attention heads",
        ),
        (Qwen2Config(num_attention_heads=12, num_key_value_heads=4), 6, "4 key-value heads"),
        (
            LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            2,
            "type 'dynamic'",
        ),
    ],
)
def test_a_model_that_cannot_share_rows_is_refused_in_one_line(config, size, reason):
    check_sequence_parallel(config, 1)
    with pytest.raises(ConfigError, match=reason) as refusal:
        check_sequence_parallel(config, size)
    assert "\n" not in str(refusal.value)
    assert f"learner.sequence_parallel={size}" in str(refusal.value)


def test_sizes_that_do_not_fit_are_refused_by_the_config():
    with pytest.raises(ValidationError, match="sequence_parallel=2 does not divide world_size=3"):
        LearnerConfig(world_size=3, sequence_parallel=2)


def test_an_attention_of_whole_rows_is_refused_before_ranks_are_started(tmp_path):
    Qwen2Config(num_attention_heads=4, num_key_value_heads=4).save_pretrained(tmp_path)
    model, learner = (
        ModelConfig(path=str(tmp_path), attention="flex_attention"),
        LearnerConfig(world_size=2, sequence_parallel=2),
    )
    check_folder(model, LearnerConfig(world_size=2))
    check_folder(model.model_copy(update={"attention": "auto"}), learner)
    with pytest.raises(ConfigError, match="flex_attention needs whole microbatches"):
        check_folder(model, learner)
    with pytest.raises(ConfigError, match="has no config"):
        check_folder(ModelConfig(path=str(tmp_path / "nowhere")), learner)


def play_worlds(worlds):
    """Play every world; return how many processes failed."""
    for name in WORLDS:
        (worlds / name).mkdir()
    ports = {name: reserved_ports(3) for name in WORLDS}
    return run_ranks(
        (play, (rank, world_size, sequence_parallel, list(ports[name]), worlds / name))
        for name, (world_size, sequence_parallel) in WORLDS.items()
        for rank in range(world_size)
    )


if __name__ == "__main__":
    sys.exit(play_worlds(Path(sys.argv[1])))
