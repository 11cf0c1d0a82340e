"""A critic on one rank against plain transformers forwards, and what it learns; assessment and credit of a
step with a critic.
"""

import itertools
import logging
import math
from contextlib import closing, contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Qwen2Config,
)

from agentrl.algorithms.aggregation import Aggregation
from agentrl.algorithms.values import value_loss
from agentrl.cluster.workers import LocalWorker
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.config.model import ModelConfig, ModelFromScratchConfig
from agentrl.config.schema import Config
from agentrl.controller.assess import assess
from agentrl.controller.credit import credit
from agentrl.controller.learner import open_local_learner
from agentrl.controller.reward_kl import RewardKL
from agentrl.controller.roles import Roles
from agentrl.controller.specs import RoleSpecs, check_critic
from agentrl.errors import ConfigError, LearnerError
from agentrl.learner.batch import Sample
from agentrl.learner.critic import Critic, CriticSpec
from agentrl.learner.learner import Learner, LearnerSpec
from agentrl.learner.model import outline_module
from agentrl.learner.packing import pack
from agentrl.learner.ranks import join_ranks, leave_ranks
from agentrl.learner.score_head import ScoreHead
from agentrl.types import Group, Outcome, RewardEvent
from parts.learner import reserved_port, tiny_sizes
from parts.trajectories import facts, make_trajectory

VOCABULARY = 61
SIZES = tiny_sizes(VOCABULARY, tie_word_embeddings=False)


def spec(**changes):
    model = changes.pop("model", ModelConfig())
    learner = LearnerConfig(optimizer=OptimizerConfig(lr=changes.pop("lr", 1e-2), weight_decay=0.0))
    options = {
        "from_scratch": None if model.path else ModelFromScratchConfig(architecture="qwen2", sizes=SIZES)
    }
    options |= {"master_dtype": torch.float64, "aggregation": Aggregation("token_mean"), "cliprange": None}
    options |= {"seed": 3, "total_updates": 100}
    return CriticSpec(model, learner, **(options | changes))


@contextmanager
def critic(**changes):
    one = spec(**changes)
    place = join_ranks(one.learner, rank=0, address="127.0.0.1", port=reserved_port())
    try:
        yield Critic(one, place)
    finally:
        leave_ranks()


def sample(index, rng, target=lambda token: 0.0, length=None):
    """Its returns are `target` of the token before each action."""
    length = length or int(rng.integers(6, 18))
    mask = rng.random(length) < 0.6
    mask[0], mask[-1] = False, True
    tokens = rng.integers(0, VOCABULARY, length).astype(np.int32)
    returns = np.zeros(length, np.float32)
    returns[1:] = [target(int(t)) for t in tokens[:-1]]
    zeros = np.zeros(length, np.float32)
    return Sample(
        index,
        tokens,
        mask,
        mask,
        zeros,
        zeros,
        values=rng.normal(size=length).astype(np.float32),
        returns=returns,
    )


def batch(count=6, seed=0, **options):
    rng = np.random.default_rng(seed)
    return [sample(index, rng, **options) for index in range(count)]


def shard(samples, max_tokens=1000):
    [microbatches] = pack(samples, max_tokens=max_tokens, world_size=1)
    return microbatches


def values_of(one, samples, max_tokens=1000):
    """Index -> f64[A], values in the order of action tokens."""
    found = {}
    for microbatch, values in zip(
        shard(samples, max_tokens),
        (a.numbers.load() for a in one.values(shard(samples, max_tokens), None)),
        strict=True,
    ):
        indices = microbatch.sample_indices[microbatch.sequence_ids]
        found |= {int(index): values[indices == index] for index in np.unique(indices)}
    return [found[s.index] for s in samples]


def save_classifier(folder, seed=1):
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_config(
        Qwen2Config(**SIZES, num_labels=1, pad_token_id=0)
    ).double()
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    return model.eval()


@torch.no_grad()
def plain_values(model, one):
    """The head on the hidden state of the token before each action, one sequence at a time."""
    hidden = model.base_model(torch.tensor(one.token_ids[None]).long()).last_hidden_state[0]
    return model.score(hidden)[:, 0].numpy()[np.flatnonzero(one.action_mask) - 1]


