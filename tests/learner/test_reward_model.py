"""A reward model on one rank: scores against plain transformers, the loss against its formula, and laws of
how pairs are laid out.
"""

import math
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen2Config, Qwen2Model

from agentrl.config.model import LoRAConfig, ModelConfig
from agentrl.errors import ConfigError
from agentrl.learner.batch import Sample
from agentrl.learner.packing import filler, pack
from agentrl.learner.reward_model import score_segments
from agentrl.learner.score_head import ScoreHead, attach_score_head
from agentrl.learner.supervised_loss import bradley_terry
from parts.learner import learner_spec, lone_learner, tiny_sizes

VOCABULARY = 61
PADDING = 60
SIZES = tiny_sizes(VOCABULARY, tie_word_embeddings=False)


def spec(model=None, **changes):
    is_loaded = model is not None and model.path
    new = {"from_scratch": None, "master_dtype": torch.float64} if is_loaded else {"sizes": SIZES}
    defaults = {"mode": "on_policy", "temperature": 1.0, "score_head": ScoreHead(PADDING)}
    return learner_spec(model, **{**new, **defaults, **changes})


@contextmanager
def learner(**changes):
    with lone_learner(spec(**changes)) as one:
        yield one


def conversation(rng, low=0, high=PADDING):
    return rng.integers(low, high, int(rng.integers(2, 14))).astype(np.int32)


def pairs(count, seed=0):
    rng = np.random.default_rng(seed)
    return [(conversation(rng), conversation(rng)) for _ in range(count)]


def microbatches(some_pairs, max_tokens=1000):
    [shard] = pack(
        [Sample.pair(i, *pair) for i, pair in enumerate(some_pairs)],
        max_tokens=max_tokens,
        world_size=1,
        may_split=False,
    )
    return shard


@torch.no_grad()
def scores(one, some_pairs, max_tokens=1000):
    """{pair's index: (chosen, rejected)}, f64."""
    one._policy.module.eval()
    found = {}
    for microbatch in microbatches(some_pairs, max_tokens):
        both = score_segments(one._policy, microbatch).view(-1, 2).numpy()
        found |= dict(zip(microbatch.sample_indices.tolist(), both, strict=True))
    one._policy.reshard()
    return np.array([found[i] for i in range(len(some_pairs))])


def plain_model(one, folder):
    one.export(str(folder))
    return AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    ).eval()


@torch.no_grad()
def plain_scores(model, some_pairs):
    return np.array(
        [[model(torch.tensor(ids[None]).long()).logits[0, 0].item() for ids in pair] for pair in some_pairs]
    )


# ----------------------------------------------------------------------------------------------------- scores


