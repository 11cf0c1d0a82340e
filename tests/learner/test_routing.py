"""Replay, balance and load of the experts, against routing computed here from the formulas."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.config.model import ModelConfig, ModelFromScratchConfig
from agentrl.errors import ConfigError, LearnerError
from agentrl.learner.packing import pack
from agentrl.learner.score_head import ScoreHead
from agentrl.servers.expert_routers import find_routers
from parts.experts import (
    CONFIGS,
    NUM_EXPERTS,
    NUM_LAYERS,
    TOP_K,
    VOCABULARY,
    random_experts,
    with_experts,
    write_experts,
)
from parts.learner import learner_spec, lone_learner, random_samples, tiny_sizes, write_tiny_model

SAMPLES = random_samples(6, VOCABULARY)
ROUTED = with_experts(SAMPLES)
TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name in CONFIGS:
        write_experts(folder / name, name)
    return folder


def spec(path, **learner):
    options = {"optimizer": OptimizerConfig(lr=1e-2), **learner}
    return learner_spec(
        ModelConfig(path=str(path)), learner=LearnerConfig(**options), master_dtype=torch.float64
    )


def one_shard(samples, max_tokens=1000):
    [shard] = pack(samples, max_tokens=max_tokens, world_size=1)
    return shard


def plain_model(path):
    """Return the model as transformers loads it, in float64."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
    model.set_experts_implementation("eager")
    return model.eval()


def own_experts(model, token_ids):
    """Return the experts that the model chooses, i16[T, W], by its router's logits."""
    with torch.no_grad():
        logits = model(torch.tensor(token_ids.astype(np.int64))[None], output_router_logits=True)
    chosen = [each.topk(TOP_K, dim=-1).indices for each in logits.router_logits]
    return torch.stack(chosen, dim=1).reshape(len(token_ids), -1).numpy().astype(np.int16)


def force(model, table_TLK):
    """Make a plain model use the given experts, weighted as the paper of each architecture says."""
    for router in find_routers(model):

        def forward(hidden, gate=router.module, layer=router.layer):
            flat = hidden.reshape(-1, hidden.shape[-1])
            logits = flat @ gate.weight.T
            shares = torch.softmax(logits.float(), -1)
            own = shares.topk(TOP_K, -1).indices
            given = torch.from_numpy(table_TLK[:, layer].astype(np.int64))
            experts = torch.where(given < 0, own, given)
            weights = torch.take_along_dim(shares, experts, 1)
            if getattr(gate, "norm_topk_prob", True):  # Mixtral always does
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights.to(logits.dtype), experts

        router.module.forward = forward


def logprobs_by_hand(path, samples):
    """Return the log-probabilities of each sample's actions by forwards of single sequences."""
    found = {}
    for sample in samples:
        model, ids = plain_model(path), torch.tensor(sample.token_ids.astype(np.int64))
        if sample.experts is not None:
            force(model, sample.experts.reshape(-1, NUM_LAYERS, TOP_K))
        with torch.no_grad():
            logits = model(ids[None]).logits[0] / TEMPERATURE
        logprobs = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        found[sample.index] = logprobs[torch.from_numpy(sample.action_mask[1:])].numpy()
    return found


def by_sample(shard, values):
    found = {}
    for microbatch, own in zip(shard, values, strict=True):
        for place, index in enumerate(microbatch.sample_indices):
            found[int(index)] = own[microbatch.sequence_ids == place]
    return found


# ----------------------------------------------------------------------------------------------------- replay


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("max_tokens", [20, 1000])
def test_recorded_experts_are_used_and_others_are_chosen(models, name, max_tokens):
    shard = one_shard(ROUTED, max_tokens)
    with lone_learner(spec(models / name)) as one:
        found = by_sample(shard, one.own_logprobs(shard))
        free = by_sample(one_shard(SAMPLES), one.own_logprobs(one_shard(SAMPLES)))
    expected = logprobs_by_hand(models / name, ROUTED)
    for sample in ROUTED:
        np.testing.assert_allclose(found[sample.index], expected[sample.index], atol=1e-5)
        is_free = np.allclose(found[sample.index], free[sample.index], atol=1e-5)
        assert is_free == (sample.experts is None)