# ----------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("max_tokens", [1000, 30, 1])
def test_values_are_read_where_the_action_is_predicted_whatever_the_packing(tmp_path, max_tokens):
    """Also: what `agentrl rm` trains, a sequence classifier, begins with its own head."""
    model, samples = save_classifier(tmp_path / "judge"), batch()
    with critic(model=ModelConfig(path=str(tmp_path / "judge"))) as one:
        for found, s in zip(values_of(one, samples, max_tokens), samples, strict=True):
            np.testing.assert_allclose(found, plain_values(model, s), atol=1e-9)


def test_the_folder_of_a_trained_reward_model_begins_a_critic(tmp_path):
    """What `agentrl rm` exports: the first value before an action is the score of all that precedes it."""
    one = spec()
    judge = LearnerSpec(
        *(one.model, one.learner, AlgorithmConfig(), "on_policy", one.seed, 1.0, one.total_updates),
        from_scratch=one.from_scratch,
        score_head=ScoreHead(pad_token_id=VOCABULARY - 1),
    )
    with closing(Learner(judge, rank=0, address="127.0.0.1", port=reserved_port())) as learner:
        learner.export(str(tmp_path / "judge"))
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "judge", dtype=torch.float64).eval()
    samples = [
        replace(s, token_ids=np.minimum(s.token_ids, VOCABULARY - 2)) for s in batch(2)
    ]  # padding is no part of a conversation
    with critic(model=ModelConfig(path=str(tmp_path / "judge"))) as one, torch.no_grad():
        for found, s in zip(values_of(one, samples), samples, strict=True):
            prefixes = (
                torch.tensor(s.token_ids[None, :place]).long() for place in np.flatnonzero(s.action_mask)
            )
            scores = [model(prefix).logits.item() for prefix in prefixes]
            assert min(map(abs, scores)) > 1e-4
            np.testing.assert_allclose(found, scores, atol=1e-6)  # exported in float32


def test_a_causal_model_begins_with_a_value_of_0_everywhere(tmp_path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen2Config(**SIZES)).save_pretrained(tmp_path / "policy")
    with critic(model=ModelConfig(path=str(tmp_path / "policy"))) as one:
        assert all((found == 0).all() for found in values_of(one, batch()))


def test_context_behind_an_action_does_not_change_its_value(tmp_path):
    save_classifier(tmp_path / "judge")
    short = batch(1)[0]
    tail = np.zeros(5, np.float32)
    long = replace(
        short,
        token_ids=np.concatenate([short.token_ids, np.arange(5, dtype=np.int32)]),
        action_mask=np.concatenate([short.action_mask, np.zeros(5, np.bool_)]),
        loss_mask=np.concatenate([short.loss_mask, np.zeros(5, np.bool_)]),
        **{
            name: np.concatenate([getattr(short, name), tail])
            for name in ("behavior_logprobs", "advantages", "values", "returns")
        },
    )
    with critic(model=ModelConfig(path=str(tmp_path / "judge"))) as one:
        np.testing.assert_allclose(values_of(one, [long])[0], values_of(one, [short])[0], atol=1e-12)


# --------------------------------------------------------------------------------------------------- learning


def expected_loss(model, samples, *, cliprange, rule):
    """The value loss by loops over plain forwards."""
    total, tokens = 0.0, sum(int(s.loss_mask.sum()) for s in samples)
    for s in samples:
        chosen = s.loss_mask[s.action_mask]
        columns = (plain_values(model, s), s.values[s.action_mask], s.returns[s.action_mask])
        for v, o, r in zip(*(np.asarray(c, np.float64)[chosen] for c in columns), strict=True):
            plain = 0.5 * (v - r) ** 2
            loss = (
                plain
                if cliprange is None
                else max(plain, 0.5 * (min(max(v, o - cliprange), o + cliprange) - r) ** 2)
            )
            total += loss / tokens if rule == "token_mean" else loss / (len(samples) * chosen.sum())
    return total


@pytest.mark.parametrize("rule", ["token_mean", "sequence_mean_token_mean"])
@pytest.mark.parametrize("cliprange", [None, 0.3])
def test_the_loss_equals_a_loop_and_does_not_depend_on_the_split(tmp_path, rule, cliprange):
    model = save_classifier(tmp_path / "judge")
    samples = batch(target=lambda token: token / 30)
    rejected = samples[1].loss_mask.copy()
    rejected[-1] = False
    samples[1] = replace(samples[1], loss_mask=rejected)
    found = []
    for max_tokens in (1000, 25, 1):
        with critic(
            model=ModelConfig(path=str(tmp_path / "judge")),
            aggregation=Aggregation(rule),
            cliprange=cliprange,
        ) as one:
            found.append(one.update(shard(samples, max_tokens)))
    expected = expected_loss(model, samples, cliprange=cliprange, rule=rule)
    for metrics in found:
        assert metrics["critic/loss"] == pytest.approx(expected, rel=1e-9)
        assert metrics == pytest.approx(found[0], rel=1e-8, abs=1e-10)


