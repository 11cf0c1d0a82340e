"""A teacher on servers says the same as the teacher that the learner's ranks load."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import trio

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.learner import LearnerConfig
from agentrl.config.model import ModelConfig
from agentrl.controller.assess import assess
from agentrl.controller.learner import open_local_learner
from agentrl.controller.roles import Roles
from agentrl.errors import LearnerError
from agentrl.rollout.frozen_servers import FrozenServers
from agentrl.rollout.teacher import Teacher, connect_teacher
from agentrl.types import Group
from parts.learner import learner_spec
from parts.trajectories import facts, make_trajectory

IDS = 380
"""Below the vocabulary's last id, which SGLang reports as another."""


def attempts(rng):
    """Return attempts of one and of several segments, which grew alternately, with context in between."""
    turns = [
        [-1, -1, 0, 0, 0, -1, 1, 1],
        [-1, 0, 2, -1, 1, 1],
        [-1] * 9 + [0] * 30 + [-1] * 4 + [1] * 3,
    ]
    starts = [(0,), (0, 3), (0,)]
    return [
        make_trajectory(own, member=member, segment_starts=start, token_ids=rng.integers(3, IDS, len(own)))
        for member, (own, start) in enumerate(zip(turns, starts, strict=True))
    ]


def taught_by(url, trajectories):
    async def main():
        servers = FrozenServers(connect_teacher, {url: None})
        teacher = Teacher(servers, timeout_s=60)
        found = [await teacher.taught(t, key=f"attempt{t.member}") for t in trajectories]
        await teacher.aclose()
        return found

    return trio.run(main)


@contextmanager
def local(spec):
    learner = open_local_learner(spec)
    try:
        yield learner
    finally:
        learner.stop()


def assessed(spec, trajectories, **distillation):
    algorithm = AlgorithmConfig.model_validate({"distillation": distillation})
    with local(replace(spec, algorithm=algorithm)) as learner:
        groups = facts(Group(0, tuple(trajectories)))
        config = LearnerConfig(microbatch_tokens=40)
        return [own.teacher_kl.load() for own in assess(Roles(learner), groups, algorithm, config).columns]


@pytest.mark.parametrize("mode", ["decoupled", "bypass"])
def test_the_teachers_kl_is_that_of_the_teacher_role(server, mode):
    trajectories = attempts(np.random.default_rng(0))
    taught = taught_by(server.url, trajectories)
    assert [len(t.teacher_logprobs) for t in taught] == [t.num_action_tokens for t in trajectories]
    policy, teacher = ModelConfig(path=str(server.other)), ModelConfig(path=str(server.model))
    spec = learner_spec(policy, mode=mode, temperature=1.0)
    by_role = assessed(replace(spec, teacher=teacher), trajectories, teacher=str(server.model))
    by_servers = assessed(spec, taught, servers={"urls": [server.url]})
    for one, other in zip(by_role, by_servers, strict=True):
        np.testing.assert_allclose(other, one, atol=2e-5)
    assert max(np.abs(column).max() for column in by_role) > 0.1
    with pytest.raises(LearnerError, match=r"member \d of group 0 was played without"):
        assessed(spec, trajectories, servers={"urls": [server.url]})
