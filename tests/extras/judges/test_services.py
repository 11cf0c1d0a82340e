"""Rewards from services over real HTTP: the user's own, and a model as the judge."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import trio
import trio.testing

from agentrl.adapters.catalog import open_plugins
from agentrl.config.agent import AgentConfig
from agentrl.config.reward import RewardConfig
from agentrl.errors import ConfigError, RewardError
from agentrl.extras.judges.llm_judge import MAX_VERDICT_CHARS, JudgeOptions, LLMJudge, stated_score
from agentrl.extras.judges.remote import Remote, RemoteOptions
from agentrl.plugins import Attempted
from agentrl.ports import ReservedPort
from agentrl.rewards.select import RewardTable
from agentrl.types import Message, Outcome, Task, ToolCall
from parts.cpu_time import cpu_s
from parts.json_server import json_server
from parts.trajectories import attempted, make_task


def task(**changes) -> Task:
    return make_task("How many?", "72", **changes)


def attempt(*texts: str, truth="72", **changes) -> Attempted:
    return attempted(task(ground_truth=truth, **changes), *(Message("assistant", text) for text in texts))


class Service:
    """A real HTTP server; `answer(body)` returns (status, JSON) and `requests` keeps what came."""

    def __init__(self, answer) -> None:
        self.requests: list[tuple[str, dict, str | None]] = []
        self.lock = threading.Lock()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with service.lock:
                    service.requests.append((self.path, body, self.headers.get("Authorization")))
                status, reply = answer(body)
                data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@contextmanager
def serving(answer) -> Iterator[Service]:
    service = Service(answer)
    thread = threading.Thread(target=service.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield service
    finally:
        service.server.shutdown()
        thread.join()
        service.server.server_close()


def test_a_remote_service_scores(monkeypatch):
    monkeypatch.setenv("SCORE_KEY", "secret")
    with serving(lambda body: (200, {"score": 0.5, "accuracy": 1, "why": body["solution_str"]})) as service:
        reward = Remote({"url": f"{service.url}/score?v=1", "api_key_env": "SCORE_KEY"})
        result = trio.run(reward.score, attempt("72", extra_info={"index": 3}))
    assert (result.value, dict(result.metrics), dict(result.details)) == (
        0.5,
        {"accuracy": 1.0},
        {"why": "72"},
    )
    ((path, body, authorization),) = service.requests
    assert (path, authorization) == ("/score?v=1", "Bearer secret")
    assert {
        key: body[key] for key in ("data_source", "ground_truth", "extra_info", "outcome", "num_turns")
    } == {
        "data_source": "s",
        "ground_truth": "72",
        "extra_info": {"index": 3},
        "outcome": "completed",
        "num_turns": 1,
    }
    assert body["messages"][-1] == {"role": "assistant", "content": "72", "reasoning": "", "tool_calls": []}


def test_a_remote_service_may_say_that_it_does_not_apply():
    with serving(lambda body: (200, {"score": None})) as service:
        assert trio.run(Remote({"url": service.url}).score, attempt("72")) is None


@pytest.mark.parametrize(
    ("answers", "num_requests", "failure"),
    [
        ([(503, {}), (429, {}), (200, {"score": 1})], 3, None),
        ([(503, {}), (503, {}), (503, b"busy")], 3, r"503.*busy.*tried 3 times"),
        ([(400, b"no such task")], 1, r"400.*no such task"),
        ([(200, b"fine")] * 3, 3, "not JSON"),
        ([(200, {"points": 1})], 1, "must answer with a JSON object that has `score`"),
        ([(200, {"score": "good"})], 1, "finite number"),
    ],
)
def test_a_service_that_fails_is_tried_again_where_that_helps(monkeypatch, answers, num_requests, failure):
    monkeypatch.setattr("agentrl.extras.judges.scoring_service.FIRST_PAUSE_S", 0.001)
    left = iter(answers)
    with serving(lambda body: next(left)) as service:
        reward = Remote({"url": service.url})
        if failure is None:
            assert trio.run(reward.score, attempt("72")).value == 1.0
        else:
            with pytest.raises(RewardError, match=failure):
                trio.run(reward.score, attempt("72"))
    assert len(service.requests) == num_requests


@pytest.mark.parametrize("kind", ["remote", "llm_judge"])
def test_a_service_where_nobody_listens_is_found_before_anything_starts(kind):
    with ReservedPort() as port:
        url = f"http://127.0.0.1:{port.number}/v1"
    options = {"url": url} if kind == "remote" else {"url": url, "model": "judge"}
    terms = {"judge": {"reward": kind, "config": options}}
    table = RewardTable(RewardConfig.model_validate({"terms": terms}), open_plugins(AgentConfig()))
    path = "" if kind == "remote" else "/chat/completions"
    with pytest.raises(ConfigError) as caught:
        table.check_services()
    assert str(caught.value) == (
        f"reward {kind!r}: url {url}{path}: cannot connect to 127.0.0.1:{port.number}: Connection refused; "
        "start the service first"
    )
    with json_server(lambda body: body) as there:
        options["url"] = there
        config = RewardConfig.model_validate({"terms": terms})
        RewardTable(config, open_plugins(AgentConfig())).check_services()


def test_nobody_listens(monkeypatch):
    monkeypatch.setattr("agentrl.extras.judges.scoring_service.FIRST_PAUSE_S", 0.001)
    with serving(lambda body: (200, {})) as service:
        pass
    with pytest.raises(RewardError, match="cannot connect"):
        trio.run(Remote({"url": service.url}).score, attempt("72"))


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"url": "localhost:8000"},
        {"url": "http://x", "api_key_env": "NOT_SET_ANYWHERE"},
        {"url": "http://x", "u": 1},
    ],
)
def test_services_refuse_a_wrong_config(config):
    with pytest.raises(ConfigError, match="reward 'remote'"):
        Remote(config)


def says(text: str) -> tuple[int, dict]:
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}}]}


def test_the_judge_is_asked_once_for_the_same_attempt():
    """Also while its first answer is under way."""
    with serving(lambda body: says("Fine.\nScore: 3\nOn reflection:\n**Score:** 7.5")) as service:
        judge = LLMJudge(
            {"url": f"{service.url}/v1", "model": "judge", "system": "Be strict.", "extra_body": {"seed": 1}}
        )
        results: list = []

        async def main():
            async def one(text: str) -> None:
                results.append(await judge.score(attempt(text)))

            async with trio.open_nursery() as nursery:
                for text in ("72", "72", "72", "71"):
                    nursery.start_soon(one, text)
            await one("72")

        trio.run(main)
    assert len(service.requests) == 2
    assert {(r.value, r.metrics["score"]) for r in results} == {(0.75, 7.5)}
    assert "On reflection" in results[0].details["verdict"]
    path, body, _ = service.requests[0]
    assert (path, body["model"], body["seed"], body["temperature"]) == (
        "/v1/chat/completions",
        "judge",
        1,
        0.0,
    )
    assert body["messages"][0] == {"role": "system", "content": "Be strict."}
    for part in ("How many?", "72", "from 0 for useless to 10"):
        assert part in body["messages"][1]["content"]


def test_a_judge_without_a_score_is_an_error_not_a_zero():
    left = iter([says("I cannot say."), says("Score: 11"), says("Score: -1")])
    with serving(lambda body: next(left)) as service:
        judge = LLMJudge({"url": service.url, "model": "judge"})
        with pytest.raises(RewardError, match=r"no score from 0 to 10.*Score: -1"):
            trio.run(judge.score, attempt("72"))
    assert len(service.requests) == 3
    with (
        serving(lambda body: (200, {"error": "no"})) as service,
        pytest.raises(RewardError, match="not a chat completion"),
    ):
        trio.run(LLMJudge({"url": service.url, "model": "judge"}).score, attempt("72"))


def test_the_judges_memory_is_bounded():
    with serving(lambda body: says("Score: 1")) as service:
        judge = LLMJudge({"url": service.url, "model": "judge", "cache_size": 1, "max_score": 1})

        async def main():
            return [(await judge.score(attempt(text))).value for text in ("a", "a", "b", "b", "a")]

        assert trio.run(main) == [1.0] * 5
    assert len(service.requests) == 3


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"prompt": "$answr"}, r"unknown placeholder \$answr"),
        ({"pattern": "score"}, "no group"),
        ({"pattern": "("}, "not a regular expression"),
        ({"min_score": 5, "max_score": 1}, "not below"),
        ({"min_score": 5, "max_score": 5}, "not below"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"cache_size": -1}, "cache_size"),
        ({"modle": "x"}, "modle"),
    ],
)
def test_the_judge_refuses_a_wrong_config(config, told):
    with pytest.raises(ConfigError, match=told):
        LLMJudge({"url": "http://x", "model": "judge", **config})


@pytest.mark.parametrize(
    ("status", "is_tried_again"),
    [
        *((status, True) for status in (408, 409, 425, 429, 500, 502, 599)),
        *((status, False) for status in (201, 204, 301, 400, 404, 407, 410, 424, 426, 428, 430, 499)),
    ],
)
def test_a_refusal_is_final_and_a_fault_is_not(monkeypatch, status, is_tried_again):
    monkeypatch.setattr("agentrl.extras.judges.scoring_service.FIRST_PAUSE_S", 0.0)
    left = iter([(status, {"score": 0}), (200, {"score": 1})])
    with serving(lambda body: next(left)) as service:
        reward = Remote({"url": service.url})
        if is_tried_again:
            assert trio.run(reward.score, attempt("72")).value == 1.0
        else:
            with pytest.raises(RewardError, match=str(status)):
                trio.run(reward.score, attempt("72"))
    assert len(service.requests) == 1 + is_tried_again


@pytest.mark.parametrize("max_retries", [0, 1, 2, 3])
def test_each_pause_is_twice_as_long_as_the_one_before(max_retries):
    async def paused() -> float:
        start = trio.current_time()
        with pytest.raises(RewardError, match=rf"tried {max_retries + 1} times"):
            await Remote({"url": service.url, "max_retries": max_retries}).score(attempt("72"))
        return trio.current_time() - start

    with serving(lambda body: (503, {})) as service:
        # This clock jumps over a pause, and stands still while the service is asked.
        pause_s = trio.run(paused, clock=trio.testing.MockClock(autojump_threshold=0.02))
    assert len(service.requests) == max_retries + 1
    assert pause_s == pytest.approx(0.25 * (2**max_retries - 1))


@pytest.mark.parametrize(
    ("at", "path"), [("", "/"), ("/", "/"), ("/v1/score", "/v1/score"), ("?a=1&b", "/?a=1&b")]
)
def test_the_url_is_asked_as_it_is_written(at, path):
    with serving(lambda body: (200, {"score": 1})) as service:
        assert trio.run(Remote({"url": service.url + at}).score, attempt("72")).value == 1.0
    assert service.requests[0][::2] == (path, None)


@pytest.mark.parametrize("url", ["ftp://x", "x", "http://", "http:///score", "https://:80"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ConfigError, match=r"is not the URL of a service; write it like http://127"):
        Remote({"url": url})


@pytest.mark.parametrize("kind", [Remote, LLMJudge])
def test_as_many_requests_at_once_as_are_allowed(kind):
    options = {"url": "http://x"} if kind is Remote else {"url": "http://x", "model": "judge"}
    assert kind(options).max_concurrent > 1
    assert kind({**options, "max_concurrent": 1, "max_retries": 0}).max_concurrent == 1
    for wrong in ({"max_concurrent": 0}, {"max_retries": -1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            kind({**options, **wrong})


@pytest.mark.parametrize(("name", "kind"), [("remote", RemoteOptions), ("llm_judge", JudgeOptions)])
def test_the_defaults_are_those_of_the_docs(name, kind):
    page = (Path(__file__).parents[3] / "docs/rewards.md").read_text()
    (row,) = re.findall(rf"^\| `{name}` \|.*$", page, re.MULTILINE)
    told = dict(re.findall(r"`(\w+)` \((\d+)\)", row))
    numbers = {key: field.default for key, field in kind.model_fields.items()}
    assert {key: float(number) for key, number in told.items()} == {
        key: number for key, number in numbers.items() if isinstance(number, int | float)
    }


@pytest.mark.parametrize("reply", [[], ["score"], "score", 1, None])
def test_a_reply_is_an_object(reply):
    with (
        serving(lambda body: (200, reply)) as service,
        pytest.raises(RewardError, match="must answer with a JSON object"),
    ):
        trio.run(Remote({"url": service.url}).score, attempt("72"))


CALL = ToolCall("1", "add", {"x": 1})
TALK = (
    Message("system", "Be brief."),
    Message("user", "How many?"),
    Message("assistant", "Let me see.", (CALL,), reasoning="hm"),
    Message("tool", "72"),
    Message("assistant", "It is 72."),
)


def talked() -> Attempted:
    row = make_task("", "72", task_id="t:7", messages=TALK[:2], extra_info={"index": 3})
    return Attempted(row, TALK, Outcome.COMPLETED, 2, 31, 17, 100)


def test_a_service_is_told_of_the_whole_attempt():
    with serving(lambda body: (200, {"score": 1})) as service:
        trio.run(Remote({"url": service.url}).score, talked())
    ((_, body, _),) = service.requests
    done = talked()
    assert body == {
        "data_source": "s",
        "solution_str": done.response_text,
        "ground_truth": "72",
        "extra_info": {"index": 3},
        "task_id": "t:7",
        "outcome": "completed",
        "num_turns": 2,
        "num_response_tokens": done.num_response_tokens,
        "messages": [
            {
                "role": message.role,
                "content": message.content,
                "reasoning": message.reasoning,
                "tool_calls": [{"name": "add", "arguments": {"x": 1}}] if message.tool_calls else [],
            }
            for message in TALK
        ],
    }


def test_a_service_is_told_the_facts_of_the_environment():
    done = dataclasses.replace(talked(), facts={"orders": {"tea": 2}})
    with serving(lambda body: (200, {"score": 1})) as service:
        trio.run(Remote({"url": service.url}).score, done)
    ((_, body, _),) = service.requests
    assert body["extra_info"] == {"index": 3, "environment_facts": {"orders": {"tea": 2}}}


# ------------------------------------------------------------------------------------------------- the judge


def judged(*replies: str, done: Attempted | None = None, **options):
    """The judge's results of as many attempts as there are replies, and its last request."""
    left = iter(replies)
    with serving(lambda body: says(next(left))) as service:
        judge = LLMJudge({"url": service.url + "/v1/", "model": "judge", **options})
        results = [trio.run(judge.score, done or attempt(str(i))) for i in range(len(replies))]
    return results, service.requests[-1]


