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

from agentrl.chat.tiny import build_tiny_tokenizer
from agentrl.errors import ServerError
from agentrl.extras.gateway.chat_completions import read_request
from agentrl.extras.gateway.gateway import MAX_BODY_BYTES, OpenTrajectory
from agentrl.extras.gateway.turns import RequestError, TurnRequest
from agentrl.plugins import AgentLoop
from agentrl.rollout.stop_strings import cut_at_stop
from agentrl.types import NO_VERSION, Generation, Message, Outcome
from parts.chats import template_chat
from parts.cpu_time import cpu_s

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
PLAIN = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
QUESTION = [{"role": "user", "content": "What is 6 * 7?"}]
JSON = {"Content-Type": "application/json"}
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
    world = stage.World(
        script,
        plugins=[played_by(program, threaded=threaded)],
        agent={"tools": (), **(agent or {})},
        **options,
    )
    return world, world.play(stage.task(agent="guest"), n=n, real_time=True)


def ask(client, messages=QUESTION, **options):
    return client.chat.completions.create(model="anything", messages=messages, **options)


def rows(trajectory):
    """Return the slices of the training rows."""
    return [slice(*pair) for pair in itertools.pairwise((*trajectory.segment_starts, trajectory.num_tokens))]


def check_rows(trajectory, requests) -> None:
    """Every row is what a server saw and sampled, and each sampled turn is in exactly one row, with its
    facts.
    """
    mask = trajectory.action_mask
    found = []
    for row in rows(trajectory):
        ids = trajectory.token_ids[row].tolist()
        assert not mask[row][0], "a row begins with an action token"
        last = [
            (prompt, sampled) for prompt, sampled in requests if prompt + sampled.token_ids.tolist() == ids
        ]
        assert last, "a row is not what a server saw"
        found += [
            g
            for prompt, g in requests
            if ids[: len(prompt) + len(g.token_ids)] == prompt + g.token_ids.tolist()
        ]
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


# -------------------------------------------------------------------------------------------------- recording


def test_a_tool_loop_is_one_row_with_its_sampled_tokens(stage):
    world, [trajectory] = play(stage, use_the_calculator, calling(stage))
    assert (trajectory.outcome, trajectory.failure) == (Outcome.COMPLETED, None)
    assert trajectory.reward == 1.0
    assert trajectory.segment_starts == (0,)
    assert (trajectory.metrics["num_turns"], trajectory.metrics["num_tool_calls"]) == (2, 1)
    check_rows(trajectory, world.client.requests)
    assert [m.role for m in trajectory.messages] == ["user", "assistant", "tool", "assistant"]
    assert "calculator(expression: string)" in stage.chat.decode(world.client.requests[0][0]), (
        "the request's tools are in the prompt"
    )


def test_it_is_the_row_that_the_own_tool_agent_records(stage):
    """The same conversation, by the tool agent and by a program: the same tokens, masks, turns and
    log-probabilities.
    """
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


def test_edited_history_and_a_second_conversation_begin_rows(stage):
    """What does not extend a recorded conversation is another row; what does, continues it, whichever came
    last.
    """

    async def program(client, task) -> None:
        first = (await ask(client)).choices[0].message
        other = [{"role": "system", "content": "You check answers."}, {"role": "user", "content": "42?"}]
        checked = (await ask(client, other)).choices[0].message
        await ask(client, [*QUESTION, first, {"role": "user", "content": "Sure?"}])  # continues the first row
        await ask(client, [*other, checked, {"role": "user", "content": "Really?"}])  # continues the second
        edited = {"role": "assistant", "content": "#### 41"}
        await ask(client, [*QUESTION, edited, {"role": "user", "content": "Sure?"}])  # was never said

    world, [trajectory] = play(stage, program, lambda turn, prompt: f"#### {40 + turn}")
    assert trajectory.outcome is Outcome.COMPLETED
    assert len(trajectory.segment_starts) == 3
    assert trajectory.metrics["num_forks"] == 2
    check_rows(trajectory, world.client.requests)
    assert [len(set(trajectory.turn_ids[row].tolist()) - {-1}) for row in rows(trajectory)] == [2, 2, 1]
    assert trajectory.messages[1] == Message("assistant", "#### 41"), (
        "the messages are those of the line that was sampled last"
    )


