"""The gateway, played by OpenAI's own client: what it is told, what is recorded of it, and how both end."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from types import SimpleNamespace
from typing import ClassVar

import httpx
import numpy as np
import openai
import pytest
import trio

from agentrl.errors import ServerError
from agentrl.plugins import AgentLoop
from agentrl.rollout.openai_session import cut_at_stop
from agentrl.types import NO_VERSION, Generation, Message, Outcome

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
QUESTION = [{"role": "user", "content": "What is 6 * 7?"}]
REFUSED = (openai.BadRequestError, openai.AuthenticationError)


def played_by(program, *, threaded: bool = False, name: str = "guest"):
    """Return an agent class that lets `program(client, task)` play; an async program gets an AsyncOpenAI."""

    class Guest(AgentLoop):
        """Plays by a function of a test."""

        uses_tools: ClassVar[bool] = False

        async def run(self, task, session) -> None:
            async with session.serve_openai() as endpoint:
                keywords = {"base_url": endpoint.base_url, "api_key": endpoint.api_key}
                if threaded:
                    with openai.OpenAI(**keywords) as client:
                        await trio.to_thread.run_sync(program, client, task, abandon_on_cancel=True)
                else:
                    await session.run_asyncio(self._play, keywords, task)

        @staticmethod
        async def _play(keywords, task) -> None:
            async with openai.AsyncOpenAI(**keywords) as client:
                await program(client, task)

    Guest.name = name
    return Guest


def play(stage, program, script, *, threaded=False, n=1, agent=None, **options):
    """Return (world, trajectories) of `n` attempts played by `program`."""
    world = stage.World(script, plugins=[played_by(program, threaded=threaded)], agent={"tools": (), **(agent or {})}, **options)
    return world, world.play(stage.task(agent="guest"), n=n, real_time=True)


def ask(client, messages=QUESTION, **options):
    return client.chat.completions.create(model="anything", messages=messages, **options)


def rows(trajectory):
    """Return the slices of the training rows."""
    return [slice(*pair) for pair in itertools.pairwise((*trajectory.segment_starts, trajectory.num_tokens))]


def check_rows(trajectory, requests) -> None:
    """Every row is what a server saw and sampled, and each sampled turn is in exactly one row, with its facts."""
    mask = trajectory.action_mask
    found = []
    for row in rows(trajectory):
        ids = trajectory.token_ids[row].tolist()
        assert not mask[row][0], "a row begins with an action token"
        last = [(prompt, sampled) for prompt, sampled in requests if prompt + sampled.token_ids.tolist() == ids]
        assert last, "a row is not what a server saw"
        found += [g for prompt, g in requests if ids[: len(prompt) + len(g.token_ids)] == prompt + g.token_ids.tolist()]
    assert mask.sum() == sum(len(generation.token_ids) for _, generation in requests)
    assert {id(g) for g in found} == {id(g) for _, g in requests}
    assert (trajectory.behavior_logprobs[mask] < 0).all()
    assert (trajectory.versions[mask] != NO_VERSION).all()
    assert (trajectory.behavior_logprobs[~mask] == 0).all()
    assert sorted(set(trajectory.turn_ids[mask].tolist())) == list(range(len(requests)))


def tool_message(call, content: str) -> dict:
    return {"role": "tool", "tool_call_id": call.id, "content": content}


def calling(stage):
    """A model that calls the calculator, then answers."""
    return lambda turn, prompt: f"Let me see. {stage.call()}" if turn == 0 else "#### 42"


async def use_the_calculator(client, task) -> None:
    """The tool loop of OpenAI's documentation."""
    messages = [{"role": m.role, "content": m.content} for m in task.messages]
    while True:
        choice = (await ask(client, messages, tools=[CALCULATOR], temperature=1.0)).choices[0]
        messages.append(choice.message.model_dump(exclude_none=True))
        if choice.finish_reason != "tool_calls":
            return
        for call in choice.message.tool_calls:
            assert json.loads(call.function.arguments) == {"expression": "6*7"}
            messages.append(tool_message(call, "42"))


# ------------------------------------------------------------------------------------------------------- recording


def test_a_tool_loop_is_one_row_with_its_sampled_tokens(stage):
    world, [trajectory] = play(stage, use_the_calculator, calling(stage))
    assert (trajectory.outcome, trajectory.failure) == (Outcome.COMPLETED, None)
    assert trajectory.reward == 1.0
    assert trajectory.segment_starts == (0,)
    assert trajectory.metrics["num_turns"] == 2
    check_rows(trajectory, world.client.requests)
    assert [m.role for m in trajectory.messages] == ["user", "assistant", "tool", "assistant"]
    assert "calculator(expression: string)" in stage.chat.decode(world.client.requests[0][0]), "the request's tools are in the prompt"


def test_it_is_the_row_that_the_own_tool_agent_records(stage):
    """The same conversation, by the tool agent and by a program: the same tokens, masks, turns and log-probabilities."""
    _, [theirs] = play(stage, use_the_calculator_as_it_is_shown, calling(stage))
    world = stage.World(calling(stage))
    [ours] = world.play(stage.task())
    for name in ("token_ids", "action_mask", "behavior_logprobs", "versions", "turn_ids"):
        np.testing.assert_array_equal(getattr(theirs, name), getattr(ours, name))


async def use_the_calculator_as_it_is_shown(client, task) -> None:
    from agentrl.tools.calculator import Calculator

    tools = [Calculator().schema()]
    first = (await ask(client, tools=tools)).choices[0].message
    await ask(client, [*QUESTION, first, tool_message(first.tool_calls[0], "42")], tools=tools)