@pytest.mark.parametrize("name", CONFIGS)
def test_replay_of_the_own_choice_changes_nothing(models, name):
    model = plain_model(models / name)
    recorded = [dataclasses.replace(s, experts=own_experts(model, s.token_ids)) for s in SAMPLES]
    results = []
    for samples in (SAMPLES, recorded):
        shard = one_shard(samples)
        with lone_learner(spec(models / name)) as one:
            [before] = one.own_logprobs(shard)
            metrics = one.update(one.score(shard))
            [after] = one.own_logprobs(one_shard(SAMPLES))
            results.append((before, after, metrics))
    (free_before, free_after, free), (before, after, replayed) = results
    np.testing.assert_array_equal(before, free_before)
    assert np.abs(after - before).max() > 0.01
    np.testing.assert_allclose(after, free_after, atol=1e-6)  # gradients may be summed in another order
    assert (replayed["router/replayed"], replayed["router/agreement"]) == (1.0, 1.0)
    assert free["router/replayed"] == 0.0
    assert replayed["router/busiest"] == free["router/busiest"]


@pytest.mark.parametrize("balance", [0.0, 0.3])
@pytest.mark.parametrize("samples", [SAMPLES, ROUTED], ids=["free", "recorded"])
def test_checkpointed_layers_are_recomputed_with_the_same_experts(models, samples, balance):
    sums = []
    for recomputes in (False, True):
        shard = one_shard(samples, 20)
        options = {"gradient_checkpointing": recomputes, "balance_coefficient": balance}
        with lone_learner(spec(models / "qwen3_moe", **options)) as one:
            metrics = one.update(one.score(shard))
            sums.append((one.checksums(), {k: v for k, v in metrics.items() if k.startswith("router/")}))
    assert sums[0] == sums[1]


def test_the_gradient_reaches_the_router_through_the_weights_of_replayed_experts(models):
    name = "model.layers.1.mlp.gate.weight"
    routed = [dataclasses.replace(s, experts=random_experts(s.num_tokens, seed=3)) for s in SAMPLES]
    with lone_learner(spec(models / "qwen3_moe")) as one:
        before = one._policy.full_tensor(name).clone()
        one.update(one.score(one_shard(routed)))
        assert not torch.equal(before, one._policy.full_tensor(name))


def test_the_reference_routes_by_itself(models):
    own = spec(models / "qwen3_moe")
    algorithm = own.algorithm.model_copy(
        update={"kl": own.algorithm.kl.model_copy(update={"coefficient": 0.1})}
    )
    with lone_learner(dataclasses.replace(own, algorithm=algorithm)) as one:
        [(policy, reference)] = one.logprobs(one_shard(ROUTED))
        [(free, _)] = one.logprobs(one_shard(SAMPLES))
    np.testing.assert_array_equal(reference, free)
    assert not np.allclose(policy, free)


@pytest.mark.parametrize(
    ("experts", "words"),
    [
        (np.zeros((9, 3), np.int16), "27 recorded experts are no whole number of tokens with 2 layers"),
        (np.zeros((9, 8), np.int16), "8 numbers per token, up to 0; the model has 2 layers with 2 of 5"),
        (np.full((9, 4), 5, np.int16), "4 numbers per token, up to 5; the model has 2 layers with 2 of 5"),
    ],
)
def test_experts_of_another_model_are_refused(models, experts, words):
    [sample] = random_samples(1, VOCABULARY, length=9)
    shard = one_shard([dataclasses.replace(sample, experts=experts)])
    with (
        lone_learner(spec(models / "qwen3_moe")) as one,
        pytest.raises(LearnerError, match="the servers' experts cannot be replayed") as caught,
    ):
        one.own_logprobs(shard)
    assert words in str(caught.value)


# ---------------------------------------------------------------------------------------------------- balance