@pytest.mark.parametrize(
    ("reply", "options", "value"),
    [
        ("Score: 10", {}, 1.0),
        ("Score: 0", {}, 0.0),
        ("Score: 2\nScore: 3\nScore: 4", {}, 0.4),
        ("so\n**Score**: 5 of 10", {}, 0.5),
        ("Score: 3", {"min_score": 1, "max_score": 5}, 0.5),
        ("Score: 1", {"min_score": 1, "max_score": 5}, 0.0),
        ("Score: -2.5", {"min_score": -5, "max_score": 5}, 0.25),
        ("2/4, 4/4 or 3/4", {"pattern": r"(\d)/(\d)"}, 0.3),
        ("<5>", {"pattern": r"<(\d)>"}, 0.5),
    ],
)
def test_verdicts_by_hand(reply, options, value):
    (result,), _ = judged(reply, **options)
    assert result.value == pytest.approx(value)
    assert result.details == {"verdict": reply}
    low, high = options.get("min_score", 0), options.get("max_score", 10)
    assert result.metrics == {"score": pytest.approx(low + value * (high - low))}


@pytest.mark.parametrize(
    ("line", "score"),
    [
        *[
            (f"Score: {text}", 7.0)
            for text in ("7", "7/10", "[7]", "<7>", "$\\boxed{7}$", "**7**", "7.", "７")
        ],
        ("Score: .5", 0.5),
        ("Score: 1e-1", 0.1),
        ("Score: -3", -3.0),
        ("Score (0-10): 7", 7.0),
        ("Score [0-10]: 7", 7.0),
        ("Score (out of 10): 7", 7.0),
        ("Final Score: 6", 6.0),
        ("### Score: 6", 6.0),
        ("Score = 6", 6.0),
        ("Score - 6", 6.0),
        ("1. Score: 7", 7.0),
        ("- Score: 7", 7.0),
        ("评分 Score：7", 7.0),
        ("Score:\n7", 7.0),
        ("**Score**: 8.5", 8.5),
        ("Score: 9\nScore breakdown: accuracy 3", 9.0),
        ("Score: 9\n\nScores for parts: 3, 2", 9.0),
        ("I think Score: 4 is too low.\nScore: 9", 9.0),
        *[(f"Score: {text}", None) for text in ("0-10", "0-10 scale: 7", "0 to 10: 7", "7,5", "7 8", "six")],
        ("Score: 4/5", None),
        ("Score (0-5): 4", None),
        ("Score: 7\nFinal score: 7,5", None),
        ("", None),
    ],
)
def test_a_line_states_one_score_or_is_unread(line, score):
    assert stated_score(line, max_score=10) == score