def test_it_learns_a_known_value_function():
    """What is to be earned follows from the token before: after some updates nearly all of the variance is
    explained, of fresh data too.
    """
    options = {"target": lambda token: float(token % 2), "length": 12}
    with critic() as one:
        shares = [
            one.update(shard(batch(16, seed, **options)))["critic/explained_variance"] for seed in range(60)
        ]
        held_out = batch(8, seed=99, **options)
        errors = np.concatenate(
            [v - s.returns[s.action_mask] for v, s in zip(values_of(one, held_out), held_out, strict=True)]
        )
    assert shares[0] < 0.2
    assert shares[-1] > 0.9
    assert np.abs(errors).mean() < 0.2


def test_a_batch_without_loss_tokens_changes_nothing():
    nothing = [replace(s, loss_mask=np.zeros_like(s.loss_mask)) for s in batch(2)]
    with critic() as one:
        before = one.checksums()
        assert one.update(shard(nothing))["critic/is_skipped"] == 1.0
        assert one.checksums() == before


def test_a_resumed_critic_goes_on_bit_for_bit(tmp_path):
    samples = batch(target=lambda token: token / 30)
    with critic() as one:
        one.update(shard(samples))
        one.start_save(str(tmp_path / "state"))
        one.finish_save()
        whole = one.update(shard(samples)), one.checksums()
    with critic(seed=9) as other:
        other.load(str(tmp_path / "state"))
        assert (other.update(shard(samples)), other.checksums()) == whole


# ------------------------------------------------------------------------------------------------- assessment


def trajectory(rng, *, member=0, outcome=Outcome.COMPLETED):
    """Two rows that grow in turn: turns 0 and 3 in the first, 1 and 2 in the second; context stands behind
    the last action of each.
    """
    rows = [(0, 3), (1, 2)]
    tokens, turns, starts = [], [], []
    for row in rows:
        starts.append(len(tokens))
        for turn in row:
            size = int(rng.integers(1, 4))
            tokens += rng.integers(0, VOCABULARY, 2 + size).tolist()
            turns += [-1] * 2 + [turn] * size
        tokens, turns = [*tokens, 5], [*turns, -1]
    last = np.flatnonzero(np.array(turns) == 3)[-1]
    reward = RewardEvent("r", float(rng.normal()), int(last))
    return make_trajectory(
        turns,
        member=member,
        token_ids=tokens,
        rewards=(reward,),
        outcome=outcome,
        segment_starts=tuple(starts),
    )


@torch.no_grad()
def value_behind(model, tokens):
    hidden = model.base_model(torch.tensor(tokens[None]).long()).last_hidden_state[0, -1]
    return float(model.score(hidden))


@pytest.mark.parametrize("max_tokens", [1000, 9])
def test_values_reach_credit_in_the_order_of_sampling_and_a_truncated_attempt_is_bootstrapped(
    tmp_path, max_tokens
):
    model, rng = save_classifier(tmp_path / "judge"), np.random.default_rng(4)
    whole, cut = trajectory(rng), trajectory(rng, member=1, outcome=Outcome.TRUNCATED)
    config = Config(
        algorithm={"advantage": "gae", "gamma": 0.9, "lam": 0.7, "bootstrap_truncated": True},
        learner={"microbatch_tokens": max_tokens},
        rollout={"group_size": 2},
    )
    groups = facts(Group(0, (whole, cut)))
    with critic(model=ModelConfig(path=str(tmp_path / "judge"))) as one:
        assessment = assess(
            Roles(learner=None, critic=LocalWorker(one)), groups, config.algorithm, config.learner
        )
    [refs] = credit(groups, config.algorithm, group_size=2, assessment=assessment)
    samples = [ref.load() for ref in refs]
    for attempt, found in zip((whole, cut), samples, strict=True):
        values, bounds = {}, [*attempt.segment_starts, attempt.num_tokens]
        for start, end in itertools.pairwise(bounds):
            for position in range(start + 1, end):
                values[position] = value_behind(model, attempt.token_ids[start:position])
        order = sorted(np.flatnonzero(attempt.action_mask), key=lambda p: (attempt.turn_ids[p], p))
        after = (
            value_behind(model, attempt.token_ids[: bounds[1]]) if attempt is cut else 0.0
        )  # turn 3 stands in the first row
        advantage, expected = 0.0, {}
        for position in reversed(order):
            reward = attempt.reward if position == attempt.rewards[0].position else 0.0
            advantage = reward + 0.9 * after - values[position] + 0.9 * 0.7 * advantage
            expected[position], after = advantage, values[position]
        for position in order:
            assert found.advantages[position] == pytest.approx(expected[position], abs=1e-5)
            assert found.values[position] == pytest.approx(values[position], abs=1e-6)
            assert found.returns[position] == pytest.approx(expected[position] + values[position], abs=1e-5)