def balance_by_hand(path, samples):
    """Return the balance loss of sequences by its formula, from the logits that transformers returns; with
    gradient, and the model.
    """
    model = plain_model(path)
    total, loss = sum(s.num_tokens for s in samples), 0.0
    for sample in samples:
        output = model(torch.tensor(sample.token_ids.astype(np.int64))[None], output_router_logits=True)
        for logits in output.router_logits:
            shares = torch.softmax(logits.float(), -1)
            chosen = shares.topk(TOP_K, -1).indices
            fractions = [
                NUM_EXPERTS * float((chosen == e).sum()) / chosen.numel() for e in range(NUM_EXPERTS)
            ]
            of_layer = sum(f * share for f, share in zip(fractions, shares.mean(0), strict=True))
            loss = loss + of_layer * sample.num_tokens / total / len(output.router_logits)
    return loss, model


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("max_tokens", [20, 1000])
def test_the_balance_loss_is_that_of_the_paper_however_the_batch_is_packed(models, name, max_tokens):
    coefficient, weight = 100.0, "model.layers.0.mlp.gate.weight"
    expected, model = balance_by_hand(models / name, SAMPLES)
    (coefficient * expected).backward()
    gradients = {}
    for balance in (0.0, coefficient):
        options = {"balance_coefficient": balance, "optimizer": OptimizerConfig(lr=1e-9, grad_clip=None)}
        with lone_learner(spec(models / name, **options)) as one:
            kept = one._stepper.optimizer.zero_grad
            one._stepper.optimizer.zero_grad = lambda set_to_none=True: None
            metrics = one.update(one.score(one_shard(SAMPLES, max_tokens)))
            gradients[balance] = one._policy.module.get_parameter(weight).grad.clone()
            one._stepper.optimizer.zero_grad = kept
    assert metrics["router/balance"] == pytest.approx(expected.item(), rel=1e-5)
    assert expected.item() > 1.0
    torch.testing.assert_close(
        gradients[coefficient] - gradients[0.0], model.get_parameter(weight).grad, rtol=1e-4, atol=1e-5
    )


def test_the_load_counts_every_choice_once(models):
    shard = one_shard(SAMPLES, 20)
    model = plain_model(models / "qwen3_moe")
    counts = np.zeros((NUM_LAYERS, NUM_EXPERTS))
    for sample in SAMPLES:
        table = own_experts(model, sample.token_ids).reshape(-1, NUM_LAYERS, TOP_K)
        for layer in range(NUM_LAYERS):
            counts[layer] += np.bincount(table[:, layer].ravel(), minlength=NUM_EXPERTS)
    with lone_learner(spec(models / "qwen3_moe")) as one:
        metrics = one.update(one.score(shard))
    assert metrics["router/busiest"] == pytest.approx((counts.max(1) / counts.mean(1)).mean())
    assert metrics["router/unused"] == pytest.approx((counts == 0).mean())


@pytest.mark.parametrize(
    ("folder", "head", "why"),
    [
        ("dense", None, "is no mixture of experts"),
        ("qwen3_moe", ScoreHead(0), "reward models and critics are trained without it"),
    ],
)
def test_balance_without_experts_is_refused(models, tmp_path, folder, head, why):
    path = models / folder
    if folder == "dense":
        path = tmp_path / folder
        write_tiny_model(path, VOCABULARY)
    own = dataclasses.replace(spec(path, balance_coefficient=0.1), score_head=head)
    with (
        pytest.raises(ConfigError, match=r"learner\.balance_coefficient cannot be used: ") as caught,
        lone_learner(own),
    ):
        raise AssertionError("the learner was built")
    assert why in str(caught.value)


def test_a_new_mixture_of_experts_has_the_sizes_of_the_config():
    sizes = tiny_sizes(VOCABULARY, moe_intermediate_size=24, num_experts=6, num_experts_per_tok=3)
    new = ModelFromScratchConfig(architecture="qwen3_moe", sizes=sizes)
    own = dataclasses.replace(learner_spec(lr=1e-2), from_scratch=new)
    with lone_learner(own) as one:
        metrics = one.update(one.score(one_shard(SAMPLES)))
        assert sum(".experts.5.down_proj" in spec.name for spec in one.tensor_specs()) == NUM_LAYERS
    assert metrics["router/busiest"] >= 1.0
    wrong = dataclasses.replace(
        own, from_scratch=new.model_copy(update={"sizes": {**sizes, "num_expert": 6}})
    )
    with (
        pytest.raises(ConfigError, match=r"unknown key 'num_expert'; its keys .* Qwen3MoeConfig"),
        lone_learner(wrong),
    ):
        raise AssertionError("the learner was built")