@pytest.mark.parametrize("unit", ["*", "Score: ", "Score:\n", "a score ", "1. ", "Score (", "7" * 9 + " "])
def test_a_verdict_of_marks_takes_linear_time(unit):
    text = unit * (200_000 // len(unit))
    assert cpu_s(lambda: stated_score(text, max_score=10), below=2.0) < 2.0


@pytest.mark.parametrize("pattern", ["(good)", "good( \\d)?", "(bad)"])
def test_a_pattern_may_find_no_number(pattern):
    with pytest.raises(RewardError, match="gave no score from 0 to 10: 'good'"):
        judged("good", pattern=pattern, max_retries=0)


def test_a_long_verdict_is_cut():
    (result,), _ = judged("x" * 10_000 + "\nScore: 1")
    assert result.value == 0.1
    assert result.details == {"verdict": "x" * MAX_VERDICT_CHARS}


@pytest.mark.parametrize(
    "message", [None, {}, {"content": None}, {"content": ["Score: 1"]}, {"content": 1}], ids=repr
)
def test_a_judge_that_says_nothing_gives_no_score(message):
    replies = {"choices": [{"message": message}, {"message": {"content": "Score: 1"}}]}
    with (
        serving(lambda body: (200, replies)) as service,
        pytest.raises(RewardError, match=r"no score|not a chat completion"),
    ):
        trio.run(LLMJudge({"url": service.url, "model": "judge"}).score, attempt("72"))
    is_asked_again = message is not None and "content" in message
    assert len(service.requests) == (3 if is_asked_again else 1)


def test_the_judge_is_asked_as_often_as_it_may():
    for max_retries in (0, 1):
        with serving(lambda body: says("?")) as service:
            options = {"url": service.url, "model": "judge", "max_retries": max_retries}
            with pytest.raises(RewardError, match="no score"):
                trio.run(LLMJudge(options).score, attempt("72"))
        assert len(service.requests) == max_retries + 1


def test_what_the_judge_is_shown():
    names = ("question", "answer", "response", "ground_truth", "conversation", "min_score", "max_score")
    prompt = "".join(f"{name}=${{{name}}}|" for name in names)
    _, (_, body, _) = judged("Score: 1", done=talked(), prompt=prompt, max_tokens=1, temperature=0.5)
    done = talked()
    conversation = (
        "[system]\nBe brief.\n\n[user]\nHow many?\n\n"
        '[assistant]\nLet me see.\n[calls add({"x": 1})]\n\n[tool]\n72\n\n[assistant]\nIt is 72.'
    )
    told = ("How many?", "It is 72.", done.response_text, "72", conversation, "0", "10")
    shown = "".join(f"{name}={text}|" for name, text in zip(names, told, strict=True))
    assert body == {
        "model": "judge",
        "messages": [{"role": "user", "content": shown}],
        "temperature": 0.5,
        "max_tokens": 1,
    }


def test_the_question_is_the_users_last():
    row = make_task("", None, messages=(Message("user", "a"), Message("user", "b"), Message("system", "c")))
    _, (_, body, _) = judged("Score: 1", done=attempted(row, Message("assistant", "d")), prompt="$question")
    assert body["messages"][-1]["content"] == "b"


def test_the_verdict_used_last_is_kept_longest():
    with serving(lambda body: says("Score: 1")) as service:
        judge = LLMJudge({"url": service.url, "model": "judge", "cache_size": 2})

        async def main(texts: str) -> list[int]:
            counts = []
            for text in texts:
                await judge.score(attempt(text))
                counts.append(len(service.requests))
            return counts

        assert trio.run(main, "abacab") == [1, 2, 2, 3, 3, 4]
        forgetful = LLMJudge({"url": service.url, "model": "judge", "cache_size": 0})
        for _ in range(2):
            trio.run(forgetful.score, attempt("a"))
    assert len(service.requests) == 6


def test_a_judge_that_failed_is_asked_again_by_those_who_waited():
    left = iter([(400, {}), says("Score: 5")])
    with serving(lambda body: next(left)) as service:
        judge = LLMJudge({"url": service.url, "model": "judge"})
        results: list[float] = []

        async def main() -> None:
            async def one() -> None:
                try:
                    results.append((await judge.score(attempt("72"))).value)
                except RewardError:
                    results.append(-1.0)

            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(one)

        trio.run(main)
    assert sorted(results) == [-1.0, 0.5, 0.5]
    assert len(service.requests) == 2