@pytest.mark.parametrize("is_cut", [False, True])
def test_values_that_are_not_finite_end_the_run_as_the_learners_error(tmp_path, is_cut):
    """Not as one of the config: exit code 1, and the line says whose numbers they are."""
    save_classifier(tmp_path / "judge")
    attempt = trajectory(np.random.default_rng(4), outcome=Outcome.TRUNCATED if is_cut else Outcome.COMPLETED)
    config = Config(algorithm={"advantage": "gae", "bootstrap_truncated": True}, rollout={"group_size": 1})
    with critic(model=ModelConfig(path=str(tmp_path / "judge"))) as one:
        torch.nn.init.constant_(one._model.tensors["score.weight"], math.nan)
        with pytest.raises(
            LearnerError,
            match=r"^the critic's values: \d+ of \d+ numbers are not finite; resume from an earlier "
            r"checkpoint",
        ):
            assess(
                Roles(learner=None, critic=LocalWorker(one)),
                facts(Group(0, (attempt,))),
                config.algorithm,
                config.learner,
            )


def test_a_kl_that_is_not_finite_ends_the_run_as_the_learners_error(tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen2Config(**SIZES))
    model.save_pretrained(tmp_path)
    kl = {"place": "reward", "coefficient": 0.1, "estimator": "k1"}
    config = Config(
        model={"path": str(tmp_path)}, algorithm={"kl": kl, "singleton": "raw"}, rollout={"group_size": 1}
    )
    groups = facts(Group(0, (trajectory(np.random.default_rng(4)),)))
    learner = open_local_learner(RoleSpecs.of(config, num_steps=1, dump_folder=str(tmp_path)).learner)
    with closing(learner.worker):
        roles = Roles(learner, reward_kl=RewardKL(config.algorithm.kl))
        found = assess(roles, groups, config.algorithm, config.learner)
        assert np.isfinite(np.concatenate([own.kl.load() for own in found.columns])).all()
        torch.nn.init.constant_(learner.worker._policy.tensors["model.norm.weight"], math.nan)
        with pytest.raises(
            LearnerError, match=r"^the policy's KL to the reference: \d+ of \d+ numbers are not finite"
        ):
            assess(roles, groups, config.algorithm, config.learner)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"algorithm": {"advantage": "gae"}, "critic": {"enabled": False}},
            "algorithm.advantage=gae needs a critic",
        ),
        ({"critic": {"enabled": True}}, "algorithm.advantage=grpo uses no critic"),
        (
            {"algorithm": {"advantage": "gae"}, "critic": {"warmup_steps": 3}, "trainer": {"steps": 3}},
            "critic.warmup_steps=3 leaves no step of trainer.steps=3",
        ),
        (
            {"algorithm": {"kl": {"estimator": "k1"}}},
            "estimator=k1 in the loss has an expected gradient of zero",
        ),
        ({"algorithm": {"kl": {"coefficient": 0.1, "target": 0.1}}}, "use place=reward"),
        ({"algorithm": {"kl": {"place": "reward", "target": 0.1}}}, "start with a coefficient above 0"),
    ],
)
def test_what_does_not_go_together_is_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        Config(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"critic": {"model": {"path": "nowhere/at/all/here"}}}, r"critic: model.path='nowhere/at/all/here'"),
        (
            {"critic": {"model": {"path": "two"}}},
            r"critic: model.path='.*two' has 2 labels; a score or value needs exactly one",
        ),
        (
            {"critic": {"model": {"path": "tokens"}}},
            r"critic: model.path='.*tokens' is a Qwen2ForTokenClassification, whose head has a bias",
        ),
        (
            {"learner": {"world_size": 3, "sequence_parallel": 3}},
            r"critic: learner.sequence_parallel=3 does not divide",
        ),
        (
            {
                "critic": {"model": {"lora": {"rank": 2, "dropout": 0.1}}},
                "learner": {"world_size": 2, "tensor_parallel": 2},
            },
            r"critic: model.lora.dropout=0.1 draws other numbers",
        ),
    ],
)
def test_a_critic_that_cannot_be_built_is_refused_before_ranks_start(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    save_classifier(tmp_path / "judge")
    AutoModelForSequenceClassification.from_config(Qwen2Config(**SIZES, num_labels=2)).save_pretrained(
        tmp_path / "two"
    )
    AutoModelForTokenClassification.from_config(Qwen2Config(**SIZES, num_labels=1)).save_pretrained(
        tmp_path / "tokens"
    )
    config = {"model": {"path": "judge"}, "algorithm": {"advantage": "gae"}}
    built, refused = Config.model_validate(config), Config.model_validate(config | options)
    check_critic(built.critic_model, built.model, built.learner)
    with pytest.raises(ConfigError, match=message):
        check_critic(refused.critic_model, refused.model, refused.learner)
    assert not Config.model_validate(options).has_critic  # without one, nothing is asked


@pytest.mark.parametrize(
    ("kind", "options", "has_score_head", "message"),
    [
        (
            AutoModelForSequenceClassification,
            {"num_labels": 2},
            True,
            "has 2 labels; a score or value needs exactly one",
        ),
        (
            AutoModelForTokenClassification,
            {"num_labels": 1},
            True,
            "is a Qwen2ForTokenClassification, whose head has a bias, which is not supported",
        ),
        (
            AutoModelForSequenceClassification,
            {"num_labels": 1},
            False,
            "is a Qwen2ForSequenceClassification, which has no head over the vocab",
        ),
        (
            AutoModelForTokenClassification,
            {},
            False,
            "is a Qwen2ForTokenClassification, which has no head over the vocabulary",
        ),
        (
            AutoModel,
            {"tie_word_embeddings": False},
            False,
            r"does not fit .*: it lacks 1 weight \('lm_head.weight'\); use the folder of a complete model",
        ),
    ],
)
def test_a_head_that_would_be_filled_with_random_numbers_is_refused(
    tmp_path, kind, options, has_score_head, message
):
    kind.from_config(Qwen2Config(**{**SIZES, **options})).save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path))
    with pytest.raises(ConfigError, match=rf"^model.path='.*' {message}[^\n]*$"):
        outline_module(model, "sdpa", torch.float32, from_scratch=None, has_score_head=has_score_head)


