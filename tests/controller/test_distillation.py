"""On-policy distillation: advantages against loops, log-probabilities against plain transformers forwards,
and a policy that comes closer to its teacher.
"""

import itertools
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, Qwen2Config

from agentrl.algorithms.distillation import teacher_advantages
from agentrl.chat.codec import load_tokenizer
from agentrl.chat.tiny import write_tiny_tokenizer
from agentrl.chat.vocabulary import vocabulary_difference
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.distillation import DistillationConfig
from agentrl.config.learner import LearnerConfig
from agentrl.config.model import ModelConfig
from agentrl.config.schema import Config
from agentrl.config.trainer import TrainerConfig
from agentrl.controller.assess import assess, settle
from agentrl.controller.credit import credit
from agentrl.controller.learner import open_local_learner, plan_for
from agentrl.controller.roles import Roles
from agentrl.controller.teacher import check_teacher
from agentrl.errors import ConfigError
from agentrl.learner.learner import Learner
from agentrl.learner.packing import pack
from agentrl.types import Group
from parts.columns import assessment_of
from parts.learner import learner_spec, lone_learner, random_samples, tiny_sizes, write_tiny_model
from parts.trajectories import facts, make_trajectory

VOCABULARY = 23
SIZES = tiny_sizes(VOCABULARY)
seeds = st.integers(0, 2**31)


# ------------------------------------------------------------------------------------------------- advantages


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=6),
    gamma=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    coefficient=st.floats(0.01, 10),
    seed=seeds,
)
def test_a_token_pays_for_its_own_divergence_and_for_discounted_later_ones(lengths, gamma, coefficient, seed):
    kl = np.random.default_rng(seed).normal(size=sum(lengths))
    expected, start = [], 0
    for length in lengths:
        own = kl[start : start + length]
        expected += [
            -coefficient * sum(gamma**step * value for step, value in enumerate(own[place:]))
            for place in range(length)
        ]
        start += length
    found = teacher_advantages(
        torch.from_numpy(kl), torch.tensor(lengths), coefficient=coefficient, gamma=gamma
    )
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


def attempts():
    """Two attempts at a task; the second has two segments that grew alternately, and context in between."""
    return [
        make_trajectory([-1, 0, 0, -1, 1], reward=1.0, member=0),
        make_trajectory(
            [-1, 0, 2, -1, 1, 1, -1], reward=None, member=1, segment_starts=(0, 3), token_ids=range(7)
        ),
    ]


def credited(algorithm, kl):
    groups = facts(Group(0, tuple(attempts())))
    [samples] = credit(groups, algorithm, group_size=2, assessment=assessment_of(groups, teacher_kl=kl))
    return [ref.load().advantages for ref in samples]


KL = [np.array([0.5, -1.0, 2.0], np.float32), np.array([0.1, 0.7, -0.4, 0.2], np.float32)]
"""In the order of positions: of the second attempt, turns 0, 2, 1 and 1."""


def test_the_teachers_advantages_are_added_to_those_of_the_rewards_in_the_order_of_sampling():
    algorithm = AlgorithmConfig(
        advantage="dr_grpo", distillation=DistillationConfig(teacher="t", coefficient=2.0, gamma=0.5)
    )
    first, second = credited(algorithm, KL)
    np.testing.assert_allclose(
        first, [0, 0.5 - 2 * (0.5 - 0.5 + 0.5), 0.5 - 2 * (-1.0 + 1.0), 0, 0.5 - 2 * 2.0], atol=1e-6
    )
    # Sampled: 0.1 (turn 0), -0.4, 0.2 (turn 1), 0.7 (turn 2)
    last, third = 0.7, 0.2 + 0.35
    np.testing.assert_allclose(
        second,
        [
            *(0, -0.5 - 2 * (0.1 - 0.2 + third / 4), -0.5 - 2 * last),
            *(0, -0.5 - 2 * (-0.4 + third / 2), -0.5 - 2 * third, 0),
        ],
        atol=1e-6,
    )