def test_the_exported_folder_gives_the_same_scores_alone_and_padded(tmp_path):
    some = pairs(6)
    with learner(master_dtype=torch.float32) as one:
        ours, model = scores(one, some), plain_model(one, tmp_path / "judge")
    assert type(model).__name__ == "Qwen2ForSequenceClassification"
    assert (model.config.num_labels, model.config.pad_token_id) == (1, PADDING)
    np.testing.assert_allclose(ours, plain_scores(model, some), atol=2e-6)
    flat = [ids for pair in some for ids in pair]
    padded = torch.full((len(flat), max(map(len, flat))), PADDING)
    for row, ids in zip(padded, flat, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    with torch.no_grad():
        together = model(padded, attention_mask=(padded != PADDING).long()).logits[:, 0]
    np.testing.assert_allclose(ours.reshape(-1), together, atol=2e-6)


def test_packed_scores_equal_separate_ones():
    some = pairs(9)
    with learner() as one:
        packed = scores(one, some)
        np.testing.assert_allclose(scores(one, some, max_tokens=1), packed, atol=1e-12)
        np.testing.assert_allclose(scores(one, some[::-1], max_tokens=40)[::-1], packed, atol=1e-12)
        swapped = scores(one, [(rejected, chosen) for chosen, rejected in some])
        np.testing.assert_allclose(swapped[:, ::-1], packed, atol=1e-12)
        with torch.no_grad():
            assert len(score_segments(one._policy, filler())) == 0


def test_a_policys_folder_becomes_a_reward_model(tmp_path):
    policy = AutoModelForCausalLM.from_config(Qwen2Config(**SIZES))
    policy.save_pretrained(tmp_path / "policy")
    with learner(model=ModelConfig(path=str(tmp_path / "policy"))) as one:
        body = plain_model(one, tmp_path / "judge").model.state_dict()
    for name, weight in policy.model.state_dict().items():
        torch.testing.assert_close(body[name].float(), weight)


def test_a_model_without_a_scalar_head_is_refused():
    with pytest.raises(ConfigError, match=r"Qwen2Model has no scalar head"):
        attach_score_head(Qwen2Model(Qwen2Config(**SIZES)), ScoreHead(PADDING), dtype=torch.float32)


# ------------------------------------------------------------------------------------------------------- loss


@given(st.lists(st.tuples(st.floats(-30, 30), st.floats(-30, 30)), min_size=1, max_size=8))
def test_the_loss_is_minus_the_log_probability_that_the_chosen_one_wins(some):
    chosen, rejected = (torch.tensor(column, dtype=torch.float64) for column in zip(*some, strict=True))
    expected = [
        math.log1p(math.exp(-(c - r))) if c > r else math.log1p(math.exp(c - r)) - (c - r) for c, r in some
    ]
    np.testing.assert_allclose(bradley_terry(chosen, rejected), expected, rtol=1e-12, atol=1e-300)


def test_gradients_pass_finite_differences():
    rng = np.random.default_rng(1)
    inputs = [torch.tensor(rng.normal(size=5), requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(bradley_terry, inputs)


def test_metrics_and_update_equal_plain_torch(tmp_path):
    some = pairs(7)
    with learner() as one:
        before = scores(one, some)
        held_out = one.measure(microbatches(some, max_tokens=40))
        metrics = one.supervised_update(microbatches(some, max_tokens=40))
        after = one.measure(microbatches(some))
    margins = before[:, 0] - before[:, 1]
    expected = {
        "loss": np.log1p(np.exp(-margins)).mean(),
        "accuracy": (margins > 0).mean(),
        "margin": margins.mean(),
        "chosen_score": before[:, 0].mean(),
        "rejected_score": before[:, 1].mean(),
        "num_sequences": 7,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-9)
    assert {name: held_out[name] for name in expected} == pytest.approx(expected, rel=1e-9)
    assert after["loss"] < metrics["loss"]


def test_measuring_changes_nothing():
    some = pairs(5)
    with learner() as one:
        before = one.checksums()
        one.measure(microbatches(some))
        assert one.checksums() == before
        metrics = one.supervised_update(microbatches(some))
    with learner() as other:
        assert other.supervised_update(microbatches(some)) == metrics


@pytest.mark.parametrize(("max_tokens", "reverse"), [(1, False), (40, False), (1000, True), (25, True)])
def test_neither_split_nor_order_matters(max_tokens, reverse):
    some = pairs(8)
    with learner() as one:
        expected = [one.supervised_update(microbatches(some)) for _ in range(3)]
    with learner() as other:
        shard = microbatches(some[::-1] if reverse else some, max_tokens)
        metrics = [other.supervised_update(shard) for _ in range(3)]
    for ours, theirs in zip(metrics, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-8, abs=1e-11)


# --------------------------------------------------------------------------------------------------- learning


def test_it_learns_a_preference():
    """The chosen one of two conversations holds token 7, wherever it stands."""
    rng = np.random.default_rng(0)

    def pair():
        chosen, rejected = conversation(rng, low=8), conversation(rng, low=8)
        chosen[rng.integers(len(chosen))] = 7
        return chosen, rejected

    held_out = microbatches([pair() for _ in range(100)])
    with learner(lr=5e-3, total_updates=40, master_dtype=torch.float32) as one:
        assert one.measure(held_out)["accuracy"] < 0.8
        for _ in range(40):
            one.supervised_update(microbatches([pair() for _ in range(32)]))
        assert one.measure(held_out)["accuracy"] > 0.9


def test_a_checkpoint_goes_on_bit_for_bit(tmp_path):
    some = pairs(6)
    with learner(master_dtype=torch.float32) as one:
        one.supervised_update(microbatches(some))
        one.save(str(tmp_path))
        expected = one.supervised_update(microbatches(some))
    with learner(master_dtype=torch.float32) as other:
        other.load(str(tmp_path))
        assert other.supervised_update(microbatches(some)) == expected


def test_beside_an_adapter_the_head_alone_is_trained_in_full(tmp_path):
    some = pairs(6)
    AutoModelForCausalLM.from_config(Qwen2Config(**SIZES)).save_pretrained(tmp_path / "base")
    model = ModelConfig(path=str(tmp_path / "base"), lora=LoRAConfig(rank=2))
    with learner(model=model, master_dtype=torch.float32) as one:
        trained = sorted(
            name for name, weight in one._policy.module.named_parameters() if weight.requires_grad
        )
        assert [name for name in trained if ".lora_" not in name] == ["score.weight"]
        assert "score.weight" not in one._policy.adapters
        first = one.supervised_update(microbatches(some))
        one.save(str(tmp_path / "state"))
        ours, judge = scores(one, some), plain_model(one, tmp_path / "judge")
        np.testing.assert_allclose(ours, plain_scores(judge, some), atol=2e-6)
        expected = one.supervised_update(microbatches(some))
        assert expected["loss"] < first["loss"]
    with learner(model=model, master_dtype=torch.float32) as other:
        other.load(str(tmp_path / "state"))
        assert other.supervised_update(microbatches(some)) == expected


@pytest.mark.parametrize("rank", [0, 2])
def test_half_precision_scores_are_compared_in_float32(tmp_path, rank):
    some = pairs(6)
    AutoModelForCausalLM.from_config(Qwen2Config(**SIZES)).save_pretrained(tmp_path / "base")
    model = ModelConfig(path=str(tmp_path / "base"), dtype="bfloat16", lora=LoRAConfig(rank=rank))
    with learner(model=model, master_dtype=torch.float32, lr=1e-3) as one:
        losses = [one.supervised_update(microbatches(some))["loss"] for _ in range(6)]
        assert losses[-1] < losses[0]
        ours = scores(one, some)
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, plain_scores(plain_model(one, tmp_path / "judge"), some), atol=0.1)