def test_requests_of_several_conversations_run_side_by_side(stage):
    """Equal requests at once are different attempts at the same answer: each gets a row."""

    async def program(client, task) -> None:
        await asyncio.gather(
            *(ask(client) for _ in range(3)),
            *(ask(client, [{"role": "user", "content": f"{i}?"}]) for i in range(3)),
        )

    world, [trajectory] = play(stage, program, lambda turn, prompt: "#### 42", latency_s=0.05)
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.failure
    assert len(trajectory.segment_starts) == 6
    check_rows(trajectory, world.client.requests)


def test_fifty_trajectories_at_once_stay_apart(stage):
    """Each trajectory holds its own question and nothing else, although all share one server and one loop."""
    world = stage.World(
        calling(stage), plugins=[played_by(use_the_calculator)], agent={"tools": ()}, latency_s=0.01
    )
    tasks = [stage.task(f"Question {number}: what is 6 * 7?", agent="guest") for number in range(50)]
    trajectories = world.play(*tasks, real_time=True)
    assert {t.outcome for t in trajectories} == {Outcome.COMPLETED}, {t.failure for t in trajectories}
    for number, trajectory in enumerate(trajectories):
        own = [
            request
            for request in world.client.requests
            if f"Question {number}:" in stage.chat.decode(request[0])
        ]
        assert len(own) == 2
        check_rows(trajectory, own)


def test_the_synchronous_client_plays_from_a_thread(stage):
    def program(client, task) -> None:
        assert [model.id for model in client.models.list()] == ["policy"]
        assert ask(client).choices[0].message.content == "#### 42"

    world, [trajectory] = play(stage, program, lambda turn, prompt: "#### 42", threaded=True)
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.failure
    check_rows(trajectory, world.client.requests)


# ---------------------------------------------------------------------------------------------------- answers


def test_what_a_reply_says_of_its_tokens(stage):
    seen = []

    async def program(client, task) -> None:
        reply = await ask(client, logprobs=True)
        cut = await ask(client, [{"role": "user", "content": "again"}], max_completion_tokens=2)
        seen.extend([reply, cut])

    world, [trajectory] = play(stage, program, lambda turn, prompt: "#### 42 é")
    (prompt, sampled), (_, cut) = world.client.requests
    reply, short = seen
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(prompt), len(sampled.token_ids))
    told = reply.choices[0].logprobs.content
    np.testing.assert_allclose([token.logprob for token in told], sampled.logprobs, rtol=1e-6)
    assert len(cut.token_ids) == short.usage.completion_tokens == 2
    assert (reply.choices[0].finish_reason, short.choices[0].finish_reason) == ("stop", "length")
    assert trajectory.outcome is Outcome.TRUNCATED


@pytest.mark.parametrize("with_tools", [False, True])
def test_a_stream_says_what_a_whole_reply_says(stage, with_tools):
    tools = {"tools": [CALCULATOR]} if with_tools else {}

    async def program(client, task) -> None:
        whole = (await ask(client, **tools)).choices[0]
        text, calls, finish, usage = "", {}, None, None
        async for chunk in await ask(client, stream=True, stream_options={"include_usage": True}, **tools):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
                for call in choice.delta.tool_calls or ():
                    calls[call.index] = (call.function.name, call.function.arguments)
        assert (text, finish) == (whole.message.content or "", whole.finish_reason)
        assert list(calls.values()) == [
            (c.function.name, c.function.arguments) for c in whole.message.tool_calls or ()
        ]
        assert usage.total_tokens > usage.completion_tokens > 0

    _, [trajectory] = play(
        stage, program, lambda turn, prompt: "é " + (stage.call() + stage.call() if with_tools else "#### 42")
    )
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.failure


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tools": [CALCULATOR]}, '<tool_call>{"name": calculator}</tool_call>'),
        (
            {"tools": [CALCULATOR]},
            f'<tool_call>{{"name": "a", "arguments": {{"b": -{"1" * 400}}}}}</tool_call>',
        ),
        ({}, None),
        ({"tools": [CALCULATOR], "tool_choice": "none"}, None),
    ],
    ids=["unreadable", "400 digits", "no tools", "tool_choice none"],
)
def test_calls_that_cannot_be_told_as_calls_are_text_and_do_not_fork(stage, options, said):
    said = said or stage.call()

    async def program(client, task) -> None:
        choice = (await ask(client, **options)).choices[0]
        assert (choice.finish_reason, choice.message.tool_calls, choice.message.content) == (
            "stop",
            None,
            said,
        )
        await ask(
            client, [*QUESTION, choice.message, {"role": "user", "content": "That is no call."}], **options
        )

    world, [trajectory] = play(stage, program, lambda turn, prompt: "#### 42" if turn else said)
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.failure
    assert trajectory.segment_starts == (0,)
    check_rows(trajectory, world.client.requests)


