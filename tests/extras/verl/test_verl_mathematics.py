"""What `config import` writes computes what verl 0.9 computes, or it is refused: loss and gradient of every
loss mode, aggregation, KL and preset of its rollout correction.

The formulas and denominators here are verl's, on padded rows [B, T] with a mask, written independently of the
learner's. The policy is a table of log-probabilities, one for each token of each row, so that its
gradient is that of every token by itself.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from agentrl.algorithms.aggregation import UpdateCounts
from agentrl.config.learner import LearnerConfig
from agentrl.config.schema import Config
from agentrl.extras.verl.importing.source import WrittenConfig
from agentrl.extras.verl.importing.translate import translate
from agentrl.learner.batch import Sample, ScoredMicrobatch
from agentrl.learner.correction import Corrector
from agentrl.learner.loss import PolicyObjective
from agentrl.learner.packing import pack
from agentrl.learner.ranks import join_ranks, leave_ranks
from parts.learner import reserved_port

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"
LENGTHS = np.array([7, 3, 5, 1, 6, 4, 7, 2])
BATCH, LONGEST = len(LENGTHS), 12
MASK = np.arange(LONGEST) < LENGTHS[:, None]
SCRIPT = {
    "algorithm.adv_estimator": "grpo",
    "data.max_response_length": LONGEST,
    "data.train_batch_size": 8,
    f"{ACTOR}.ppo_mini_batch_size": 4,  # two updates per step: the ratio is not 1
    f"{ACTOR}.loss_scale_factor": LONGEST,  # else verl divides by the longest response of a microbatch
    "actor_rollout_ref.model.path": "model",
    "actor_rollout_ref.rollout.n": 4,
}


@pytest.fixture(scope="module", autouse=True)
def world_of_one():
    port = reserved_port()
    join_ranks(LearnerConfig(), rank=0, address="127.0.0.1", port=port)
    yield
    leave_ranks()


# ------------------------------------------------------------------------------------------------------- verl


def f64(values):
    return torch.tensor(np.asarray(values), dtype=torch.float64)


def mean(values, mask):
    return (values * mask).sum() / mask.sum()


def row_means(values, mask):
    return ((values * mask).sum(1) / mask.sum(1).clamp(min=1))[:, None]


def clip_loss(ratio, a, o):
    return torch.maximum(-a * ratio, -a * ratio.clamp(1 - o["clip_ratio_low"], 1 + o["clip_ratio_high"]))


def vanilla(pi, old, a, mask, o):
    ratio = (pi - old).clamp(-20, 20).exp()
    loss = clip_loss(ratio, a, o)
    return torch.where(a < 0, torch.minimum(loss, -a * o["clip_ratio_c"]), loss)


def gspo(pi, old, a, mask, o):
    log_ratio = row_means(pi - old, mask).detach() + pi - pi.detach()
    return clip_loss(log_ratio.clamp(max=10).exp(), a, o)


def sapo(pi, old, a, mask, o):
    tau = torch.where(a > 0, o["tau_pos"], o["tau_neg"])
    return -a * torch.sigmoid(tau * ((pi - old).exp() - 1)) * 4 / tau


def gpg(pi, old, a, mask, o):
    return -a * pi


def cispo(pi, old, a, mask, o):
    return -a * (pi - old).exp().clamp(1 - o["clip_ratio_low"], 1 + o["clip_ratio_high"]).detach() * pi


def dppo_tv(pi, old, a, mask, o):
    moved = (pi.exp() - old.exp()).detach()
    is_valid = torch.where(a > 0, moved <= o["clip_ratio_high"], moved >= -o["clip_ratio_low"])
    return -a * (pi - old).exp().clamp(max=o["clip_ratio_c"]).detach() * pi * is_valid


def geo_mean(pi, old, a, mask, o):
    """One ratio and one advantage per row, here spread over its tokens."""
    log_ratio, sign = pi - old, torch.sign(a)
    bounded = log_ratio.clamp(-o["clip_ratio_low"], o["clip_ratio_high"])
    ratio = row_means(sign * torch.minimum(sign * log_ratio, sign * bounded), mask).exp()
    return -row_means(a, mask) * ratio * torch.ones_like(a)


def covariance(pi, a, mask):
    return ((a - mean(a, mask)) * (pi - mean(pi, mask))).detach()


def clip_cov(pi, old, a, mask, o):
    """With a share so large that every token within the bounds is chosen: verl draws among them without a
    seed.
    """
    found = covariance(pi, a, mask)
    is_chosen = (found > o["clip_cov_lb"]) & (found < o["clip_cov_ub"])
    return clip_loss((pi - old).exp(), a, o) * ~is_chosen


def kl_cov(pi, old, a, mask, o):
    found = covariance(pi, a, mask)[mask]
    count = max(1, int(o["kl_cov_ratio"] * len(found)))
    is_chosen = covariance(pi, a, mask) >= torch.sort(found, descending=True).values[count - 1]
    return -a * (pi - old).exp() + o["ppo_kl_coef"] * (pi - old).abs() * (is_chosen & mask)


LOSSES = {f.__name__: f for f in (vanilla, gspo, sapo, gpg, cispo, dppo_tv, geo_mean, clip_cov, kl_cov)}
DEFAULTS = {
    "clip_ratio_low": 0.2,
    "clip_ratio_high": 0.2,
    "clip_ratio_c": 3.0,
    "tau_pos": 1.0,
    "tau_neg": 1.05,
    "clip_cov_lb": 1.0,
    "clip_cov_ub": 5.0,
    "kl_cov_ratio": 0.0002,
    "ppo_kl_coef": 0.1,
    "loss_agg_mode": "token-mean",
    "rollout_is_threshold": 2.0,
    "loss_type": "ppo_clip",
    "use_v1": True,
}
"""What a script that says nothing gets from verl."""


def aggregate(losses, mask, how, *, num_tokens):
    """`num_tokens`: of the update, which verl counts before its loss or its trainer rejects any."""
    sums = (losses * mask).sum(1)
    if how in ("token-mean", "token-sum"):
        return sums.sum() / (num_tokens if how == "token-mean" else 1)
    if how == "seq-mean-token-mean":
        return (sums / mask.sum(1).clamp(min=1)).sum() / len(sums)
    return sums.sum() / len(sums) / (LONGEST if how == "seq-mean-token-sum-norm" else 1)


def bounds_of(text):
    *low, high = (float(part) for part in str(text).split("_"))
    return (low[0] if low else None), high


def weights(log_ratio, mask, o):
    """Importance weights of training over rollout policy; a band makes those outside count nothing."""
    if o["rollout_is"] == "sequence":
        log_ratio = (log_ratio * mask).sum(1, keepdim=True).expand_as(log_ratio)
    low, high = bounds_of(o["rollout_is_threshold"])
    raw = log_ratio.clamp(-20, 20).exp()
    found = raw.clamp(max=high) if low is None else raw * ((raw >= low) & (raw <= high))
    if o.get("rollout_is_batch_normalize"):
        found = found / (mean(found, mask) if o["rollout_is"] == "token" else found[:, 0].mean())
    return found.detach()


def accepted(log_ratio, mask, o):
    """The tokens that pass all stages; k1 is the log of rollout over training policy, and its bounds are
    ratios.
    """
    kept = mask.clone()
    names = o["rollout_rs"].split(",")
    texts = str(o["rollout_rs_threshold"]).split(",")
    for name, text in zip(names, texts * len(names) if len(texts) == 1 else texts, strict=True):
        level, _, statistic = name.rpartition("_")
        x = log_ratio.detach().clamp(-20, 20)
        values = {"k1": -x, "k2": x**2 / 2, "k3": x.exp() - 1 - x}[statistic]
        judged = {
            "token": values,
            "seq_sum": (values * mask).sum(1, keepdim=True),
            "seq_mean": row_means(values, mask),
            "seq_max": torch.where(mask, values, -torch.inf).max(1, keepdim=True).values,
        }[level]
        low, high = bounds_of(text)
        if statistic == "k1":
            low, high = math.log(1 / high if low is None else low), math.log(high)
        kept &= (judged <= high) & (judged >= (-torch.inf if low is None else low))
    return kept


def kl_loss(pi, ref, kind):
    """The value and, where the name ends with `+`, the gradient of another."""
    d = pi - ref
    value = {"low_var_kl": (-d).exp() - 1 + d, "mse": d**2 / 2, "abs": d.abs(), "kl": d}[
        kind.removesuffix("+")
    ]
    return value.detach() + d**2 / 2 - (d**2 / 2).detach() if kind.endswith("+") else value


def verl_loss(o, pi, old, mu, a, ref):
    """The loss of one update on one device.

    `old` is verl's recomputed log-probability, which bypass mode does without.
    """
    mask = torch.tensor(MASK)
    compared = (pi if o.get("bypass_mode") else old) - mu
    kept = accepted(compared, mask, o) if o.get("rollout_rs") else mask
    weight = weights(compared, mask, o) if o.get("rollout_is") else torch.ones_like(mu)
    mode, how = o.get("loss_mode", "vanilla"), o["loss_agg_mode"]
    if o.get("bypass_mode") and o["loss_type"] == "reinforce":
        losses = -a * pi * weight
    elif o.get("bypass_mode"):
        losses = vanilla(pi, mu, a, kept, o)
    else:
        losses = LOSSES[mode](pi, old, a, kept, o) * weight
        how = "seq-mean-token-mean" if mode in ("sapo", "geo_mean") else how
    # Its older trainer counts the tokens that the decoupled correction accepted.
    num_tokens = (mask if o["use_v1"] or o.get("bypass_mode") else kept).sum()
    total = aggregate(losses, kept, how, num_tokens=num_tokens)
    if o.get("use_kl_loss"):
        seen = mask if o.get("bypass_mode") else kept  # the loss rejects, and its KL does not know
        kl = kl_loss(pi, ref, o["kl_loss_type"])
        total = total + o["kl_loss_coef"] * aggregate(kl, seen, o["loss_agg_mode"], num_tokens=num_tokens)
    return total


# ------------------------------------------------------------------------------------------------------- ours


class Table:
    """A policy that is one log-probability per token: f64[B, T]."""

    device = torch.device("cpu")

    def __init__(self, logprobs):
        self.logprobs = f64(logprobs).requires_grad_()

    def score(self, microbatch, positions_A, targets_A, *, temperature):
        found = np.searchsorted(microbatch.predictor_positions, positions_A.numpy())
        rows, columns = places(microbatch)
        values = self.logprobs[rows[found], columns[found]]
        return values, torch.zeros_like(values)


def places(microbatch):
    return microbatch.sample_indices[microbatch.sequence_ids], microbatch.action_places


def case(seed, *, is_first_update):
    """Log-probabilities now, at the step's start and of the server; advantages, one per row;
    log-probabilities of the reference.
    """
    rng = np.random.default_rng(seed)
    old = -rng.exponential(1.2, MASK.shape) - 0.1
    mu = np.minimum(old + rng.normal(0, 0.25, MASK.shape), -1e-3)
    pi = old.copy() if is_first_update else np.minimum(old + rng.normal(0, 0.5, MASK.shape), -1e-3)
    return (
        pi,
        old,
        mu,
        np.broadcast_to(rng.normal(0, 1.5, (BATCH, 1)), MASK.shape),
        pi + rng.normal(0, 0.4, MASK.shape),
    )


def our_loss(config, pi, old, mu, a, ref):
    """The loss and its gradient, f64[B, T], with packing, correction and objective of a run."""

    def sample(row):
        length = LENGTHS[row]
        is_action = np.arange(length + 1) > 0
        columns = [np.concatenate([[0.0], values[row, :length]]) for values in (mu, a)]
        return Sample(row, np.zeros(length + 1, np.int32), is_action, is_action, *columns)

    algorithm, mode = config.algorithm, config.policy_mode
    algorithm = algorithm.model_copy(
        update={"constant_length": algorithm.constant_length or config.agent.max_response_tokens}
    )
    objective = PolicyObjective(algorithm, mode, temperature=1.0)
    [microbatches] = pack([sample(row) for row in range(BATCH)], max_tokens=10, world_size=1)
    scores = [old[places(m)] if objective.needs_scores else None for m in microbatches]
    corrections = Corrector(algorithm, mode).correct(microbatches, scores)
    refs = [ref[places(m)] if algorithm.kl.coefficient else None for m in microbatches]
    items = [
        ScoredMicrobatch(*columns) for columns in zip(microbatches, scores, refs, corrections, strict=True)
    ]
    totals = (
        sum(getattr(i, n) for i in items) for n in ("num_loss_tokens", "num_sequences", "num_action_tokens")
    )
    counts, policy, loss = UpdateCounts(*totals), Table(pi), 0.0
    for item in items:
        part = objective.part(policy, item, counts)
        part.loss.backward()
        loss += part.loss.item()
    return loss, policy.logprobs.grad.numpy()


SECTIONS = {
    **dict.fromkeys(
        ("loss_mode", "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef"),
        f"{ACTOR}.policy_loss",
    ),
    **dict.fromkeys(
        ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "tau_pos", "tau_neg", "loss_agg_mode"), ACTOR
    ),
    **dict.fromkeys(("use_kl_loss", "kl_loss_coef", "kl_loss_type", "ppo_mini_batch_size"), ACTOR),
    "loss_scale_factor": ACTOR,
    "use_v1": "trainer",
}


def imported(options):
    """What becomes of these keys of verl, by their last names."""
    written = {f"{SECTIONS.get(key, CORRECTION)}.{key}": value for key, value in options.items()}
    return translate(WrittenConfig(SCRIPT | written))


def gradients(options, translation, seed, *, is_first_update=False):
    """Loss and gradient of verl, and ours."""
    columns = case(seed, is_first_update=is_first_update)
    moving = f64(columns[0]).requires_grad_()
    expected = verl_loss(DEFAULTS | options, moving, *map(f64, columns[1:]))
    expected.backward()
    loss, gradient = our_loss(Config.model_validate(translation.values), *columns)
    return (expected.item(), moving.grad.numpy() * MASK), (loss, gradient)


def assert_equal(options, *, is_first_update=False, num_seeds=3):
    translation = imported(options)
    assert not translation.decisive
    for seed in range(num_seeds):
        (expected, wanted), (loss, gradient) = gradients(
            options, translation, seed, is_first_update=is_first_update
        )
        assert np.abs(gradient).max() > 1e-3
        # verl divides by the length of a sequence + 1e-8
        np.testing.assert_allclose(gradient, wanted, rtol=1e-7, atol=1e-10)
        if options.get("kl_loss_type") != "kl+":  # of which only the gradient is the same
            assert loss == pytest.approx(expected, rel=1e-7)


# ------------------------------------------------------------------------------------------------------ tests

MODES = {
    "vanilla": [
        {},
        {"clip_ratio_low": 0.1, "clip_ratio_high": 0.4, "clip_ratio_c": 1.5},
        {"clip_ratio_low": 2.0},
    ],
    "gspo": [{"clip_ratio_low": 0.05, "clip_ratio_high": 0.1}],
    "sapo": [{}, {"tau_pos": 2.0, "tau_neg": 3.0}],
    "gpg": [{}],
    "cispo": [{}, {"clip_ratio_low": 10, "clip_ratio_high": 0.3}],
    "dppo_tv": [{}, {"clip_ratio_low": 0.05, "clip_ratio_high": 0.02, "clip_ratio_c": 1.2}],
    "geo_mean": [{"clip_ratio_low": 0.3, "clip_ratio_high": 0.4}],
}
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@pytest.mark.parametrize("how", AGGREGATIONS)
@pytest.mark.parametrize(
    ("mode", "options"), [(mode, options) for mode, found in MODES.items() for options in found]
)
def test_an_imported_loss_mode_has_the_loss_and_the_gradient_of_verls(mode, options, how):
    assert_equal({"loss_mode": mode, "loss_agg_mode": how, **options})


ONE_UPDATE = {"ppo_mini_batch_size": 8}
COVARIANCES = [
    {"loss_mode": "clip_cov", "clip_cov_ratio": 0.99, "clip_cov_lb": 0.2, "clip_cov_ub": 3.0, **ONE_UPDATE},
    {"loss_mode": "kl_cov", **ONE_UPDATE},
    {"loss_mode": "kl_cov", "kl_cov_ratio": 0.2, "ppo_kl_coef": 3.0, **ONE_UPDATE},
]


@pytest.mark.parametrize("options", COVARIANCES)
def test_losses_that_select_tokens_do_so_as_verl_if_a_step_has_one_update(options):
    """verl selects by the current policy in each microbatch, here once per step, by the policy at its
    start.
    """
    assert_equal(options, is_first_update=True)


GEOMETRIC, K3 = (
    {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.9_1.2"},
    {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.03},
)
TOKENS = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.8_1.25"}
REINFORCE = {"bypass_mode": True, "loss_type": "reinforce"}
TOKEN, SEQUENCE, BAND = (
    {"rollout_is": "token"},
    {"rollout_is": "sequence"},
    {"rollout_is": "token", "rollout_is_threshold": "0.8_1.25"},
)
PRESETS = {
    "disabled": {},
    "decoupled_token_is": {**TOKEN, "rollout_is_threshold": 1.2},
    "decoupled_seq_is": SEQUENCE,
    "decoupled_token_icepop": BAND,
    "decoupled_seq_is_rs": {**SEQUENCE, "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
    "decoupled_geo_rs": GEOMETRIC,
    "decoupled_geo_rs_seq_tis": {**GEOMETRIC, **SEQUENCE},
    "decoupled_geo_rs_token_tis": {**GEOMETRIC, **TOKEN},
    "decoupled_k3_rs": K3,
    "decoupled_k3_rs_seq_tis": {**K3, **SEQUENCE},
    "decoupled_k3_rs_token_tis": {**K3, **TOKEN},
    "tokens rejected": TOKENS,
    "the older trainer": {**TOKENS, **TOKEN, "use_v1": False},
    "normalized tokens": {**TOKEN, "rollout_is_batch_normalize": True, **ONE_UPDATE},
    "normalized sequences": {**SEQUENCE, "rollout_is_batch_normalize": True, **ONE_UPDATE},
    "normalized in two updates": {**TOKEN, "rollout_is_batch_normalize": True},
    "normalized and rejected": {**GEOMETRIC, **TOKEN, "rollout_is_batch_normalize": True, **ONE_UPDATE},
    "all statistics": {
        "rollout_rs": "token_k1,token_k2,seq_max_k2",
        "rollout_rs_threshold": "0.7_1.3,0.05,0.06",
    },
    "one threshold for all": {"rollout_rs": "seq_sum_k2,seq_max_k3", "rollout_rs_threshold": 0.2},
    "bypass_ppo_clip": {"bypass_mode": True},
    "bypass, whatever the loss mode": {"bypass_mode": True, "loss_mode": "gspo", **TOKEN},
    "bypass_pg": REINFORCE,
    "bypass_pg_is": {**REINFORCE, **SEQUENCE},
    "bypass_pg_is, threshold": {**REINFORCE, **TOKEN, "rollout_is_threshold": 1.1},
    "bypass_pg_token_icepop": {**REINFORCE, **BAND},
    "bypass_pg_is, normalized": {**REINFORCE, **TOKEN, "rollout_is_batch_normalize": True},
    "bypass_ppo_clip_geo_rs": {"bypass_mode": True, **GEOMETRIC, **ONE_UPDATE},
    "bypass_ppo_clip_k3_rs": {"bypass_mode": True, **K3, **ONE_UPDATE},
    "bypass_ppo_clip, tokens rejected": {"bypass_mode": True, **TOKENS, **ONE_UPDATE},
    "bypass_pg_geo_rs": {**REINFORCE, **GEOMETRIC, **ONE_UPDATE},
    "bypass_pg_geo_rs_seq_tis": {**REINFORCE, **GEOMETRIC, **SEQUENCE, **ONE_UPDATE},
    "bypass_pg_geo_rs_token_tis": {**REINFORCE, **GEOMETRIC, **TOKEN, **ONE_UPDATE},
}
KINDS = (None, "low_var_kl", "low_var_kl+", "mse", "abs", "kl", "kl+")


def is_other(o):
    """Whether the learner has no such loss, so that the import must refuse it."""
    mode = "vanilla" if o.get("bypass_mode") else o["loss_mode"]
    how, kind = o["loss_agg_mode"], o.get("kl_loss_type")
    has_mean_of_its_own = mode in ("sapo", "geo_mean")
    return (
        (how == "token-sum" and (kind or not has_mean_of_its_own))
        or kind == "kl"
        or (kind and has_mean_of_its_own and how != "seq-mean-token-mean")
        or (kind and "rollout_is" in o and not o.get("bypass_mode"))
        or (kind and "rollout_rs" in o and o.get("bypass_mode"))
        or (mode == "geo_mean" and o.get("rollout_is") == "token")
        or ("rollout_is_batch_normalize" in o and o.get("bypass_mode"))
        or ("rollout_is_batch_normalize" in o and ("ppo_mini_batch_size" not in o or "rollout_rs" in o))
    )


@pytest.mark.parametrize("name", PRESETS)
def test_an_imported_preset_of_the_correction_has_the_loss_and_the_gradient_of_verls(name):
    """With every loss mode and aggregation, and each kind of KL in turn; or the import refuses it."""
    preset = PRESETS[name]
    modes = [{}] if preset.get("bypass_mode") else [*({"loss_mode": mode} for mode in MODES), *COVARIANCES]
    is_early = preset.get("bypass_mode") and "rollout_rs" in preset  # verl judges anew at every update
    num_equal = 0
    for place, (mode, how) in enumerate(itertools.product(modes, (*AGGREGATIONS, "token-sum"))):
        for kind in (None, KINDS[place % len(KINDS)]):
            kl = {} if kind is None else {"use_kl_loss": True, "kl_loss_coef": 0.5, "kl_loss_type": kind}
            options = {"loss_mode": "vanilla", **preset, **mode, "loss_agg_mode": how, **kl}
            if is_other(options):
                assert imported(options).decisive, options
            else:
                num_equal += 1
                is_first = bool(is_early or mode in COVARIANCES)
                assert_equal(options, is_first_update=is_first, num_seeds=1)
    assert num_equal or "normalized" in name


@pytest.mark.parametrize("how", AGGREGATIONS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in (None, "kl")])
def test_an_imported_kl_loss_is_verls(kind, how):
    """Up to where verl cuts a token's low_var_kl: at 10, about 2.5 nats below the reference."""
    assert_equal({"use_kl_loss": True, "kl_loss_coef": 0.5, "kl_loss_type": kind, "loss_agg_mode": how})


