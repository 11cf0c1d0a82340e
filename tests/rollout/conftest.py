"""A rollout stack whose servers follow a script: real chat, router, session, manager; only the model is played."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from agentrl.chat.chat import Chat
from agentrl.chat.tiny import write_tiny_tokenizer
from agentrl.config.schema import AgentConfig, EvalConfig, RewardConfig, RolloutConfig
from agentrl.plugins import load_plugins
from agentrl.rollout.asyncio_host import AsyncioHost
from agentrl.rollout.manager import AgentLoopManager
from agentrl.rollout.router import Router
from agentrl.rollout.session import PromptLimits
from agentrl.sglang.protocol import ModelInfo
from agentrl.types import Generation, Lease, Message, Task, Trajectory

Script = Callable[[int, str], str]


class ScriptedClient:
    """A server whose model says `script(turn, prompt text)`; it keeps every request, and what it sampled for it."""

    def __init__(self, chat: Chat, script: Script, *, version: int = 0, latency_s: float = 0.0) -> None:
        self.chat, self.script, self.version, self.latency_s = chat, script, version, latency_s
        self.requests: list[tuple[list[int], Generation]] = []
        self.params: list = []
        self.running = 0

    async def generate(self, input_ids, params, *, rid: str) -> Generation:
        self.running += 1
        try:
            text = self.chat.decode(input_ids)
            said = self.script(text.count("<|im_start|>assistant\n") - 1, text)
            await trio.sleep(self.latency_s)
        finally:
            self.running -= 1
        whole = [*self.chat.encode(said), self.chat.eos_token_ids[0]]
        ids = np.array(whole[: params.max_new_tokens], np.int32)
        logprobs = -np.linspace(0.1, 2.0, len(ids), dtype=np.float32) - np.float32(len(input_ids) / 1000)
        versions = np.full(len(ids), self.version, np.int32)
        generation = Generation(ids, logprobs, versions, "stop" if len(ids) == len(whole) else "length")
        self.requests.append((list(input_ids), generation))
        self.params.append(params)
        return generation

    async def model_info(self) -> ModelInfo:
        return ModelInfo("scripted", self.version)

    async def aclose(self) -> None:
        return


class World:
    """One scripted server, the real stack, and the tasks to play on it."""

    def __init__(self, chat: Chat, script: Script, *, agent=None, rollout=None, reward=None, plugins=(), prompt=None, **client) -> None:
        self.chat = chat
        self.client = ScriptedClient(chat, script, **client)
        self.plugins = load_plugins()
        for plugin in plugins:
            self.plugins.add_module(SimpleNamespace(__name__=plugin.__module__, plugin=plugin))
        self.agent = AgentConfig(**{"tools": ("calculator",), **(agent or {})})
        self.rollout = RolloutConfig(**{"group_size": 1, **(rollout or {})})
        # A mock clock sees no threads: any finite deadline of a reward would be jumped to while its thread works.
        self.reward = RewardConfig(**{"timeout_s": math.inf, **(reward or {})})
        self.prompt = prompt or PromptLimits(512, "filter")
        self.router = Router(lambda url: self.client, vocab_size=chat.vocab_size, context_tokens=1024)

    def run(self, main: Callable, *, real_time: bool = False):
        """Run `main(manager)` with a server that comes up. `real_time` for asyncio plugins: a mock clock sees no threads."""

        async def wrapped():
            self.router.set_servers(["http://scripted"], version=0)
            with AsyncioHost() as host:
                manager = AgentLoopManager(
                    self.agent,
                    self.rollout,
                    self.reward,
                    plugins=self.plugins,
                    chat=self.chat,
                    router=self.router,
                    host=host,
                    prompt=self.prompt,
                )
                return await main(manager)

        return trio.run(wrapped, clock=None if real_time else MockClock(autojump_threshold=0))

    def play(self, *tasks: Task, n: int = 1, sampling=None, real_time: bool = False) -> list[Trajectory]:
        leases = [Lease(index, task, n, 0) for index, task in enumerate(tasks)]

        async def main(manager):
            return await manager.play(leases, sampling or EvalConfig(temperature=1.0))

        return self.run(main, real_time=real_time)


def make_task(question: str = "What is 6 * 7?", *, agent: str = "tool_agent", truth="42", **fields) -> Task:
    return Task(
        **{
            "task_id": "t:0",
            "data_source": "arithmetic",
            "messages": (Message("user", question),),
            "agent_name": agent,
            "ground_truth": truth,
            **fields,
        }
    )


def call(name: str = "calculator", arguments: str = '{"expression": "6*7"}') -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


@pytest.fixture(scope="session")
def chat(tmp_path_factory) -> Iterator[Chat]:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(folder)
    return Chat.load(str(folder))


@pytest.fixture(scope="session")
def stage(chat):
    """What the tests of this folder build with: `World(script, **options)`, `ScriptedClient`, `task()`, `call()`."""
    return SimpleNamespace(
        World=lambda script, **options: World(chat, script, **options),
        ScriptedClient=lambda script, **options: ScriptedClient(chat, script, **options),
        task=make_task,
        call=call,
        chat=chat,
    )