def test_a_stop_string_ends_what_is_recorded(stage):
    """As an engine would have: tokens up to the one that completes the string stay, the text ends before it,
    the row goes on.
    """

    async def program(client, task) -> None:
        message = (await ask(client, stop=["Observation:", "nowhere"])).choices[0].message
        assert message.content.strip() == "Action: look"
        await ask(
            client,
            [*QUESTION, message, {"role": "user", "content": "Observation: nothing"}],
            stop="Observation:",
        )

    world, [trajectory] = play(
        stage, program, lambda turn, prompt: "#### 42" if turn else "Action: look Observation: 42 #### 42"
    )
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.failure
    assert trajectory.segment_starts == (0,)
    first = trajectory.token_ids[trajectory.turn_ids == 0].tolist()
    assert first == world.client.requests[0][1].token_ids[: len(first)].tolist()
    assert stage.chat.decode(first).rstrip().endswith("Observation:")
    second_prompt = stage.chat.decode(world.client.requests[1][0])
    assert "Observation:<|im_end|>\n<|im_start|>user\nObservation: nothing" in second_prompt


def test_the_cut_at_a_stop_string_is_the_shortest(stage):
    for text in ("abc STOP def", "STOP", "ab STO P STOP STOP", "é漢字 STOPé", "none"):
        ids = np.array(stage.chat.encode(text), np.int32)
        whole = Generation(ids, -np.ones(len(ids), np.float32), np.zeros(len(ids), np.int32), "length")
        cut = cut_at_stop(whole, ["STOP"], stage.chat)
        shortest = next(
            (n for n in range(1, len(ids) + 1) if "STOP" in stage.chat.decode(ids[:n].tolist())), None
        )
        assert len(cut.token_ids) == len(cut.logprobs) == len(cut.versions) == (shortest or len(ids))
        assert cut.finish_reason == ("stop" if shortest else "length")


# ------------------------------------------------------------------------------------------ errors and limits


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n": 2}, "n: "),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "messages.0.role"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
                ]
            },
            "messages.0.content",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "tool_call_id"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
    ],
)
def test_what_cannot_be_given_is_refused_and_costs_no_turn(stage, options, words):
    async def program(client, task) -> None:
        with pytest.raises(openai.BadRequestError, match=words):
            await ask(client, **{"messages": QUESTION, **options})
        await ask(client)

    _, [trajectory] = play(stage, program, lambda turn, prompt: "#### 42")
    assert (trajectory.outcome, trajectory.metrics["num_turns"]) == (Outcome.COMPLETED, 1), trajectory.failure


def test_tools_that_the_template_does_not_show_are_refused(stage):
    async def program(client, task) -> None:
        with pytest.raises(openai.BadRequestError, match=r"shows no tools; set model\.chat_template=hermes"):
            await ask(client, tools=[CALCULATOR])
        await ask(client, tools=[CALCULATOR], tool_choice="none")

    plain = template_chat(build_tiny_tokenizer(), PLAIN, tool_format="auto")
    _, [trajectory] = play(stage, program, lambda turn, prompt: "#### 42", chat=plain)
    assert (trajectory.outcome, trajectory.metrics["num_turns"]) == (Outcome.COMPLETED, 1), trajectory.failure


def test_parts_of_text_are_one_content(stage):
    async def program(client, task) -> None:
        parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "6 * 7?"}]
        first = (await ask(client, [{"role": "user", "content": parts}])).choices[0].message
        again = [
            {"role": "user", "content": "What is 6 * 7?"},
            {"role": "assistant", "content": [{"type": "text", "text": first.content}]},
        ]
        await ask(client, [*again, {"role": "user", "content": "Sure?"}])

    _, [trajectory] = play(stage, program, lambda turn, prompt: "#### 42")
    assert trajectory.segment_starts == (0,)
    assert trajectory.metrics["num_turns"] == 2