KL = {"use_kl_loss": True, "kl_loss_coef": 0.5, "kl_loss_type": "mse"}


@pytest.mark.parametrize(
    "options",
    [
        {"loss_agg_mode": "token-sum"},
        {"loss_mode": "sapo", **KL},
        {**TOKEN, "rollout_is_threshold": 1.2, **KL},
        {"bypass_mode": True, **TOKENS, **KL, **ONE_UPDATE},
        {"loss_mode": "geo_mean", **BAND},
        {**GEOMETRIC, **TOKEN, "rollout_is_batch_normalize": True, **ONE_UPDATE},
    ],
)
def test_what_the_import_refuses_would_be_another_loss(options):
    translation = imported(options)
    assert translation.decisive
    is_first = "ppo_mini_batch_size" in options
    (_, wanted), (_, gradient) = gradients(options, translation, 0, is_first_update=is_first)
    assert np.abs(gradient - wanted).max() > 0.01 * np.abs(wanted).max()


@pytest.mark.parametrize(
    "options", [*COVARIANCES[::2], *(p for p in PRESETS.values() if "rollout_rs" in p and "bypass_mode" in p)]
)
def test_what_verl_decides_anew_at_each_update_is_refused_with_several(options):
    translation = imported(options | {"ppo_mini_batch_size": 4})
    assert "once per step" in translation.decisive[0].reason
    pairs = [gradients(options, translation, seed) for seed in range(8)]
    assert any(np.abs(our[1] - its[1]).max() > 0.01 * np.abs(its[1]).max() for its, our in pairs)


def test_a_constant_that_verl_does_not_set_is_asked_for():
    norm = {"loss_agg_mode": "seq-mean-token-sum-norm"}
    [finding] = imported(norm | {"loss_scale_factor": None}).decisive
    assert "longest response of each microbatch" in finding.reason
    assert not imported(norm).decisive
