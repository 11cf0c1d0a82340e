"""A step with a critic, KL in the reward and whitening, on ranks in their own processes: what the ranks find
stays with them, and the step learns what one rank learns.
"""

import pickle
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from agentrl.cluster.pools import Seat
from agentrl.config.schema import Config
from agentrl.controller.assess import assess, measure_on_ranks
from agentrl.controller.credit import credit, whitened
from agentrl.controller.roles import open_local_roles, start_roles
from agentrl.controller.specs import RoleSpecs
from agentrl.controller.train import learn
from agentrl.data.token_columns import column_folder
from agentrl.types import Group, Outcome
from parts.learner import tiny_sizes
from parts.local_ray import local_ray
from parts.trajectories import make_trajectory, stored

VOCABULARY = 31
NUM_STEPS = 2


@pytest.fixture
def cluster():
    with local_ray():
        yield


def groups(seed, folder, *, length=60):
    """Return groups of attempts with two segments, which grew alternately; some are cut off."""
    rng = np.random.default_rng(seed)

    def attempt(group, member):
        sizes = rng.integers(2, length, 4)
        rows = [[(0, sizes[0]), (3, sizes[3])], [(1, sizes[1]), (2, sizes[2])]]
        turns, starts = [], []
        for row in rows:
            starts.append(len(turns))
            for turn, size in row:
                turns += [-1] * 3 + [turn] * int(size)
        return make_trajectory(
            turns,
            group_id=group,
            member=member,
            token_ids=rng.integers(0, VOCABULARY, len(turns)),
            behavior_logprobs=np.where(np.array(turns) < 0, 0.0, -np.log(VOCABULARY)),
            segment_starts=tuple(starts),
            reward=None if rng.random() < 0.2 else float(rng.integers(0, 2)),
            outcome=Outcome.TRUNCATED if rng.random() < 0.4 else Outcome.COMPLETED,
        )

    played = [[attempt(group, member) for member in range(3)] for group in range(3)]
    return [Group(number, tuple(stored(*members, folder=folder))) for number, members in enumerate(played)]


def config_of(folder, num_ranks):
    return Config.model_validate(
        {
            "model": {"path": str(folder)},
            "algorithm": {
                "advantage": "gae",
                "gamma": 0.99,
                "lam": 0.9,
                "whiten": True,
                "bootstrap_truncated": True,
                "kl": {"place": "reward", "coefficient": 0.1, "estimator": "k1", "target": 0.05},
            },
            "rollout": {"group_size": 3},
            "buffer": {"max_staleness": 0},
            "learner": {
                "world_size": num_ranks,
                "minibatches_per_step": 2,
                # An attempt is longer, so that its segments are in several microbatches of both ranks.
                "microbatch_tokens": 100,
                "optimizer": {"lr": 1e-2},
            },
            "critic": {"optimizer": {"lr": 1e-2}},
        }
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen2Config(**tiny_sizes(VOCABULARY))).save_pretrained(folder)
    return folder


def steps(roles, config, folder):
    """Return the metrics of some steps, the credit of the one after, and its advantages token by token."""
    metrics = []
    for step in range(NUM_STEPS):
        with column_folder(folder / "columns") as columns:
            metrics += learn(
                roles,
                groups(step, folder),
                config,
                step=step,
                lags=np.zeros_like,
                timer=lambda _: nullcontext(),
                columns=columns,
            )
    last = groups(NUM_STEPS, folder)
    with column_folder(folder / "columns") as columns:
        assessment = assess(roles, last, config.algorithm, config.learner, folder=columns)
        samples = credit(last, config.algorithm, group_size=3, assessment=assessment)
        refs = [ref for own in whitened(samples, partial(measure_on_ranks, roles.learner)) for ref in own]
        return metrics, refs, [ref.load() for ref in refs]


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_two_ranks_credit_and_learn_as_one(tmp_path, model):
    found = []
    for num_ranks, folder in ((1, tmp_path / "one"), (2, tmp_path / "two")):
        folder.mkdir()
        config = config_of(model, num_ranks)
        specs = RoleSpecs.of(config, num_steps=NUM_STEPS, dump_folder=str(folder))
        if num_ranks == 1:
            roles = open_local_roles(specs)
        else:
            roles = start_roles(specs, {role: [Seat()] * num_ranks for role in ("actor", "critic")})
        try:
            found.append(steps(roles, config, folder))
        finally:
            roles.stop()
    (alone, _, by_one), (together, refs, by_two) = found
    for one, two in zip(alone, together, strict=True):
        assert one.keys() == two.keys()
        for name in ("loss", "grad_norm", "reward_kl", "critic/loss", "critic/value_mean"):
            if name in one:
                assert two[name] == pytest.approx(one[name], rel=2e-3, abs=1e-5), name
    assert any(abs(one["reward_kl"]) > 1e-4 for one in alone if "reward_kl" in one)
    for one, two in zip(by_one, by_two, strict=True):
        for column in ("advantages", "values", "returns"):
            np.testing.assert_allclose(getattr(two, column), getattr(one, column), rtol=2e-2, atol=2e-3)
    split = [ref for ref in refs if len(ref.columns.values.pieces) > 1]
    assert split, "some attempts were assessed in parts"


def test_what_the_controller_has_does_not_grow_with_the_tokens(tmp_path, model):
    config = config_of(model, 1)
    sizes = []
    for length in (10, 1000):
        known = groups(0, tmp_path, length=length)
        wide = config.learner.model_copy(update={"microbatch_tokens": 100_000})
        specs = RoleSpecs.of(config, num_steps=NUM_STEPS, dump_folder=str(tmp_path))
        roles = open_local_roles(specs)
        try:
            with column_folder(tmp_path / "columns") as columns:
                assessment = assess(roles, known, config.algorithm, wide, folder=columns)
                samples = credit(known, config.algorithm, group_size=3, assessment=assessment)
                samples = whitened(samples, partial(measure_on_ranks, roles.learner))
                sizes.append(len(pickle.dumps((assessment, samples))))
        finally:
            roles.stop()
    assert sizes[1] < 1.1 * sizes[0]
