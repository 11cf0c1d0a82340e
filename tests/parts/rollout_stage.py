"""The stage for tests of the loop itself: what the model says is sampled exactly, time is a mock clock's."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from trio.testing import MockClock

from agentrl.chat.chat import Chat
from agentrl.config.agent import AgentConfig
from agentrl.config.evaluation import EvalConfig
from agentrl.config.reward import RewardConfig
from agentrl.config.rollout import RolloutConfig
from agentrl.plugins import load_plugins
from agentrl.rollout.conversation_line import PromptLimits
from agentrl.types import Message, Task, Trajectory
from parts.rewards import Evenness, Number, Tutor
from parts.scripted import Raw, ScriptedModel, Stage, tiny_chat

Script = Callable[[int, str], str]


def scripted_client(chat: Chat, script: Script, **options) -> ScriptedModel:
    """A server whose model says `script(turn, prompt text)`; turns are counted in the prompt, for one may be
    asked twice.
    """
    return ScriptedModel(
        chat, lambda _, text: Raw(script(text.count("<|im_start|>assistant\n") - 1, text)), **options
    )


SOURCE = "sums"
OWN = (Number, Evenness, Tutor)


def stage_rewards(**reward) -> RewardConfig:
    """Score the tasks of the stage by their number, unless `reward` says otherwise."""
    sources = {SOURCE: "number", **reward.pop("sources", {})}
    # A mock clock sees no threads: any finite deadline of a reward would be jumped to while its thread works.
    return RewardConfig(**{"timeout_s": math.inf, "sources": sources, **reward})


class World(Stage):
    """One scripted server, the real stack, and the tasks to play on it."""

    def __init__(
        self,
        chat: Chat,
        script: Script,
        *,
        agent=None,
        rollout=None,
        reward=None,
        plugins=(),
        prompt=None,
        attempts_per_group=None,
        validation=None,
        tracer=None,
        **client,
    ) -> None:
        registered = load_plugins()
        for plugin in (*OWN, *plugins):
            registered.add_module(SimpleNamespace(__name__=plugin.__module__, plugin=plugin))
        self.hosted = [plugin for plugin in plugins if getattr(plugin, "runtime", None) == "asyncio"]
        self.client = scripted_client(chat, script, **client)
        super().__init__(
            self.client,
            plugins=registered,
            agent=AgentConfig(**{"tools": ("calculator",), **(agent or {})}),
            rollout=RolloutConfig(**{"group_size": 1, **(rollout or {})}),
            reward=stage_rewards(**(reward or {})),
            prompt=prompt or PromptLimits(512, "filter"),
            context_tokens=1024,
            attempts_per_group=attempts_per_group,
            validation=validation,
            tracer=tracer,
        )

    def run(self, main: Callable, *, real_time: bool = False):
        """Run `main(manager)` with a server that comes up.

        `real_time` for asyncio plugins: a mock clock sees no threads and would end their calls.
        """
        hosted = [plugin.__name__ for plugin in self.hosted if not real_time]
        assert not hosted, f"asyncio plugins need real_time=True: {hosted}"
        return super().run(main, clock=None if real_time else MockClock(autojump_threshold=0))

    def play(self, *tasks: Task, n: int = 1, sampling=None, real_time: bool = False) -> list[Trajectory]:
        return self.run(
            lambda manager: manager.play(self.leases(tasks, n), sampling or EvalConfig(temperature=1.0)),
            real_time=real_time,
        )


def make_task(question: str = "What is 6 * 7?", *, agent: str = "tool_agent", truth="42", **fields) -> Task:
    return Task(
        **{
            "task_id": "t:0",
            "data_source": SOURCE,
            "messages": (Message("user", question),),
            "agent_name": agent,
            "ground_truth": truth,
            **fields,
        }
    )


def call(name: str = "calculator", arguments: str = '{"expression": "6*7"}') -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


@pytest.fixture(scope="session")
def chat() -> Chat:
    return tiny_chat()


@pytest.fixture(scope="session")
def stage(chat):
    """What the tests of this folder build with: `World(script, **options)`, `ScriptedClient`, `task()`,
    `call()`.
    """
    return SimpleNamespace(
        World=lambda script, chat=chat, **options: World(chat, script, **options),
        ScriptedClient=lambda script, **options: scripted_client(chat, script, **options),
        task=make_task,
        call=call,
        chat=chat,
    )