def test_sampling_and_forced_calls_are_counted_not_obeyed(stage):
    async def program(client, task) -> None:
        await ask(client, temperature=1.0, top_p=1.0, seed=None)
        await ask(client, [{"role": "user", "content": "b"}], temperature=0.2)
        await ask(client, extra_body={"chat_template_kwargs": {}})  # the run's own
        await ask(client, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
        await ask(client, [{"role": "user", "content": "c"}], tools=[CALCULATOR], tool_choice="required")

    world, [trajectory] = play(stage, program, lambda turn, prompt: "#### 42")
    assert {params.temperature for params in world.client.params} == {1.0}
    counts = {
        name: trajectory.metrics.get(f"gateway/{name}")
        for name in ("num_requests", "sampling_ignored", "tool_choice_ignored")
    }
    assert counts == {"num_requests": 5, "sampling_ignored": 2, "tool_choice_ignored": 1}


def test_keys_are_worth_something_only_while_their_trajectory_runs(stage):
    kept = SimpleNamespace(clients=[], codes=[])

    async def program(client, task) -> None:
        await ask(client)
        kept.clients.append((client.base_url, client.api_key))
        for key in ("sk-nobody", *(key for url, key in kept.clients[:-1])):
            async with openai.AsyncOpenAI(base_url=client.base_url, api_key=key) as stranger:
                with pytest.raises(openai.AuthenticationError) as caught:
                    await ask(stranger)
                kept.codes.append(caught.value.code)

    world = stage.World(
        lambda turn, prompt: "#### 42",
        plugins=[played_by(program)],
        agent={"tools": ()},
        rollout={"max_concurrent_trajectories": 1},
    )
    trajectories = world.play(stage.task(agent="guest"), n=3, real_time=True)
    assert {t.outcome for t in trajectories} == {Outcome.COMPLETED}, [t.failure for t in trajectories]
    assert len({url for url, _ in kept.clients}) == 1, "one port per process"
    assert len({key for _, key in kept.clients}) == 3
    assert kept.codes == ["invalid_api_key"] * 6


def test_other_paths_and_bad_bodies_have_openai_errors(stage):
    async def program(client, task) -> None:
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {client.api_key}"}) as raw:
            wrong_path = await raw.post(f"{client.base_url}embeddings", json={})
            wrong_body = await raw.post(f"{client.base_url}chat/completions", content=b"{", headers=JSON)
            chunked = await raw.post(f"{client.base_url}chat/completions", content=_in_pieces(), headers=JSON)
        assert (wrong_path.status_code, wrong_body.status_code, chunked.status_code) == (404, 400, 200)
        assert "is not served" in wrong_path.json()["error"]["message"]
        assert "not JSON" in wrong_body.json()["error"]["message"]

    async def _in_pieces():
        for byte in json.dumps({"messages": QUESTION}).encode():
            yield bytes([byte])

    _, [trajectory] = play(stage, program, lambda turn, prompt: "#### 42")
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.failure


def test_web_pages_and_strangers_are_refused_by_the_head_alone(stage):
    """None of them sends a body: it is announced, and the answer comes all the same."""
    statuses = []

    async def head_alone(url: httpx.URL, *lines: str) -> int:
        reader, writer = await asyncio.open_connection(url.host, url.port)
        head = ["POST /v1/chat/completions HTTP/1.1", "Content-Length: 8000000", *lines]
        writer.write("\r\n".join([*head, "", ""]).encode())
        answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        return int(answer.split()[1])

    async def program(client, task) -> None:
        url, key = client.base_url, f"Authorization: Bearer {client.api_key}"
        here, json_ = f"Host: {url.host}:{url.port}", "Content-Type: application/json"
        statuses.extend(
            [
                await head_alone(url, here, json_),
                await head_alone(url, here, json_, "Authorization: Bearer guess"),
                await head_alone(url, "Host: rebound.example:80", json_, key),
                await head_alone(url, here, json_, key, "Origin: https://page.example"),
                await head_alone(url, here, "Content-Type: text/plain", key),
                await head_alone(url, here, json_, key, "Content-Length: 9000000000"),
            ]
        )
        assert (await ask(client)).choices[0].message.content == "#### 42"

    _, [trajectory] = play(stage, program, lambda turn, prompt: "#### 42")
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.failure
    assert statuses[:-1] == [401, 401, 403, 403, 415]
    assert statuses[-1] in (400, 413)


LARGE = {
    "messages": ({"messages": QUESTION * 5000}, "at most 4096 items"),
    "brackets": ({"messages": QUESTION, "ignored": [[]] * 200_000}, "200004 opening brackets"),
    "parts": ({"messages": [{"role": "user", "content": [0] * 2_000_000}]}, "content"),
    "keys": (
        {
            "messages": QUESTION,
            "tools": [{"type": "function", "function": {str(i): 0 for i in range(300_000)}}],
        },
        "300000 keys",
    ),
    "bytes": ({"messages": [{"role": "user", "content": "x" * (8 * 2**20)}]}, "longer than"),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_bodies_are_refused_before_they_cost_anything(name):
    body, message = LARGE[name]
    encoded = json.dumps(body).encode()

    def read() -> None:
        with pytest.raises(RequestError, match=message):
            read_request(encoded)

    if len(encoded) <= MAX_BODY_BYTES:  # a longer one is refused by its head, as above
        assert cpu_s(read, below=1.0) < 1.0
    else:
        assert name == "bytes"


def test_the_event_loop_goes_on_while_a_large_body_is_read_and_encoded(stage):
    num_ticks = 0

    class Guest(AgentLoop):
        name: ClassVar[str] = "guest"
        uses_tools: ClassVar[bool] = False

        async def run(self, task, session) -> None:
            async with session.serve_openai() as endpoint, trio.open_nursery() as nursery:
                nursery.start_soon(self._tick)
                await session.run_asyncio(self._ask, endpoint)
                nursery.cancel_scope.cancel()

        @staticmethod
        async def _ask(endpoint) -> None:
            async with openai.AsyncOpenAI(
                base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0
            ) as client:
                with pytest.raises(openai.BadRequestError):  # it is far beyond what the trajectory may have
                    await ask(client, [{"role": "user", "content": "a b " * 250_000}])

        @staticmethod
        async def _tick() -> None:
            nonlocal num_ticks
            while True:
                await trio.sleep(0.001)
                num_ticks += 1

    world = stage.World(lambda turn, prompt: "#### 42", plugins=[Guest], agent={"tools": ()})
    [trajectory] = world.play(stage.task(agent="guest"), real_time=True)
    assert "the prompt leaves no room" in str(trajectory.failure), trajectory.outcome
    assert num_ticks > 50, "encoding alone takes a second and more"


@pytest.mark.parametrize(
    ("agent", "outcome"), [({"max_turns": 2}, "turn_limit"), ({"max_response_tokens": 30}, "truncated")]
)
@pytest.mark.parametrize("is_careful", [False, True], ids=["falls over it", "catches it"])
def test_a_budget_ends_the_trajectory_with_its_outcome(stage, agent, outcome, is_careful):
    errors = []

    async def program(client, task) -> None:
        messages = list(QUESTION)
        while True:
            try:
                messages.append((await ask(client, messages)).choices[0].message)
            except openai.BadRequestError as error:
                errors.append(error)
                if not is_careful:
                    raise
                with pytest.raises(openai.BadRequestError):
                    await ask(client)  # nothing is answered any more
                return
            messages.append({"role": "user", "content": "Again."})

    world, [trajectory] = play(stage, program, lambda turn, prompt: "#### 42", agent=agent)
    assert (trajectory.outcome, trajectory.failure) == (Outcome(outcome), None)
    assert [(e.code, e.type) for e in errors] == [("trajectory_ended", outcome)]
    assert trajectory.reward == 1.0
    check_rows(trajectory, world.client.requests)


def test_a_server_that_fails_is_model_error_whatever_the_program_makes_of_it(stage):
    async def program(client, task) -> None:
        with pytest.raises(openai.InternalServerError, match="burned"):
            await ask(client)

    def script(turn, prompt):
        raise ServerError("the server burned", status=500)

    world = stage.World(script, plugins=[played_by(program)], agent={"tools": ()})
    world.client.model_info = _always_up
    [trajectory] = world.play(stage.task(agent="guest"), real_time=True)
    assert trajectory.outcome is Outcome.MODEL_ERROR
    assert "burned" in str(trajectory.failure)


async def _always_up():
    from agentrl.servers.protocol import ModelInfo

    return ModelInfo("scripted", 0)


def test_a_program_that_raises_aborts_its_trajectory(stage):
    async def program(client, task) -> None:
        await ask(client)
        raise LookupError("lost the plot")

    _, [trajectory] = play(stage, program, lambda turn, prompt: "#### 42")
    assert trajectory.outcome is Outcome.ABORTED
    assert "LookupError: lost the plot" in str(trajectory.failure)


# ----------------------------------------------------------------------------------------------- cancellation


class Gate:
    """Holds every generation until it is opened, and says when one has come in and when one was cancelled."""

    def __init__(self, client) -> None:
        self.sample = client.generate
        self.came, self.cancelled, self.opened = (threading.Event() for _ in range(3))
        self.is_held = True

    async def generate(self, input_ids, params, *, rid):
        self.came.set()
        try:
            if self.is_held:
                await trio.sleep_forever()
        finally:
            self.cancelled.set()
        return await self.sample(input_ids, params, rid=rid)


def test_a_client_that_goes_away_cancels_its_generation_and_may_ask_again(stage):
    """The repeated request gets the row that the first one began: nothing of the first was recorded."""

    async def program(client, task) -> None:
        request = asyncio.create_task(ask(client))
        await asyncio.to_thread(gate.came.wait)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await asyncio.to_thread(gate.cancelled.wait)
        gate.is_held = False
        await ask(client)

    world = stage.World(lambda turn, prompt: "#### 42", plugins=[played_by(program)], agent={"tools": ()})
    gate = Gate(world.client)
    world.client.generate = gate.generate
    [trajectory] = world.play(stage.task(agent="guest"), real_time=True)
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.failure
    assert (trajectory.segment_starts, trajectory.metrics["num_turns"]) == ((0,), 1)
    check_rows(trajectory, world.client.requests)


def test_the_deadline_ends_the_program_and_its_requests(stage):
    ended = []

    async def program(client, task) -> None:
        try:
            await ask(client)
        finally:
            ended.append(True)

    world = stage.World(
        lambda turn, prompt: "#### 42",
        plugins=[played_by(program)],
        agent={"tools": (), "trajectory_timeout_s": 0.3},
    )
    gate = Gate(world.client)
    world.client.generate = gate.generate
    [trajectory] = world.play(stage.task(agent="guest"), real_time=True)
    assert trajectory.outcome is Outcome.TIMEOUT
    assert trajectory.num_tokens == 0, "context alone is no row"
    assert ended == [True]
    assert gate.cancelled.is_set()


def test_a_program_that_returns_leaves_no_request_behind(stage):
    """The trajectory ends with its program: a request that still runs is cancelled, and recorded nowhere."""

    async def program(client, task) -> None:
        gate.is_held = False
        await ask(client)
        gate.is_held = True
        gate.came.clear()
        asyncio.get_running_loop().create_task(_quietly(client))
        await asyncio.to_thread(gate.came.wait)
        gate.cancelled.clear()

    async def _quietly(client) -> None:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as other:
            await asyncio.gather(ask(other, [{"role": "user", "content": "other"}]), return_exceptions=True)

    world = stage.World(lambda turn, prompt: "#### 42", plugins=[played_by(program)], agent={"tools": ()})
    gate = Gate(world.client)
    world.client.generate = gate.generate
    [trajectory] = world.play(stage.task(agent="guest"), real_time=True)
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.failure
    assert gate.cancelled.is_set()
    assert trajectory.metrics["num_turns"] == 1


def test_a_request_that_was_read_while_its_trajectory_ended_samples_nothing():
    """A large body is read in a thread: its trajectory may end meanwhile."""

    class Served:
        """Counts what it is asked for."""

        num_asked = 0

        async def complete(self, request, listener):
            self.num_asked += 1

        async def count_tokens(self, request) -> int:
            return 0

    async def main() -> None:
        trajectory = OpenTrajectory(served)
        await trajectory.end()
        with pytest.raises(RequestError, match="is over") as refused:
            await trajectory.complete(TurnRequest((Message("user", "a"),)))
        assert refused.value.code == "trajectory_ended"

    served = Served()
    trio.run(main)
    assert served.num_asked == 0