@pytest.mark.parametrize("gamma", [0.0, 1.0])
def test_without_rewards_the_teacher_is_alone_and_no_estimator_is_asked(gamma):
    own = DistillationConfig(teacher="t", with_rewards=False, gamma=gamma)
    algorithm = AlgorithmConfig(advantage="max_rl", distillation=own)
    first, _ = credited(algorithm, KL)
    sums = [-1.5, -1.0, -2.0] if gamma else [-0.5, 1.0, -2.0]
    np.testing.assert_allclose(first[[1, 2, 4]], sums, atol=1e-6)
    assert not first[[0, 3]].any()


def test_whitening_leaves_the_teachers_unit_alone():
    own = DistillationConfig(teacher="t", coefficient=3.0)
    plain, whitened = (
        np.concatenate(credited(AlgorithmConfig(whiten=is_white, distillation=own), KL))
        - np.concatenate(credited(AlgorithmConfig(whiten=is_white), [np.zeros_like(k) for k in KL]))
        for is_white in (False, True)
    )
    np.testing.assert_allclose(plain, whitened, atol=1e-6)
    assert np.abs(plain).max() == pytest.approx(6.0)


# ------------------------------------------------------------------------------------------ log-probabilities


def write_model(folder, seed, **changes):
    torch.manual_seed(seed)
    sizes = tiny_sizes(VOCABULARY, **changes)
    AutoModelForCausalLM.from_config(Qwen2Config(**sizes), dtype=torch.float32).save_pretrained(folder)
    return ModelConfig(path=str(folder))


def spec(tmp_path, **changes):
    """A learner of a random policy, in float64, with another random model as its teacher, of other sizes."""
    teacher = write_model(tmp_path / "teacher", 7, hidden_size=48, num_hidden_layers=1)
    return learner_spec(sizes=SIZES, teacher=teacher, **changes)


def plain_logprobs(model, tokens, *, temperature):
    """f64[T - 1]: of each token but the first."""
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens[None].astype(np.int64))).logits[0] / temperature
    return logits.log_softmax(-1)[:-1].gather(1, torch.from_numpy(tokens[1:, None].astype(np.int64)))[:, 0]


@pytest.mark.parametrize("mode", ["decoupled", "bypass"])
def test_the_teacher_scores_what_the_policy_sampled_as_transformers_does(tmp_path, mode):
    samples = random_samples(5, VOCABULARY)
    [microbatches] = pack(samples, max_tokens=30, world_size=1)
    with lone_learner(spec(tmp_path, mode=mode)) as one:
        pairs = one.teacher_logprobs(microbatches)
        own = one.own_logprobs(microbatches)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "teacher", dtype=torch.float64).eval()
    for microbatch, (policy, teacher), learners in zip(microbatches, pairs, own, strict=True):
        indices = microbatch.sample_indices[microbatch.sequence_ids]
        for sample in samples:
            chosen = indices == sample.index
            if chosen.any():
                expected = plain_logprobs(model, sample.token_ids, temperature=0.8)[sample.action_mask[1:]]
                np.testing.assert_allclose(teacher[chosen], expected, atol=1e-5)
        wanted = microbatch.behavior_logprobs if mode == "bypass" else learners
        np.testing.assert_allclose(policy, wanted, atol=1e-12)


def test_the_teacher_is_frozen_and_the_reference_is_another_model(tmp_path):
    algorithm = AlgorithmConfig.model_validate({"kl": {"coefficient": 0.1}})
    [microbatches] = pack(random_samples(5, VOCABULARY), max_tokens=100, world_size=1)
    with lone_learner(spec(tmp_path, algorithm=algorithm)) as one:
        before = one.teacher_logprobs(microbatches)[0][1]
        [first] = one.score(microbatches)
        one.update([first])
        [later] = one.score(microbatches)
        np.testing.assert_array_equal(one.teacher_logprobs(microbatches)[0][1], before)
        np.testing.assert_array_equal(later.ref_logprobs, first.ref_logprobs)
    assert np.abs(first.ref_logprobs - before).max() > 0.1
    assert np.abs(later.proximal_logprobs - first.proximal_logprobs).max() > 1e-3


# --------------------------------------------------------------------------------------------------- learning


@contextmanager
def local(one):
    learner = open_local_learner(one)
    try:
        yield learner
    finally:
        learner.stop()