def test_a_new_head_on_a_whole_model_is_no_news(tmp_path, caplog):
    """Transformers' report of weights that are missing reads as an error; of others it is not kept back."""
    AutoModelForCausalLM.from_config(Qwen2Config(**SIZES)).save_pretrained(tmp_path)
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addHandler(caplog.handler)
    try:
        outline_module(
            ModelConfig(path=str(tmp_path)), "sdpa", torch.float32, from_scratch=None, has_score_head=True
        )
        assert not [record for record in caplog.records if record.name.startswith("transformers")]
        AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1)
        assert "MISSING" in caplog.text
    finally:
        logger.removeHandler(caplog.handler)


def test_float16_is_not_trained_but_loaded(tmp_path):
    """As `agentrl export` and servers do; gradients would need the scaling that bfloat16 has no need of."""
    AutoModelForCausalLM.from_config(Qwen2Config(**SIZES)).save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path), dtype="float16")
    with (
        pytest.raises(
            ConfigError, match=r"^model.dtype=float16 cannot be trained: .*; use bfloat16 or float32$"
        ),
        critic(model=model),
    ):
        pass
    assert outline_module(model, "sdpa", torch.float16, from_scratch=None).module.dtype == torch.float16


def test_within_the_bound_nothing_is_clipped_by_rounding():
    rng = np.random.default_rng(0)
    old, returns = (torch.tensor(rng.normal(size=2000)) for _ in range(2))
    loss = value_loss(
        old + torch.tensor(rng.choice([-1e-15, 1e-15, 1e-3], 2000)), old, returns, cliprange=0.2
    )
    assert not loss.is_clipped_A.any()
