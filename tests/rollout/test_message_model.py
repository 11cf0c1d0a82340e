"""A model that speaks messages: what is asked, what is read, and what happens when a server is busy, broken
or lying.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

import pytest
import trio

from agentrl.chat.openai_messages import write_message
from agentrl.config.agent import AgentConfig
from agentrl.config.evaluation import EvalConfig
from agentrl.config.reward import RewardConfig
from agentrl.errors import RequestRefused, ServerError
from agentrl.plugins import AgentLoop, Session, load_plugins
from agentrl.rewards.select import Unscored
from agentrl.rollout.asyncio_host import AsyncioHost
from agentrl.rollout.conversation_line import PromptLimits
from agentrl.rollout.message_model import (
    MAX_SERVER_FAILURES,
    ContextExceeded,
    MessageModel,
    MessageReply,
    read_completion,
    served_models,
)
from agentrl.rollout.message_session import UncountedChat, uncounted_chat
from agentrl.rollout.player_stack import PlayerParts, open_stack
from agentrl.rollout.recorder import Attempt
from agentrl.types import Message, Task, ToolCall, Trajectory
from parts.http_answers import HttpRequest, HttpResponse, serve_http

QUESTION = (Message("user", "?"),)


class Pressure:
    def __init__(self) -> None:
        self.round = 0
        self.heard: list[str] = []

    def trouble(self, began_in: int, reason: str) -> None:
        self.heard.append(reason)


def completion(content: str | None = "hi", **message: Any) -> dict[str, Any]:
    choice = {"message": {"role": "assistant", "content": content, **message}, "finish_reason": "stop"}
    return {"choices": [choice], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}


Answer = Callable[[dict[str, Any]], tuple[int, Any]]


def talk(
    answers: list[Answer], main: Callable[[MessageModel, Pressure], Awaitable[Any]], **options: Any
) -> Any:
    """Run `main` with a model behind one server per entry of `answers`, each of which makes status and body
    of a request's body.
    """

    async def run() -> Any:
        async with trio.open_nursery() as nursery:
            urls = []
            for answer in answers:
                listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")

                async def handle(request: HttpRequest, answer: Answer = answer) -> HttpResponse:
                    status, body = answer(json.loads(request.body or b"{}"))
                    return HttpResponse(status, json.dumps(body).encode())

                nursery.start_soon(lambda h=handle, ls=listeners: serve_http(h, ls))
                urls.append(f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}/v1")
            pressure = Pressure()
            model = MessageModel(urls, "m", api_key=None, max_connections=8, backpressure=pressure, **options)
            with trio.fail_after(30):
                result = await main(model, pressure)
            await model.aclose()
            nursery.cancel_scope.cancel()
            return result

    return trio.run(run)


async def ask(model: MessageModel, messages=QUESTION) -> MessageReply:
    return await model.complete(messages, (), EvalConfig(), max_tokens=9, turn=0, key="k")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.rollout.message_model.FIRST_PAUSE_S", 0.001)


def test_a_busy_server_is_asked_again_and_spared() -> None:
    statuses = iter([429, 503, 408])

    async def main(model: MessageModel, pressure: Pressure) -> None:
        assert (await ask(model)).message.content == "hi"
        assert pressure.heard == ["overload"] * 3

    talk([lambda body: (status, {}) if (status := next(statuses, None)) else (200, completion())], main)


def test_a_broken_server_is_given_up_after_a_few_tries() -> None:
    asked: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        asked.append(body)
        return 500, {}

    async def main(model: MessageModel, pressure: Pressure) -> None:
        with pytest.raises(ServerError, match="answered 500"):
            await ask(model)
        assert len(asked) == MAX_SERVER_FAILURES
        assert not pressure.heard

    talk([answer], main)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("This model's maximum context length is 4096 tokens", ContextExceeded),
        ("top_k is not supported", RequestRefused),
    ],
)
def test_a_refused_request_is_not_repeated(text: str, kind: type[Exception]) -> None:
    asked: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        asked.append(body)
        return 400, {"error": {"message": text}}

    async def main(model: MessageModel, pressure: Pressure) -> None:
        with pytest.raises(kind):
            await ask(model)
        assert len(asked) == 1

    talk([answer], main)


def test_the_other_name_of_the_length_is_learned_from_the_refusal() -> None:
    asked = []

    def answer(body: dict) -> tuple[int, Any]:
        asked.append("max_tokens" in body)
        return (
            (400, {"error": {"message": "use 'max_completion_tokens' instead"}})
            if "max_tokens" in body
            else (200, completion())
        )

    async def main(model: MessageModel, pressure: Pressure) -> None:
        await ask(model)
        await ask(model)

    talk([answer], main)
    assert asked == [True, False, False]


def test_requests_go_where_the_fewest_run() -> None:
    counts = [0, 0]

    def counting(place: int) -> Answer:
        def answer(body: dict) -> tuple[int, Any]:
            counts[place] += 1
            return 200, completion()

        return answer

    async def main(model: MessageModel, pressure: Pressure) -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(ask, model)

    talk([counting(0), counting(1)], main)
    assert counts == [4, 4]


def test_what_is_read_of_an_answer() -> None:
    call = {"id": "", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    broken = {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "{x"}}
    listed = {"id": "c3", "type": "function", "function": {"name": "h", "arguments": "[1]"}}
    reply = read_completion(
        completion(None, tool_calls=[call, broken, listed], reasoning_content="hm"), turn=3
    )
    assert (reply.message.content, reply.message.reasoning) == ("", "hm")
    first, second, third = reply.message.tool_calls
    assert (first.arguments, second.arguments, third.arguments) == ({"x": 1}, None, None)
    assert first.id
    assert "not valid JSON" in (second.error or "")
    assert (reply.num_prompt_tokens, reply.num_tokens) == (5, 2)


@pytest.mark.parametrize("wrong", [{}, [], {"choices": []}, completion() | {"usage": None}, "text"])
def test_what_is_no_answer(wrong: Any) -> None:
    with pytest.raises(ServerError, match="not a chat completion with `usage`"):
        read_completion(wrong, turn=0)


def test_every_call_is_shown_with_its_answer_also_one_that_could_not_be_read() -> None:
    calls = (ToolCall("a", "f", {"x": 1}), ToolCall("b", "g", None, "no JSON"))
    messages = (
        *QUESTION,
        Message("assistant", "", tool_calls=calls),
        Message("tool", "1", tool_call_id="a"),
        Message("tool", "!", tool_call_id="b"),
    )
    written = [write_message(message) for message in messages]
    assert [call["id"] for call in written[1]["tool_calls"]] == ["a", "b"]
    assert [message.get("tool_call_id") for message in written[2:]] == ["a", "b"]


def test_the_names_of_models() -> None:
    replies = iter([{"data": [{"id": "a"}, {"id": "b"}]}, {"data": 7}])

    async def main(model: MessageModel, pressure: Pressure) -> None:
        url = f"http://{model._clients[0].origin}/v1"
        assert await served_models(url, api_key=None) == ["a", "b"]
        with pytest.raises(ServerError, match="not a list of models"):
            await served_models(url, api_key=None)

    talk([lambda body: (200, next(replies))], main)


@pytest.mark.parametrize("text", ["", "a", "abcde", "é🙂x" * 7, "line\nline"])
def test_texts_that_nobody_counted(text: str) -> None:
    chat = UncountedChat()
    ids = chat.encode(text)
    assert len(ids) == -(-len(text) // 4)
    assert chat.decode(ids) == text
    assert text.startswith(chat.decode(ids[:1]))


class Afresh(AgentLoop):
    """Speaks, and speaks again after a restart."""

    name: ClassVar[str] = "afresh"
    uses_tools: ClassVar[bool] = False
    lengths: ClassVar[list[int]] = []

    async def run(self, task: Task, session: Session) -> None:
        await session.generate()
        self.lengths.append(session.num_context_tokens)
        session.restart([Message("user", "from here")])
        await session.generate()
        self.lengths.append(session.num_context_tokens)


def test_a_session_of_messages_restarts_and_sends_the_arguments_of_the_template() -> None:
    asked: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        asked.append(body)
        return 200, completion()

    async def main(model: MessageModel, _: Pressure) -> Trajectory:
        plugins = load_plugins()
        plugins.agents.add(Afresh)
        plugins.rewards.add(Unscored)
        reward = RewardConfig(sources={"s": Unscored.name})
        with AsyncioHost() as host:
            parts = PlayerParts(plugins, uncounted_chat(), host, PromptLimits(512, "filter"))
            stack = open_stack(AgentConfig(), reward, model, parts)
            own = {"chat_template_kwargs": {"enable_thinking": False}}
            task = Task("t", "s", QUESTION, "afresh", extra_info=own)
            trajectory = await stack.player.play(Attempt(0, 0, task), EvalConfig())
            await stack.scorer.aclose()
            return trajectory

    trajectory = talk([answer], main, template_kwargs={"enable_thinking": True, "style": "a"})
    assert trajectory.failure is None
    assert [message["content"] for message in asked[1]["messages"]] == ["from here"]
    assert [body["chat_template_kwargs"] for body in asked] == [{"enable_thinking": False, "style": "a"}] * 2
    assert trajectory.segment_starts == (0, 7)  # the server counted 5 tokens of prompt and 2 of the answer
    assert trajectory.action_mask.tolist() == ([False] * 5 + [True] * 2) * 2
    assert [message.content for message in trajectory.messages] == ["from here", "hi"]
    assert Afresh.lengths == [7, 7]