def sampled(policy, rng, *, num, length):
    """Return `num` attempts, each of one random token and `length` - 1 that the policy samples after it."""
    tokens = torch.from_numpy(rng.integers(0, VOCABULARY, (num, 1)))
    logprobs = torch.zeros((num, 1), dtype=torch.float64)
    generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
    policy.eval()
    for _ in range(length - 1):
        with torch.no_grad():
            found = policy(tokens).logits[:, -1].double().log_softmax(-1)
        drawn = torch.multinomial(found.exp(), 1, generator=generator)
        tokens, logprobs = torch.cat([tokens, drawn], 1), torch.cat([logprobs, found.gather(1, drawn)], 1)
    turns = [-1] + [0] * (length - 1)
    return [
        Group(
            index,
            (
                make_trajectory(
                    turns, group_id=index, token_ids=tokens[index], behavior_logprobs=logprobs[index]
                ),
            ),
        )
        for index in range(num)
    ]


def exact_kl(policy, teacher, groups):
    """Return KL(policy || teacher) of the next token in nats, over the whole vocabulary: the mean over the
    positions of what was sampled.
    """
    tokens = torch.from_numpy(np.stack([group.trajectories[0].token_ids for group in groups])).long()
    with torch.no_grad():
        ours, theirs = (model(tokens).logits[:, :-1].double().log_softmax(-1) for model in (policy, teacher))
    return float((ours.exp() * (ours - theirs)).sum(-1).mean())


def test_a_policy_without_any_reward_comes_close_to_its_teacher(tmp_path):
    """Whatever it is asked, and measured over the whole vocabulary, of which training saw only samples."""
    own = DistillationConfig(teacher=str(tmp_path / "teacher"), with_rewards=False)
    algorithm = AlgorithmConfig(distillation=own)
    one = learner_spec(
        # torch's own attention also takes the unpacked batches of `sampled`
        write_model(tmp_path / "policy", 0).model_copy(update={"attention": "sdpa"}),
        teacher=write_model(tmp_path / "teacher", 7),
        algorithm=algorithm,
        mode="on_policy",
        temperature=1.0,
        lr=1e-2,
        total_updates=1000,
    )
    teacher = AutoModelForCausalLM.from_pretrained(tmp_path / "teacher", dtype=torch.float32).eval()
    rng, exact, estimated, config = np.random.default_rng(0), [], [], LearnerConfig()
    with local(one) as learner:
        policy, roles = learner.worker._policy.module, Roles(learner)
        for _ in range(60):
            groups = sampled(policy, rng, num=48, length=12)
            exact.append(exact_kl(policy, teacher, groups))
            known = facts(*groups)
            assessment = assess(roles, known, algorithm, config)
            [metrics] = settle(roles, known, assessment)
            estimated.append(metrics["teacher_kl"])
            samples = credit(known, algorithm, group_size=1, assessment=assessment)
            microbatches = plan_for(learner, list(itertools.chain(*samples)), config)
            learner.run(Learner.update, learner.run(Learner.score, microbatches))
    assert estimated[0] == pytest.approx(exact[0], rel=0.2), "the sampled tokens estimate the whole"
    assert exact[-1] < 0.5 * exact[0]


# ----------------------------------------------------------------------------------------------------- checks


def folder_with(tmp_path, name, *, vocab_size=None, **changes):
    folder = tmp_path / name
    write_tiny_tokenizer(folder)
    size = load_tokenizer(folder).get_vocab_size(with_added_tokens=True)
    write_tiny_model(folder, vocab_size or size, **changes)
    return ModelConfig(path=str(folder))


def test_a_teacher_with_the_same_tokenizer_is_accepted_whatever_its_size(tmp_path):
    policy = folder_with(tmp_path, "policy")
    check_teacher(folder_with(tmp_path, "teacher", hidden_size=64), policy, LearnerConfig())


def test_another_tokenizer_is_refused_with_the_first_difference(tmp_path):
    policy, teacher = folder_with(tmp_path, "policy"), folder_with(tmp_path, "teacher")
    file = tmp_path / "teacher/tokenizer.json"
    text = file.read_text()
    file.write_text(text.replace("<tool_call>", "<call>"))
    number = load_tokenizer(tmp_path / "policy").token_to_id("<tool_call>")
    with pytest.raises(ConfigError) as caught:
        check_teacher(teacher, policy, LearnerConfig())
    assert str(caught.value) == (
        f"algorithm.distillation.teacher: {teacher.path!r} has another tokenizer than the policy: token "
        f"{number} is '<call>' instead of '<tool_call>'; use a teacher of the same family"
    )


