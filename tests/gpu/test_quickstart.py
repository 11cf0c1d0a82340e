"""The quickstart's policy learns on the device: imitation, then rounds of playing, learning and publishing.

One process and an embedded server, without Ray: the parts are those of a run, the loop is the plainest one.
"""

import time
from contextlib import aclosing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import trio

from agentrl.adapters.catalog import open_plugins
from agentrl.chat.chat import Chat
from agentrl.chat.tiny import write_tiny_tokenizer
from agentrl.config.compose import load_config
from agentrl.config.rollout import EmbeddedServerConfig
from agentrl.controller.credit import credit, group_attempts, leave_out_masked, with_reward
from agentrl.data.attempt_facts import AttemptFacts
from agentrl.data.checked_dataset import Playable, build_dataset
from agentrl.extras.datatools.arithmetic import write_arithmetic
from agentrl.extras.supervised.config import load_sft_config
from agentrl.extras.supervised.data import read_conversations
from agentrl.learner.learner import LearnerSpec
from agentrl.learner.packing import filler, pack
from agentrl.rollout.asyncio_host import AsyncioHost
from agentrl.rollout.conversation_line import PromptLimits
from agentrl.rollout.manager import AgentLoopManager
from agentrl.rollout.player_stack import PlayerParts
from agentrl.servers.client import SGLangClient
from agentrl.servers.router import Router
from agentrl.servers.supervisor import Supervisor
from agentrl.types import Lease
from parts.gpu import DEVICE, IS_GPU, OnDevice, sized
from parts.learner import lone_learner

CONFIGS = Path(__file__).parents[2] / "configs"
STEPS, TASKS, GROUP = sized((50, 16, 8), (1, 2, 2))
IMITATED, VALIDATED = sized((350, 192), (3, 4))


def imitate(folder, rows):
    """Write the policy to start from into `folder`, and return the losses."""
    write_tiny_tokenizer(folder / "tokenizer")
    config = load_sft_config(
        str(CONFIGS / "quickstart_sft.yaml"),
        [f"data.train_files=[{rows}/sft.parquet]", f"model.tokenizer_path={folder}/tokenizer"],
    )
    model, plugins = config.model, open_plugins(config.agent)
    chat = Chat.load(str(folder / "tokenizer"))
    samples = read_conversations(config.data.train_files, config.data, chat, plugins).samples
    spec = LearnerSpec(
        model, config.learner, load_config(str(CONFIGS / "quickstart.yaml")).algorithm, "decoupled", 0, 1.0,
        IMITATED, from_scratch=config.from_scratch, device=DEVICE,
    )  # fmt: skip
    rng, losses = np.random.default_rng(0), []
    with lone_learner(spec) as learner:
        for _ in range(IMITATED):
            batch = [samples[i] for i in rng.choice(len(samples), config.trainer.batch_size, replace=False)]
            [shard] = pack(batch, max_tokens=config.learner.microbatch_tokens, world_size=1)
            losses.append(learner.supervised_update(shard)["loss"])
        learner.export(str(folder / "policy"))
    return losses


