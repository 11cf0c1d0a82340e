"""The gateway's three dialects, spoken by the vendors' own clients: all record the same conversation."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial

import anthropic
import httpx
import numpy as np
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.types import Outcome
from parts.guests import ByChat, ByMessages, ByResponses, guest

WAYS = {
    "chat": partial(ByChat, is_stream=False),
    "chat, streamed": partial(ByChat, is_stream=True),
    "responses": partial(ByResponses, is_stream=False),
    "responses, streamed": partial(ByResponses, is_stream=True),
    "responses by id": partial(ByResponses, is_stream=False, by_id=True),
    "messages": partial(ByMessages, is_stream=False),
    "messages, streamed": partial(ByMessages, is_stream=True),
}
DIALECTS = ("chat", "responses", "messages")


def play(stage, program, script, *, n=1, agent=None, **options):
    """Return (world, trajectory or trajectories) of attempts that `program(endpoint, task)` plays."""
    world = stage.World(script, plugins=[guest(program)], agent={"tools": (), **(agent or {})}, **options)
    played = world.play(stage.task(agent="guest"), n=n, real_time=True)
    return (world, played[0]) if n == 1 else (world, played)


def converse(way, *, system=None, replies=("And now?",), heard=None):
    """Return a program that asks, answers all calls, and says `replies` to turns without calls."""

    async def program(endpoint, task) -> None:
        async with way(endpoint, system) as client:
            client.say("What is 6 * 7?")
            rest = list(replies)
            while True:
                answer = await client.ask()
                if heard is not None:
                    heard.append(answer)
                if answer.calls:
                    client.answer([(id, f"result {index}") for index, (id, _, _) in enumerate(answer.calls)])
                elif rest:
                    client.say(rest.pop(0))
                else:
                    return

    return program


TEXTS = st.sampled_from(["#### 42", "é 漢字 👍🏽", "  two\n\nlines ", "<b> & <tool", "a" * 70, ""])
THOUGHTS = st.sampled_from(["", "", "Hm.", "\nAs always:\n"])
CALLS = st.sampled_from(
    [
        '{"expression": "6*7"}',
        '{"expression": "é", "more": [1, 2.5, null, {"a": true}]}',
        '{"expression": 123456789012345678901234567890}',
        "{}",
    ]
)
UNREADABLE = st.sampled_from(
    [
        '<tool_call>{"name": calculator}</tool_call>',
        '<tool_call>{"name": "calculator", "arguments": {"expression": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "calculator", "arguments": {"expression": NaN}}</tool_call>',
        f'<tool_call>{{"name": "calculator", "arguments": {{"expression": {"1" * 400}}}}}</tool_call>',
        '<tool_call>{"name": "\\udfff", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "calculator", "argu',
    ]
)


@st.composite
def turns(draw):
    """A turn as the model writes it: thoughts, text, calls of which some may be unreadable."""
    thought, text = draw(THOUGHTS), draw(TEXTS)
    calls = draw(
        st.lists(st.one_of(CALLS.map(written_call), CALLS.map(written_call), UNREADABLE), max_size=2)
    )
    return (f"<think>{thought}</think>" if thought else "") + text + "".join(calls)


def written_call(arguments: str) -> str:
    return f'<tool_call>{{"name": "calculator", "arguments": {arguments}}}</tool_call>'


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(said=st.lists(turns(), min_size=2, max_size=3), system=st.sampled_from([None, "Be brief."]))
def test_all_dialects_record_the_same_conversation(stage, said, system):
    """Whatever the model writes, each client hears the same, and each attempt has the same tokens, masks,
    turns and log-probabilities, in one row.
    """
    script = [*said, "#### 42", "#### 42", "#### 42"]
    first = None
    for name, way in WAYS.items():
        heard = []
        program = converse(way, system=system, heard=heard)
        _, trajectory = play(stage, program, lambda turn, prompt: script[turn])
        assert (trajectory.outcome, trajectory.failure) == (Outcome.COMPLETED, None), name
        assert trajectory.segment_starts == (0,), f"{name}: what came back was not recognised"
        told = [(answer.text, answer.calls) for answer in heard]
        if first is None:
            first = (trajectory, told)
            continue
        for field in ("token_ids", "action_mask", "behavior_logprobs", "versions", "turn_ids"):
            np.testing.assert_array_equal(
                getattr(trajectory, field), getattr(first[0], field), err_msg=f"{name}: {field}"
            )
        if "streamed" not in name:
            assert told == first[1], name


# ---------------------------------------------------------------------------------------------------- answers


SAID_AND_TOLD = {
    # what the model writes: text, thoughts and number of calls as a streamed client hears them
    "<think>Hm.</think>Let me see. " + written_call("{}"): ("Let me see.", "Hm.", 1),
    written_call("{}") * 2: ("", "", 2),
    "Look: <tool_call>{oops</tool_call>  ": ("Look: <tool_call>{oops</tool_call>", "", 0),
    "First. <think>late</think> Then.": ("First.  Then.", "", 0),
    written_call("{}") + " after <tool_call>{oops</tool_call>": (
        written_call("{}") + " after <tool_call>{oops</tool_call>",
        "",
        0,
    ),
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_a_stream_tells_of_thoughts_text_and_calls(stage, dialect):
    for said, (text, reasoning, num_calls) in SAID_AND_TOLD.items():
        heard = []
        program = converse(WAYS[f"{dialect}, streamed"], heard=heard)
        _, trajectory = play(stage, program, lambda turn, prompt, said=said: "#### 42" if turn else said)
        assert trajectory.outcome is Outcome.COMPLETED, trajectory.failure
        assert trajectory.segment_starts == (0,), f"{said}: what came back was not recognised"
        assert (heard[0].text, heard[0].reasoning, len(heard[0].calls)) == (text, reasoning, num_calls)


FINISHES = {  # how each dialect says that a turn ended by itself, at a call, at a limit
    "chat": ("stop", "tool_calls", "length"),
    "responses": ("completed", "completed", "incomplete"),
    "messages": ("end_turn", "tool_use", "max_tokens"),
}
LIMITS = {"chat": "max_completion_tokens", "responses": "max_output_tokens", "messages": "max_tokens"}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_how_a_turn_ended(stage, dialect):
    for way in (WAYS[dialect], WAYS[f"{dialect}, streamed"]):
        heard = []

        async def program(endpoint, task, way=way, heard=heard) -> None:
            async with way(endpoint, None) as client:
                client.say("a")
                heard.append(await client.ask())
                client.say("b")
                heard.append(await client.ask())
                client.answer([(heard[-1].calls[0][0], "42")])
                heard.append(await client.ask(**{LIMITS[dialect]: 2}))

        _, trajectory = play(stage, program, lambda turn, prompt: stage.call() if turn == 1 else "#### 42")
        assert trajectory.outcome is Outcome.TRUNCATED, trajectory.failure
        assert tuple(answer.finish for answer in heard) == FINISHES[dialect]


def test_anthropics_client_is_told_the_stop_string(stage):
    async def program(endpoint, task) -> None:
        async with ByMessages(endpoint, None, is_stream=True) as client:
            client.say("a")
            answer = await client.ask(stop_sequences=["Observation:", "nowhere"])
            assert (answer.text.strip(), answer.finish) == ("Action: look", "stop_sequence")

    _, trajectory = play(stage, program, lambda turn, prompt: "Action: look Observation: 42")
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.failure


def test_tokens_are_counted_without_a_turn(stage):
    async def program(endpoint, task) -> None:
        async with ByMessages(endpoint, None, is_stream=False) as client:
            asked = {"model": "m", "messages": [{"role": "user", "content": "What is 6 * 7?"}]}
            counted = await client.client.messages.count_tokens(**asked)
            reply = await client.client.messages.create(**asked, max_tokens=100)
            assert counted.input_tokens == reply.usage.input_tokens > 0

    _, trajectory = play(stage, program, lambda turn, prompt: "#### 42")
    assert (trajectory.outcome, trajectory.metrics["num_turns"]) == (Outcome.COMPLETED, 1), trajectory.failure


def test_both_vendors_clients_list_the_model(stage):
    async def program(endpoint, task) -> None:
        async with (
            ByMessages(endpoint, None, is_stream=False) as ours,
            ByChat(endpoint, None, is_stream=False) as theirs,
        ):
            for client in (ours.client, theirs.client):
                assert [model.id async for model in client.models.list()] == ["policy"]
                assert (await client.models.retrieve("policy")).id == "policy"
            theirs.say("a")
            await theirs.ask()

    _, trajectory = play(stage, program, lambda turn, prompt: "#### 42")
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.failure


# ------------------------------------------------------------------------------------------- what agents send


async def post(http, endpoint, path, body, key="Authorization"):
    value = f"Bearer {endpoint.api_key}" if key == "Authorization" else endpoint.api_key
    return await http.post(f"{endpoint.root_url}{path}", json=body, headers={key: value})


def test_a_request_as_codex_sends_it(stage):
    """Instructions and developer messages are one system message; tools of OpenAI's servers are left out; a
    tool that takes a text gets it back as a text.
    """
    tools = [
        {"type": "function", "name": "shell", "parameters": {"type": "object"}, "strict": False},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark"}},
        {"type": "web_search", "external_web_access": False, "name": None},
    ]
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandboxed."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix it."}]},
    ]
    body = {"model": "gpt-5.2-codex", "instructions": "You are Codex.", "input": items, "tools": tools}
    body |= {"tool_choice": "auto", "parallel_tool_calls": False, "store": False, "stream": True}
    body |= {"reasoning": {"effort": "high"}, "include": ["reasoning.encrypted_content"]}

    async def program(endpoint, task) -> None:
        async with httpx.AsyncClient() as http:
            events = events_of(await post(http, endpoint, "/v1/responses", body))
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
            assert [item["type"] for item in done] == ["reasoning", "message", "custom_tool_call"]
            assert done[-1]["input"] == "*** Begin"
            assert events[-1]["response"]["output"] == done
            result = {"type": "custom_tool_call_output", "call_id": done[-1]["call_id"], "output": "Done"}
            again = await post(http, endpoint, "/v1/responses", body | {"input": [*items, *done, result]})
            assert events_of(again)[-1]["type"] == "response.completed"

    call = '<tool_call>{"name": "apply_patch", "arguments": {"input": "*** Begin"}}</tool_call>'
    world, trajectory = play(
        stage, program, lambda turn, prompt: "Done." if turn else f"<think>Hm.</think>I will. {call}"
    )
    assert (trajectory.outcome, trajectory.failure) == (Outcome.COMPLETED, None)
    assert trajectory.segment_starts == (0,)
    assert trajectory.metrics["gateway/tools_left_out"] == 2
    prompt = stage.chat.decode(world.client.requests[0][0])
    assert "You are Codex.\n\nSandboxed." in prompt
    assert "shell" in prompt
    assert "apply_patch(input: string)" in prompt
    assert "web_search" not in prompt


def events_of(response: httpx.Response) -> list[dict]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream"
    lines = response.text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ") and line != "data: [DONE]"]


def test_a_request_as_claude_code_sends_it(stage):
    """System blocks, cached blocks, several blocks of text beside results, thinking that comes back, a key in
    the header of either vendor.
    """
    cached = {"cache_control": {"type": "ephemeral"}}
    body = {
        "model": "claude-sonnet-5",
        "max_tokens": 32000,
        "stream": True,
        "system": [
            {"type": "text", "text": "You are an agent."},
            {"type": "text", "text": "Be brief.", **cached},
        ],
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "metadata": {"user_id": "user"},
        "temperature": 1,
        "tools": [
            {"name": "Bash", "description": "Run.", "input_schema": {"type": "object"}, **cached},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
            {"type": "mcp_toolset", "mcp_server_name": "files", "input_schema": None},
        ],
    }
    said = {"type": "text", "text": "<reminder/>"}, {"type": "text", "text": "Go."}
    asked = blocks("user", *said)["messages"]

    async def program(endpoint, task) -> None:
        async with httpx.AsyncClient() as http:
            path = "/v1/messages?beta=true"
            first = await post(http, endpoint, path, body | {"messages": asked}, "x-api-key")
            told = blocks_of(events_of(first))
            assert [block["type"] for block in told] == ["thinking", "text", "tool_use", "tool_use"]
            results = [
                {"type": "tool_result", "tool_use_id": b["id"], "content": c, "is_error": False}
                for b, c in zip(told[2:], ("one", [{"type": "text", "text": "two"}]), strict=True)
            ]
            more = [*asked, {"role": "assistant", "content": told}]
            more += [{"role": "user", "content": [*results, {"type": "text", "text": "<reminder/>"}]}]
            assert blocks_of(events_of(await post(http, endpoint, path, body | {"messages": more})))

    call = '<tool_call>{"name": "Bash", "arguments": {"command": "ls"}}</tool_call>'
    _, trajectory = play(
        stage, program, lambda turn, prompt: "Done." if turn else f"<think>Hm.</think>I will. {call}{call}"
    )
    assert (trajectory.outcome, trajectory.failure) == (Outcome.COMPLETED, None)
    assert trajectory.segment_starts == (0,)
    assert [m.role for m in trajectory.messages] == [
        "system", "user", "assistant", "tool", "tool", "user", "assistant"
    ]  # fmt: skip
    assert trajectory.messages[0].content == "You are an agent.\nBe brief."
    assert trajectory.metrics["gateway/tools_left_out"] == 4
    assert "gateway/sampling_ignored" not in trajectory.metrics


def blocks_of(events: list[dict]) -> list[dict]:
    """Put the blocks of a message together, as a client does."""
    told: list[dict] = []
    for event in events:
        if event["type"] == "content_block_start":
            told.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], told[event["index"]]
            key = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}.get(
                delta["type"]
            )
            if key is None:
                block["input"] = json.loads(delta["partial_json"])
            else:
                block[key] += delta[key]
    return told


# --------------------------------------------------------------------------------------------- what is wrong

ONE = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 8}


def item(type: str, **fields) -> dict:
    return {"input": [{"type": type, **fields}]}


def blocks(role: str, *content: dict) -> dict:
    return {"messages": [{"role": role, "content": list(content)}]}


DEEP = json.loads('{"a":' * 300 + "1" + "}" * 300)
LEVELS = "a tool has more than 200 nested levels"


def used(arguments) -> dict:
    return {"type": "tool_use", "id": "a", "name": "b", "input": arguments}


WRONG = {
    "/v1/responses": {
        "no input": ({}, "input: it is empty"),
        "an image": ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_text"),
        "an unknown item": (item("computer_call"), "computer_call"),
        "a call without arguments": (item("function_call", call_id="a", name="b"), "arguments"),
        "arguments that are a list": (
            item("function_call", call_id="a", name="b", arguments="[]"),
            "not a JSON object",
        ),
        "an unknown id": ({"input": "a", "previous_response_id": "resp_1"}, "no stored response"),
        "a format": ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format.type"),
        "the background": ({"input": "a", "background": True}, "background"),
        "a nameless tool": ({"input": "a", "tools": [{"type": "function"}]}, "needs a name"),
        "a list": ([1], "must be a JSON object"),
        "many items": ({"input": [{"role": "user", "content": "a"}] * 4097}, "at most 4096"),
        "a number as input": ({"input": 5}, "input"),
        "a deep tool": (
            {"input": "a", "tools": [{"type": "function", "name": "a", "parameters": DEEP}]},
            LEVELS,
        ),
        "a deep tool that is left out": ({"input": "a", "tools": [{"type": "mcp", "more": DEEP}]}, LEVELS),
        "a type of no tool": ({"input": "a", "tools": [{"type": 5}]}, "tools.0.type"),
    },
    "/v1/messages": {
        "no messages": ({"max_tokens": 8}, "messages: Field required"),
        "an image": (blocks("user", {"type": "image"}), "messages.0.content.0"),
        "a result of an assistant": (
            blocks("assistant", {"type": "tool_result", "tool_use_id": "a"}),
            "no tool_result",
        ),
        "a call of a user": (blocks("user", used({})), "text and tool_result blocks only"),
        "arguments that are a text": (blocks("assistant", used("c")), "not a JSON object"),
        "deep arguments": (
            blocks("assistant", used({"a": json.loads("[" * 300 + "]" * 300)})),
            "not a JSON object",
        ),
        "a tool without a name": (ONE | {"tools": [{"input_schema": {}}]}, "tools.0.name"),
        "no tokens": (ONE | {"max_tokens": 0}, "max_tokens"),
        "another role": ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role"),
        "a deep tool": (ONE | {"tools": [{"name": "a", "input_schema": DEEP}]}, LEVELS),
    },
    "/v1/chat/completions": {
        "a deep tool": (ONE | {"tools": [{"type": "function", "function": DEEP}]}, LEVELS),
        "a deep function": (
            ONE | {"tools": [{"type": "function", "function": {"name": "a"}, "more": DEEP}]},
            LEVELS,
        ),
    },
}


def test_wrong_requests_are_refused_in_the_form_of_their_dialect_and_cost_no_turn(stage):
    async def program(endpoint, task) -> None:
        async with httpx.AsyncClient() as http:
            for path, cases in WRONG.items():
                for name, (body, words) in cases.items():
                    response = await post(http, endpoint, path, body)
                    check_refusal(path, response, 400, f"{path}: {name}")
                    assert words in response.json()["error"]["message"], (name, response.text)
                url = f"{endpoint.root_url}{path}"
                strange = await http.post(url, json=ONE, headers={"x-api-key": "sk-ant"})
                check_refusal(path, strange, 401, path)
                long = b'{"input": "' + b"x" * (8 * 2**20) + b'"}'
                headers = {"x-api-key": endpoint.api_key, "content-type": "application/json"}
                with suppress(httpx.WriteError):  # it may be refused while it is being sent
                    check_refusal(path, await http.post(url, content=long, headers=headers), 413, path)
            check_refusal(
                "/v1/messages", await post(http, endpoint, "/v1/messages/batches", ONE), 404, "batches"
            )
        async with ByResponses(endpoint, None, is_stream=False) as client:
            client.say("a")
            await client.ask()

    _, trajectory = play(stage, program, lambda turn, prompt: "#### 42")
    assert (trajectory.outcome, trajectory.failure) == (Outcome.COMPLETED, None)
    assert trajectory.metrics["num_turns"] == 1


def check_refusal(path: str, response: httpx.Response, status: int, what: str) -> None:
    assert response.status_code == status, (what, response.text)
    assert response.headers["x-should-retry"] == "false"
    body = response.json()
    if path == "/v1/messages":
        kinds = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}
        assert (body["type"], body["error"]["type"]) == ("error", kinds.get(status, "request_too_large")), (
            what
        )
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}, what


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_budget_ends_the_trajectory_in_every_dialect(stage, is_stream):
    """A request that fails before its first event is refused by its status, streamed or not."""
    suffix = ", streamed" if is_stream else ""

    async def program(endpoint, task) -> None:
        for dialect in DIALECTS:
            async with WAYS[f"{dialect}{suffix}"](endpoint, None) as client:
                client.say(dialect)
                if dialect == "chat":
                    await client.ask()
                    client.say("more")
                with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as caught:
                    await client.ask()
                problem = caught.value.body.get("error", caught.value.body)
                assert problem["code"] == "trajectory_ended"
                assert "turn_limit" in (problem["type"], problem.get("outcome"))

    _, trajectory = play(stage, program, lambda turn, prompt: "#### 42", agent={"max_turns": 1})
    assert (trajectory.outcome, trajectory.failure) == (Outcome.TURN_LIMIT, None)