@settings(max_examples=30)
@given(
    st.lists(st.sampled_from("abcdefgh"), unique=True, min_size=1),
    st.lists(st.sampled_from("abcdefgh"), unique=True, min_size=1),
)
def test_the_first_differing_id_is_named(left, right):
    first, second = (
        Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="?"))
        for tokens in (left, right)
    )
    padded = itertools.zip_longest(left, right)
    expected = next((number for number, (token, other) in enumerate(padded) if token != other), None)
    found = vocabulary_difference(first, second)
    assert (found is None) == (expected is None)
    assert found is None or found.startswith(f"token {expected} is ")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("gone", "cannot be loaded"),
        ("no_tokenizer", "no tokenizer.json"),
        ("classifier", "no head over the vocabulary"),
        ("small", "use a teacher with at least as many"),
    ],
)
def test_a_teacher_that_cannot_score_is_refused_before_the_run(tmp_path, spoil, message):
    policy = folder_with(tmp_path, "policy", vocab_size=400)
    teacher = folder_with(tmp_path, "teacher", vocab_size=399 if spoil == "small" else 400)
    if spoil == "gone":
        teacher = ModelConfig(path=str(tmp_path / "no/such/folder"))
    elif spoil == "no_tokenizer":
        (tmp_path / "teacher/tokenizer.json").unlink()
    elif spoil == "classifier":
        config = tmp_path / "teacher/config.json"
        config.write_text(config.read_text().replace("Qwen2ForCausalLM", "Qwen2ForSequenceClassification"))
    with pytest.raises(ConfigError, match=message) as caught:
        check_teacher(teacher, policy, LearnerConfig())
    assert str(caught.value).startswith("algorithm.distillation.teacher")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"distillation": {"with_rewards": False}}, "set teacher"),
        (
            {"advantage": "gae", "distillation": {"teacher": "t", "with_rewards": False}},
            "without a critic",
        ),
        (
            {
                "kl": {"coefficient": 0.1, "place": "reward", "estimator": "k1"},
                "distillation": {"teacher": "t", "with_rewards": False},
            },
            "no rewards to subtract the KL from",
        ),
    ],
)
def test_contradictions_are_refused(config, message):
    with pytest.raises(ValidationError, match=message):
        Config.model_validate({"algorithm": config})


def test_single_attempts_are_enough_without_rewards_and_only_then():
    own = {"teacher": "t", "with_rewards": False}
    Config.model_validate({"algorithm": {"distillation": own}, "rollout": {"group_size": 1}})
    with pytest.raises(ValidationError, match="every advantage is 0"):
        Config.model_validate({"algorithm": {"distillation": {"teacher": "t"}}, "rollout": {"group_size": 1}})


def test_the_teacher_has_the_models_settings_but_neither_adapter_nor_tokenizer():
    config = Config.model_validate(
        {
            "model": {"path": "p", "dtype": "bfloat16", "tokenizer_path": "x", "lora": {"rank": 4}},
            "algorithm": {"distillation": {"teacher": "t", "revision": "main"}},
        }
    )
    teacher = config.teacher_model
    assert teacher == ModelConfig(path="t", dtype="bfloat16", revision="main")
    assert Config().teacher_model is None
    validating = config.model_copy(update={"trainer": TrainerConfig(val_only=True)})
    assert validating.teacher_model is None, "a run that only validates loads no teacher"


def test_a_rank_is_built_once_for_each_model(tmp_path):
    """The teacher of a new policy is loaded, not drawn."""
    one = spec(tmp_path)
    [microbatches] = pack(random_samples(3, VOCABULARY), max_tokens=100, world_size=1)
    with lone_learner(one) as learner:
        own, its = learner.teacher_logprobs(microbatches)[0]
    with lone_learner(replace(one, teacher=None)) as learner:
        np.testing.assert_array_equal(own, learner.own_logprobs(microbatches)[0])
    assert np.abs(own - its).max() > 0.1
