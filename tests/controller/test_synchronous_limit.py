"""With `buffer.max_staleness=0`, actors at their own pace train the very weights of a plain synchronous loop,
bit for bit.
"""

import contextlib
import dataclasses
import random
import threading
import time

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentrl.buffer.buffer import ReplayBuffer
from agentrl.buffer.ledger import LedgerRules
from agentrl.config.model import ModelFromScratchConfig
from agentrl.config.schema import Config
from agentrl.controller.credit import group_attempts
from agentrl.controller.learner import open_local_learner
from agentrl.controller.roles import Roles
from agentrl.controller.specs import RoleSpecs
from agentrl.controller.train import learn
from agentrl.data.attempt_facts import AttemptFacts
from parts.learner import tiny_sizes
from parts.trajectories import ATTEMPTS, make_task, make_trajectory, stored

VOCABULARY, PROMPT, TURN, TURNS = 18, 3, 4, 2
SIZES = tiny_sizes(VOCABULARY)
GROUPS, MEMBERS, STEPS = 4, 4, 3


class Rows:
    """Any number of tasks: the group's number decides the prompt and which token is right."""

    @staticmethod
    def task(position):
        prompt = tuple(
            int(token) for token in np.random.default_rng(position).integers(0, VOCABULARY, PROMPT)
        )
        return make_task(
            task_id=f"t:{position}", extra_info={"prompt": prompt, "right": position % VOCABULARY}
        )


class Server:
    """Samples from a snapshot of the learner's weights.

    Whoever asks, and when, an attempt is the same under the same weights.
    """

    def __init__(self, learner):
        self._learner, self._lock = learner, threading.Lock()
        self._model = Qwen2ForCausalLM(Qwen2Config(**SIZES)).eval()
        self.version = -1

    def publish(self, version):
        with self._lock, torch.no_grad():
            own = dict(self._model.named_parameters())
            for name, parameter in self._learner.worker._policy.module.named_parameters():
                own[name].copy_(whole(parameter))
            self.version = version

    @torch.no_grad()
    def play(self, group_id, member):
        """Two turns, with an answer of the environment between them; the reward counts the right token."""
        task, draws = Rows.task(group_id), torch.Generator().manual_seed(1000 * group_id + member)
        ids, mask, logprobs = list(task.extra_info["prompt"]), [False] * PROMPT, [0.0] * PROMPT
        with self._lock:
            for turn in range(TURNS):
                for _ in range(TURN):
                    row = torch.log_softmax(self._model(torch.tensor([ids])).logits[0, -1], -1)
                    token = int(torch.multinomial(row.exp(), 1, generator=draws))
                    ids, mask, logprobs = [*ids, token], [*mask, True], [*logprobs, float(row[token])]
                if turn < TURNS - 1:
                    ids, mask, logprobs = [*ids, ids[-1]], [*mask, False], [*logprobs, 0.0]
            version = self.version
        is_action = np.array(mask)
        turns = np.where(is_action, np.cumsum(~is_action) - PROMPT, -1)
        sampled = np.array(ids)[is_action]
        reward = float((sampled == task.extra_info["right"]).mean() + (sampled % 2).mean())
        return make_trajectory(
            turns,
            group_id=group_id,
            member=member,
            task_id=task.task_id,
            token_ids=ids,
            behavior_logprobs=logprobs,
            version=version,
            reward=reward,
        )


def config_of(minibatches):
    return Config.model_validate(
        {
            "rollout": {"group_size": MEMBERS},
            "buffer": {"max_staleness": 0, "groups_per_step": GROUPS},
            "learner": {
                "microbatch_tokens": 40,
                "minibatches_per_step": minibatches,
                "optimizer": {"lr": 1e-2},
            },
            "algorithm": {"kl": {"coefficient": 0.0}},
        }
    )


@contextlib.contextmanager
def learner_of(config):
    spec = RoleSpecs.of(config, num_steps=STEPS, dump_folder="").learner
    new_model = ModelFromScratchConfig(architecture="qwen2", sizes=SIZES)
    learner = open_local_learner(dataclasses.replace(spec, from_scratch=new_model, dump_folder=None))
    try:
        yield learner
    finally:
        learner.stop()


def weights_of(learner):
    return {
        name: whole(parameter).numpy().tobytes()
        for name, parameter in learner.worker._policy.module.named_parameters()
    }


def whole(parameter):
    parameter = parameter.detach()
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def update(learner, attempts, config, step, lags):
    metrics = learn(
        Roles(learner),
        group_attempts(attempts),
        config,
        step=step,
        lags=lags,
        timer=lambda _: contextlib.nullcontext(),
    )
    return [one["loss"] for one in metrics if "loss" in one]


def train_in_a_loop(config):
    """The synchronous trainer: play a batch, learn from it, go on with the new weights."""
    with learner_of(config) as learner:
        server, losses = Server(learner), []
        for step in range(STEPS):
            server.publish(step)
            batch = [
                server.play(group, member)
                for group in range(GROUPS * step, GROUPS * (step + 1))
                for member in range(MEMBERS)
            ]
            losses += update(
                learner,
                [AttemptFacts.of(t) for t in batch],
                config,
                step,
                lambda versions, step=step: step - versions,
            )
        return losses, weights_of(learner)


class Actor(threading.Thread):
    """Leases groups and plays their members in an order, and at a pace, of its own; what it has goes to the
    buffer one by one.
    """

    def __init__(self, name, buffer, server, seed):
        super().__init__(daemon=True)
        self._owner, self._buffer, self._server, self._dice = name, buffer, server, random.Random(seed)

    def run(self):
        while leases := self._buffer.lease(self._owner, self._dice.randint(1, 3), 60.0):
            attempts = [(lease.group_id, member) for lease in leases for member in range(MEMBERS)]
            self._dice.shuffle(attempts)
            for group_id, member in attempts:
                time.sleep(self._dice.random() / 500)
                self._buffer.add(self._owner, stored(self._server.play(group_id, member)))


def train_with_buffer_and_actors(config, seed):
    """What a run does, with threads in the place of Ray's actors."""
    with learner_of(config) as learner:
        server, losses = Server(learner), []
        buffer = ReplayBuffer(
            Rows(),
            LedgerRules(
                groups_per_step=GROUPS, max_staleness=config.buffer.max_staleness, group_size=MEMBERS
            ),
            ATTEMPTS,
        )
        server.publish(0)
        lineage = buffer.advance(0, step=0)
        actors = [Actor(name, buffer, server, seed + index) for index, name in enumerate("abc")]
        for actor in actors:
            actor.start()
        for step in range(STEPS):
            batch = buffer.take(GROUPS, 60.0, step=step + 1)
            losses += update(learner, batch, config, step, lineage.lags)
            server.publish(step + 1)
            lineage = buffer.advance(step + 1, step=step + 1)
        buffer.close()
        for actor in actors:
            actor.join(60)
        return losses, weights_of(learner)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_without_staleness_the_pace_of_the_actors_changes_no_bit(minibatches):
    config = config_of(minibatches)
    assert (config.policy_mode == "on_policy") is (minibatches == 1)
    losses, weights = train_in_a_loop(config)
    assert len(losses) == STEPS * minibatches
    assert len(set(losses)) == len(losses), "each update must be one of its own, or equal losses mean nothing"
    own_losses, own_weights = train_with_buffer_and_actors(config, seed=100 * minibatches)
    assert own_losses == losses
    assert own_weights == weights
