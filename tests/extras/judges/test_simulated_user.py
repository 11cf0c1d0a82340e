"""A user that another model plays."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import pytest
import trio

from agentrl.errors import ConfigError, DataError, ToolError
from agentrl.extras.gateway.http_server import HttpRequest, HttpResponse, serve_http
from agentrl.extras.judges.simulated_user import BEGIN, SimulatedUser
from agentrl.plugins import Interaction, InteractionReply
from agentrl.types import Message, Outcome
from parts.scripted import play


def talk(interaction: Interaction, *says: str, **row) -> tuple[list[InteractionReply], float | None]:
    """Say one thing after the other until the partner is done; return its replies and its score."""

    async def main():
        await interaction.start(**row)
        messages, replies = [Message("user", "?")], []
        for text in says:
            messages.append(Message("assistant", text))
            replies.append(await interaction.respond(messages))
            if replies[-1].is_done:
                break
            messages.append(Message("user", replies[-1].text))
        score = await interaction.score()
        await interaction.finalize()
        return replies, score

    return trio.run(main)


# --------------------------------------------------------------------------------------------- simulated user


class ChatServer:
    """An OpenAI-compatible server: `answer(number of the request, messages)` gives text, a status, or None
    for no answer at all.
    """

    def __init__(
        self, answer: Callable[[int, list[dict]], str | int | None], *, usage: dict | None = None
    ) -> None:
        self.answer, self.usage = answer, usage
        self.requests: list[dict] = []
        self.headers: list[Mapping[str, str]] = []
        self.paths: list[str] = []

    async def handle(self, request: HttpRequest) -> HttpResponse:
        self.requests.append(json.loads(request.body))
        self.headers.append(request.headers)
        self.paths.append(request.path)
        answer = self.answer(len(self.requests) - 1, self.requests[-1]["messages"])
        if answer is None:
            await trio.sleep_forever()
        if isinstance(answer, int):
            return HttpResponse(answer, b'{"error": "no"}')
        reply = {"choices": [{"message": {"role": "assistant", "content": answer}}]} | (
            {"usage": self.usage} if self.usage else {}
        )
        return HttpResponse(200, json.dumps(reply).encode())

    def talk(self, *says: str, row=None, **options) -> tuple[list[InteractionReply], float | None]:
        """Let the simulated user, asking this server, answer `says`."""

        async def main():
            (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
            url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
            async with trio.open_nursery() as nursery:
                nursery.start_soon(
                    functools.partial(serve_http, self.handle, [listener], max_body_bytes=10**6)
                )
                partner = SimulatedUser({"url": url, "goal": "a refund", "retry_pause_s": 0, **options})
                await partner.start(**(row or {}))
                messages, replies = [Message("system", "You sell shoes."), Message("user", "Hello!")], []
                try:
                    for text in says:
                        messages.append(Message("assistant", text))
                        replies.append(await partner.respond(messages))
                        if replies[-1].is_done:
                            break
                        messages.append(Message("user", replies[-1].text))
                    return replies, await partner.score()
                finally:
                    await partner.finalize()
                    nursery.cancel_scope.cancel()

        return trio.run(main)


def test_the_other_model_sees_the_conversation_from_the_users_side(monkeypatch) -> None:
    monkeypatch.setenv("USER_KEY", "secret-123")
    server = ChatServer(
        lambda number, _: ["My shoes broke.", "[DONE] bye"][number], usage={"completion_tokens": 5}
    )
    replies, score = server.talk(
        "How can I help?",
        "Here is your money.",
        api_key_env="USER_KEY",
        model="m",
        row={"persona": "You are angry."},
    )
    assert [(reply.text, reply.is_done) for reply in replies] == [("My shoes broke.", False), ("", True)]
    assert score is None
    assert [reply.metrics for reply in replies] == [{"user_turns": 1.0, "user_tokens": 5.0}] * 2
    assert server.paths == ["/v1/chat/completions"] * 2
    assert {headers["authorization"] for headers in server.headers} == {"Bearer secret-123"}
    system, *turns = server.requests[1]["messages"]
    assert "You are angry." in system["content"]
    assert "a refund" in system["content"]
    assert "You sell shoes." not in json.dumps(server.requests), (
        "what the assistant is told is not the user's to know"
    )
    assert [(turn["role"], turn["content"]) for turn in turns] == [
        ("user", BEGIN),
        ("assistant", "Hello!"),
        ("user", "How can I help?"),
        ("assistant", "My shoes broke."),
        ("user", "Here is your money."),
    ]


@pytest.mark.parametrize(("last", "score"), [("thanks, SOLVED", 1.0), ("[DONE]", 0.0)])
def test_success_is_scored(last, score) -> None:
    server = ChatServer(lambda *_: last)
    replies, final = server.talk("Here.", success_phrase="SOLVED")
    assert "write SOLVED" in server.requests[0]["messages"][0]["content"]
    assert replies[-1].is_done
    assert final == score


def test_the_budgets_of_turns_and_tokens_end_the_conversation() -> None:
    replies, _ = ChatServer(lambda *_: "more").talk(*"abcdef", max_turns=3)
    assert [reply.is_done for reply in replies] == [False, False, False, True]
    assert replies[-1].metrics == {"user_budget_exhausted": 1.0}
    server = ChatServer(lambda *_: "more", usage={"completion_tokens": 40})
    replies, _ = server.talk(*"abcdef", max_tokens=50, max_total_tokens=100)
    assert [request["max_tokens"] for request in server.requests] == [50, 50, 20]
    assert replies[-1].is_done
    uncounted = ChatServer(lambda *_: "more")
    uncounted.talk(*"abcdef", max_tokens=50, max_total_tokens=100)
    assert len(uncounted.requests) == 2, "a server that does not count is taken at its most expensive"


@pytest.mark.parametrize("status", [429, 500, 503])
def test_an_overloaded_server_is_asked_again(status) -> None:
    server = ChatServer(lambda number, _: status if number < 2 else "hi")
    replies, _ = server.talk("Hello?", num_retries=2)
    assert replies[0].text == "hi"


@pytest.mark.parametrize(
    ("answer", "options", "requests", "problem"),
    [
        (lambda *_: 500, {"num_retries": 1}, 2, "answered 500"),
        (lambda *_: 401, {}, 1, "answered 401"),
        (lambda *_: None, {"num_retries": 1, "timeout_s": 0.1}, 2, "did not answer within 0.1 s"),
    ],
)
def test_a_server_that_fails_is_a_broken_partner(answer, options, requests, problem) -> None:
    server = ChatServer(answer)
    with pytest.RaisesGroup(pytest.RaisesExc(ToolError, match=problem)):
        server.talk("Hello?", **options)
    assert len(server.requests) == requests


def test_a_server_that_is_not_there_is_a_tool_error() -> None:
    trajectory = play(
        ["hi"],
        agent="interaction_agent",
        interaction="simulated_user",
        interaction_kwargs={"goal": "x"},
        interaction_config={"simulated_user": {"url": "http://127.0.0.1:9", "num_retries": 0}},
    )
    assert trajectory.outcome is Outcome.TOOL_ERROR, trajectory.failure


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({}, "url: Field required"),
        ({"url": "localhost:30000"}, "is not a URL"),
        ({"url": "http://x", "api_key_env": "NOT_SET_ANYWHERE"}, "NOT_SET_ANYWHERE"),
        ({"url": "http://x", "tokens": 5}, "tokens: Extra inputs are not permitted; the keys are url, model"),
    ],
)
def test_wrong_configs_of_the_simulated_user(config, problem) -> None:
    with pytest.raises(ConfigError) as caught:
        SimulatedUser(config)
    assert problem in str(caught.value)


def test_an_instruction_that_the_row_cannot_fill_in() -> None:
    user = SimulatedUser({"url": "http://x", "instruction": "{mood} {goal}"})
    with pytest.raises(DataError, match="mood"):
        trio.run(functools.partial(user.start, goal="x"))


# --------------------------------------------------------------------------------------------------- the loop


class Counting(Interaction):
    """Counts what it hears; `plan` chooses how its score comes out."""

    name: ClassVar[str] = "counting"

    async def start(self, *, plan: str = "number") -> None:
        self.plan, self.heard = plan, 0

    async def respond(self, messages: Sequence[Message]) -> InteractionReply:
        self.heard += 1
        return InteractionReply(
            "go on", is_done=False, metrics={"heard": 1.0, "length": float(len(messages))}
        )

    async def score(self) -> float | None:
        if self.plan == "raise":
            raise RuntimeError("no score")
        return {"number": float(self.heard), "none": None, "nan": float("nan")}[self.plan]


def count(turns=("a", "b", "c", "d"), *, plan="number", weight=1.0, **settings):
    return play(
        turns,
        agent="interaction_agent",
        interaction=Counting,
        interaction_kwargs={"plan": plan},
        reward_config={"interaction_reward_weight": weight},
        **{"max_turns": len(turns), **settings},
    )