class Loop:
    """Rounds of playing, learning and publishing, with one server."""

    def __init__(self, config, folder, learner, url):
        self.config, self.folder, self.learner, self.url = config, folder, learner, url
        self.chat, self.plugins = Chat.of(config.model), open_plugins(config.agent)
        self.client = None
        self.version = 0
        self.num_groups = 0

    def tasks(self, files, count):
        playable = Playable(self.config.agent, self.plugins, self.chat)
        dataset = build_dataset(self.config.data, files, playable)
        return [dataset.task(i) for i in range(count)]

    async def run(self):
        """Train, and return rewards of the steps and of the validations before and after."""
        train = self.tasks(self.config.data.train_files, STEPS * TASKS)
        val = self.tasks(self.config.data.val_files, VALIDATED)
        router = Router(SGLangClient, context_tokens=1024)
        self.client = SGLangClient(self.url)
        with AsyncioHost() as host:
            parts = PlayerParts(self.plugins, self.chat, host, PromptLimits.of(self.config.data))
            manager = AgentLoopManager(
                self.config.agent, self.config.rollout, self.config.reward, router, parts
            )
            async with aclosing(manager):
                play = partial(self.play, manager, router)
                validated, rewards = [await self.mean_reward(play, val)], []
                for step in range(STEPS):
                    played = await play(train[step * TASKS : (step + 1) * TASKS], GROUP)
                    groups = with_reward(group_attempts([AttemptFacts.of(t) for t in played]))
                    rewards.append(np.mean([t.reward for g in groups for t in g.trajectories]))
                    self.learn(groups)
                    await self.publish()
                validated.append(await self.mean_reward(play, val))
        await self.client.aclose()
        return rewards, validated

    async def play(self, manager, router, tasks, size):
        router.set_servers([self.url], version=self.version)
        leases = [Lease(self.num_groups + i, task, size, self.version) for i, task in enumerate(tasks)]
        self.num_groups += len(tasks)
        played = await manager.play(leases, self.config.rollout)
        versions = {int(v) for t in played for v in t.versions[t.action_mask]}
        assert versions <= {self.version}, "sampled with the weights that were published last"
        return played

    async def mean_reward(self, play, tasks):
        return float(np.mean([t.reward for t in await play(tasks, 1)]))

    def learn(self, groups):
        per_group = credit(groups, self.config.algorithm_in_use, group_size=None)
        per_group = leave_out_masked(per_group, self.config.rollout.masked_outcomes)
        refs = [ref for members in per_group for ref in members]
        samples = [ref.replace(index=i).load() for i, ref in enumerate(refs)]
        shard = [filler()]
        if samples:
            [shard] = pack(samples, max_tokens=self.config.learner.microbatch_tokens, world_size=1)
        metrics = self.learner.update(self.learner.score(shard))
        assert metrics["non_finite_updates"] == 0
        if "mismatch_mean" in metrics:
            assert metrics["mismatch_mean"] < 1e-2, "the server samples what the learner computes"

    async def publish(self):
        self.version += 1
        folder = self.folder / f"version_{self.version % 2}"
        self.learner.export(str(folder))
        await self.client.pause("abort")
        await self.client.update_weights_from_disk(str(folder), version=self.version, flush_cache=True)
        await self.client.resume()


@pytest.mark.timeout(580)
def test_the_quickstarts_policy_learns(tmp_path, measured):
    started = time.perf_counter()
    write_arithmetic(tmp_path, seed=0, num_train=STEPS * TASKS, num_val=VALIDATED, num_sft=sized(4000, 64))
    losses = imitate(tmp_path, tmp_path)
    assert losses[-1] < losses[0]
    measured["imitation s"] = time.perf_counter() - started
    config = load_config(
        str(CONFIGS / "quickstart.yaml"),
        [
            f"model.path={tmp_path}/policy",
            f"data.train_files=[{tmp_path}/train.parquet]",
            f"data.val_files=[{tmp_path}/val.parquet]",
            f"rollout.group_size={GROUP}",
            "learner.optimizer.schedule=constant",
        ],
    )
    spec = LearnerSpec(
        config.model, config.learner, config.algorithm_in_use, "decoupled", 0, config.rollout.temperature,
        STEPS, device=DEVICE,
    )  # fmt: skip
    server = OnDevice(EmbeddedServerConfig(max_batch_tokens=sized(4096, 512)), config.model.dtype)
    supervisor = Supervisor(server, log_file=tmp_path / "server.log", start_timeout_s=240, max_restarts=0)
    try:
        url = supervisor.start(config.model.path, "0")
        started = time.perf_counter()
        with lone_learner(spec) as learner:
            rewards, validated = trio.run(Loop(config, tmp_path, learner, url).run)
    finally:
        supervisor.stop()
    measured |= {
        "s per step": (time.perf_counter() - started) / STEPS,
        "validated before": validated[0],
        "after": validated[1],
        "first rewards": float(np.mean(rewards[:5])),
        "last rewards": float(np.mean(rewards[-5:])),
    }
    assert np.isfinite(rewards).all()
    if IS_GPU:
        assert validated[1] > validated[0] + 0.1
