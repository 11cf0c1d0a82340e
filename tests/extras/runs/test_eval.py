"""`agentrl eval` and `agentrl generate` as they are used: servers of every kind, a kill in the middle, and
nothing played twice.
"""

from __future__ import annotations

import contextlib
import json
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import trio
from typer.testing import CliRunner

from agentrl.chat.parsing import call_id
from agentrl.cli.app import app
from agentrl.data.trajectories import decode, read_parquet
from agentrl.evaluation.results import PRODUCERS
from agentrl.extras.gateway.chat_completions import read_request, write_models, write_reply
from agentrl.extras.gateway.http_server import HttpRequest, HttpResponse, serve_http
from agentrl.extras.gateway.turns import TurnReply
from agentrl.extras.research.generate import ATTEMPTS_SUFFIX
from agentrl.extras.storage.fetched import fetched_file, fetched_folder
from agentrl.extras.storage.sent import send_folder
from agentrl.extras.storage.storage import StoragePath
from agentrl.types import Message, ToolCall
from parts.collector import Collector
from parts.learner import reserved_port
from parts.span_trees import check_tree
from parts.stored_attempts import stored_keys

NUM_ROWS = 9


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.output


def results_of(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def server(world) -> Iterator[str]:
    """The URL of `agentrl serve`, as a user starts it: with weights that nobody published."""
    port = reserved_port()
    command = world.start("serve", str(world.folder / "model"), "--port", str(port))
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/ready", timeout=2) as reply:
            return reply.status == 200
        return False

    command.wait_until(answers, timeout_s=240)
    yield url
    command.interrupt()
    command.wait(60)


def test_an_evaluation_at_a_url_and_its_results(world, server, tmp_path) -> None:
    out = tmp_path / "out"
    options = ("--on", world.folder / "data/val.parquet", "--n", 2, "--temperature", 1.0, "--out", out)
    said = run("eval", world.config, "--model", server, *options, "--fail-below", "arithmetic=0")
    assert "18 attempts, 2 per problem" in said
    assert "mean@2" in said
    batch = read_parquet(out / "attempts.parquet")
    [producer] = json.loads(batch.schema.metadata[PRODUCERS]).values()
    assert producer["sampling"]["temperature"] == 1.0
    attempts = decode(batch)
    assert [(attempt.group_id, attempt.member) for attempt in attempts] == [
        (row, member) for row in range(NUM_ROWS) for member in (0, 1)
    ]
    assert len({attempt.task_id for attempt in attempts}) == NUM_ROWS
    assert {attempt.agent_name for attempt in attempts} == {
        "single_turn_agent",
        "tool_agent",
        "interaction_agent",
    }
    assert all(attempt.num_action_tokens and "accuracy" in attempt.metrics for attempt in attempts)
    results = results_of(out)
    assert results["run"]["sampling"]["temperature"] == 1.0
    assert results["summary"]["overall"]["num_attempts"] == 2 * NUM_ROWS
    assert results["contamination"]["num_rows"] == 240, "the config's training file was looked through"
    assert "18 of them already finished" in run("eval", world.config, "--model", server, *options)
    assert len(stored_keys(out / "attempts.sqlite")) == 2 * NUM_ROWS, "a second time nothing is played"
    run("eval", world.config, "--model", server, *options[:2], "--n", 3, *options[4:])
    assert len(stored_keys(out / "attempts.sqlite")) == 3 * NUM_ROWS, (
        "and a third attempt adds one per problem"
    )


def test_the_attempts_of_an_evaluation_are_traced(world, server, tmp_path) -> None:
    """The collector of the second one is not there: that is said once, and nothing is lost but spans."""
    options = ("--on", world.folder / "data/val.parquet", "--rows", 3, "--out")
    with Collector() as collector:
        endpoint = f"tracking.spans.endpoint={collector.url}"
        run("eval", world.config, endpoint, "--model", server, *options, tmp_path / "traced")
    roots = [check_tree(spans) for spans in collector.traces.values()]
    assert len(roots) == 3
    assert {root.attributes["agentrl.kind"] for root in roots} == {"evaluation"}
    assert {"generate", "request", "reward"} <= {span.name for span in collector.spans}
    endpoint = f"tracking.spans.endpoint=http://127.0.0.1:{reserved_port()}"
    said = run("eval", world.config, endpoint, "--model", server, *options, tmp_path / "alone")
    assert said.count("did not reach http://127.0.0.1") == 1
    assert len(decode(read_parquet(tmp_path / "alone" / "attempts.parquet"))) == 3


def test_another_prompt_is_another_attempt(world, server, tmp_path) -> None:
    base = (
        "eval",
        world.config,
        "--model",
        server,
        "--on",
        world.folder / "data/val.parquet",
        "--rows",
        2,
        "--out",
        tmp_path,
    )
    run(*base)
    run(*base, "--template", "question@1")
    assert len(stored_keys(tmp_path / "attempts.sqlite")) == 4
    assert results_of(tmp_path)["run"]["data_sets"] == [
        {"name": "val", "num_problems": 2, "template": "question@1"}
    ]


def check_that_a_killed_one_goes_on(world, out, *options) -> None:
    """Kill -9 an evaluation of 12 attempts per row in its middle, run it again, and look at what was kept and
    played.
    """
    n = 12
    arguments = (
        "eval",
        world.config,
        "--on",
        world.folder / "data/val.parquet",
        "--n",
        n,
        "--out",
        out,
        "--temperature",
        1.0,
        *options,
    )
    arguments = tuple(map(str, (*arguments, "rollout.max_concurrent_trajectories=8")))
    first = world.start(*arguments)
    first.wait_until(lambda: len(stored_keys(out / "attempts.sqlite")) >= 10)
    first.process.kill()
    first.process.wait(30)
    kept = stored_keys(out / "attempts.sqlite")
    assert 10 <= len(kept) < n * NUM_ROWS
    assert not (out / "results.json").exists()
    said = run(*arguments)
    assert f"{len(kept)} of them already finished" in said
    keys = stored_keys(out / "attempts.sqlite")
    assert keys[: len(kept)] == kept
    assert len(keys) == len(set(keys)) == n * NUM_ROWS
    assert results_of(out)["summary"]["overall"]["num_scored"] == n * NUM_ROWS


def test_kill_9_in_the_middle_and_on_without_repeating(world, server, tmp_path) -> None:
    check_that_a_killed_one_goes_on(world, tmp_path / "out", "--model", server)


def test_a_folder_in_storage_is_served_for_the_evaluation(world, s3) -> None:
    """Model, rows and results are in object storage: what it writes there is a whole evaluation."""
    send_folder(world.folder / "model", StoragePath.of(f"{s3.url}/model"))
    StoragePath.of(f"{s3.url}/val.parquet").upload(world.folder / "data/val.parquet")
    said = run(
        "eval", "--model", f"{s3.url}/model", "--on", f"{s3.url}/val.parquet", "--rows", 3,
        "--out", f"{s3.url}/out",
        "--max-tokens", 32, "--max-turn-tokens", 8, "--agent", "tool_agent", "--tools", "calculator",
        "rollout.embedded.num_blocks=64",
    )  # fmt: skip
    assert "starting 1 embedded server" in said
    out = fetched_folder(f"{s3.url}/out")
    assert results_of(out)["summary"]["overall"]["num_attempts"] == 3
    assert len(stored_keys(out / "attempts.sqlite")) == 3
    attempts = decode(read_parquet(out / "attempts.parquet"))
    assert {attempt.agent_name for attempt in attempts} == {"tool_agent"}
    assert all(attempt.num_action_tokens <= 32 for attempt in attempts)
    assert all(np.bincount(attempt.turn_ids[attempt.action_mask]).max() <= 8 for attempt in attempts)


def test_a_reward_of_batches_sees_the_whole_evaluation(world, server, tmp_path) -> None:
    (tmp_path / "ranks.py").write_text(
        "def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n"
        "    order = sorted(range(len(solution_strs)), key=lambda i: (len(solution_strs[i]), i))\n"
        "    return [order.index(i) / len(order) for i in range(len(order))]\n"
    )
    custom = (f"reward.custom_function.path={tmp_path / 'ranks.py'}", "reward.custom_function.scope=batch")
    options = (
        "--model",
        server,
        "--on",
        world.folder / "data/val.parquet",
        "--n",
        2,
        "--temperature",
        1.0,
        "--out",
        tmp_path / "out",
    )
    run("eval", world.config, *custom, *options)
    attempts = decode(read_parquet(tmp_path / "out/attempts.parquet"))
    assert sorted(attempt.reward for attempt in attempts) == pytest.approx([rank / 18 for rank in range(18)])
    assert results_of(tmp_path / "out")["summary"]["overall"]["num_scored"] == 18


def test_rows_in_object_storage_get_responses_there(world, server, s3) -> None:
    source, url = world.folder / "data/val.parquet", f"{s3.url}/answered/responses.parquet"
    StoragePath.of(f"{s3.url}/rows.parquet").upload(source)
    options = ("generate", world.config, "--model", server, "--in", f"{s3.url}/rows.parquet", "--out", url)
    assert f"wrote {url}" in run(*options)
    written = pq.read_table(fetched_file(url))
    assert written.drop_columns(["responses"]).equals(pq.read_table(source))
    assert [len(row) for row in written["responses"].to_pylist()] == [1] * NUM_ROWS
    assert StoragePath.of(s3.url).files().keys() == {"rows.parquet", "answered/responses.parquet"}


def test_rows_and_their_responses(world, server, tmp_path) -> None:
    source, out = world.folder / "data/val.parquet", tmp_path / "responses.parquet"
    options = (
        "generate",
        world.config,
        "--model",
        server,
        "--in",
        source,
        "--out",
        out,
        "--n",
        3,
        "--temperature",
        1.0,
    )
    run(*options)
    rows, written = pq.read_table(source), pq.read_table(out)
    assert written.drop_columns(["responses"]).equals(rows)
    responses = written["responses"].to_pylist()
    assert [len(row) for row in responses] == [3] * NUM_ROWS
    assert len({text for row in responses for text in row}) > NUM_ROWS
    run(*options)
    assert len(stored_keys(tmp_path / f"{out.name}{ATTEMPTS_SUFFIX}" / "attempts.sqlite")) == 3 * NUM_ROWS
    assert pq.read_table(out)["responses"].to_pylist() == responses, "what is kept is not generated again"
    result = CliRunner().invoke(app, ["score", str(out), "--out", str(tmp_path / "scored.parquet")])
    assert result.exit_code == 0, result.output
    assert [len(row) for row in pq.read_table(tmp_path / "scored.parquet")["scores"].to_pylist()] == [
        3
    ] * NUM_ROWS


SLEEPER = """
import asyncio
from pathlib import Path

from agentrl.plugins import AgentLoop, Tool, ToolResult
from agentrl.types import ToolCall
from parts.learner import reserved_port


class Sleeper(Tool):
    name = "sleeper"
    description = "answers once somebody asks what it waits for"
    parameters = {{"type": "object", "properties": {{}}}}

    async def call(self, arguments):
        while not Path("{report}").exists():
            await asyncio.sleep(0.05)
        return ToolResult("awake")


class SleepyAgent(AgentLoop):
    name = "sleepy_agent"

    async def run(self, task, session):
        await session.run_tools([ToolCall("c0", "sleeper", {{}})])
        await session.generate()
"""


def test_an_evaluation_that_stands_still_says_what_it_waits_for(world, server, tmp_path) -> None:
    """The tool ends only after the report, so the evaluation would not end without it."""
    out = tmp_path / "out"
    report = out / "watchdog/001.txt"
    (tmp_path / "sleepy.py").write_text(SLEEPER.format(report=report))
    said = run(
        "eval", "--model", server, "--on", world.folder / "data/val.parquet", "--rows", 2, "--out", out,
        "--agent", "sleepy_agent",
        f"agent.plugins=[{tmp_path}/sleepy.py]", "--tools", "sleeper", "agent.tool_timeout_s=400",
        "eval.watchdog_s=0.5",
    )  # fmt: skip
    assert "(eval.watchdog_s=0.5): no try of an attempt that ended" in said
    assert f"full report: {report}" in said
    text = report.read_text()
    assert f"{server} ready, 0 restarts: 0 turns requested; 0 running, 0 waiting, " in text
    assert "problem 1 member 0 (sleepy_agent), " in text
    assert "tool sleeper, " in text
    assert "task GroupPlayer._play_member" in text, "the file has trio's own tree"
    assert "task GroupPlayer._play_member" not in said
    assert results_of(out)["summary"]["overall"]["num_scored"] == 2


def test_what_is_wrong_is_said_before_anything_is_played(world, server, tmp_path) -> None:
    base = ["eval", str(world.config), "--model", server, "--out", str(tmp_path)]
    for options, problem in {
        ("--on", "gsm9k"): "is not a dataset",
        ("--on", str(world.folder / "data/val.parquet"), "--template", "absent"): "does not exist",
        ("--on", str(world.folder / "data/val.parquet"), "--fail-below", "gsm8k=0.5"): "no such source",
        (): "choose what to evaluate on",
    }.items():
        result = CliRunner().invoke(app, [*base, *options])
        assert problem in str(result.exception), result.output
    assert not stored_keys(tmp_path / "attempts.sqlite")


# ----------------------------------------------------------------------------------- an OpenAI-compatible URL


@dataclass
class OpenAIServer:
    """Calls the calculator with what the question asks for, and then says a number; its first requests are
    too many.
    """

    port: int = 0
    num_overloads: int = 3
    seconds_per_answer: float = 0.0
    answers_after: Path | None = None
    requests: list = field(default_factory=list)
    statuses: Counter = field(default_factory=Counter)

    async def answer(self, request: HttpRequest) -> HttpResponse:
        if request.path.endswith("/models"):
            return HttpResponse(200, write_models("stand-in"))
        if request.headers.get("authorization") != "Bearer s3cret":
            return HttpResponse(401, b"{}")
        if self.num_overloads:
            self.num_overloads -= 1
            self.statuses[429] += 1
            return HttpResponse(429, b'{"error": {"message": "slow down"}}')
        asked = read_request(request.body)
        self.requests.append((asked, json.loads(request.body)))
        self.statuses[200] += 1
        await trio.sleep(self.seconds_per_answer)
        while self.answers_after is not None and not self.answers_after.exists():
            await trio.sleep(0.05)
        if asked.tools and asked.messages[-1].role != "tool":
            call = ToolCall(call_id(0, 0), "calculator", {"expression": "40 + 2"})
            reply = TurnReply(Message("assistant", "", tool_calls=(call,)), "tool_calls", 50, 7)
        else:
            reply = TurnReply(Message("assistant", "#### 42"), "stop", 70, 5)
        return HttpResponse(200, write_reply(reply, model="stand-in"))


@pytest.fixture
def openai(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenAIServer]:
    monkeypatch.setenv("STAND_IN_KEY", "s3cret")
    server, started = OpenAIServer(), threading.Event()
    stop: list = []

    async def main() -> None:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        server.port = listeners[0].socket.getsockname()[1]
        with trio.CancelScope() as scope:
            token = trio.lowlevel.current_trio_token()
            stop.append(lambda: token.run_sync_soon(scope.cancel))
            started.set()
            await serve_http(server.answer, listeners, max_body_bytes=2**20)

    thread = threading.Thread(target=trio.run, args=(main,))
    thread.start()
    assert started.wait(30)
    yield server
    stop[0]()
    thread.join(30)


def test_messages_in_place_of_tokens(world, openai, tmp_path) -> None:
    url = f"http://127.0.0.1:{openai.port}/v1"
    options = (
        "--on",
        world.folder / "data/val.parquet",
        "--out",
        tmp_path,
        "--n",
        2,
        "--temperature",
        0.7,
        "--top-k",
        20,
    )
    run(
        "eval",
        world.config,
        "--model",
        url,
        *options,
        "--agent",
        "tool_agent",
        "rollout.api_key_env=STAND_IN_KEY",
        "eval.stop=[END]",
    )
    attempts = decode(read_parquet(tmp_path / "attempts.parquet"))
    assert not {attempt.failure for attempt in attempts} - {None}
    played = [attempt for attempt in attempts if attempt.metrics["num_tool_calls"]]
    assert played
    for attempt in played:
        assert [message.role for message in attempt.messages[-3:]] == ["assistant", "tool", "assistant"]
        assert attempt.messages[-2].content == "42"
        assert attempt.num_action_tokens == 7 + 5
        assert attempt.num_tokens == 70 + 5, "as many as the server counted"
        assert (attempt.token_ids == -1).all()
        assert np.isnan(attempt.behavior_logprobs[attempt.action_mask]).all()
        assert (attempt.versions == -1).all(), "nothing is claimed that is not known"
    truths = pq.read_table(world.folder / "data/val.parquet")["reward_model"].to_pylist()
    rights = {row: float(truth["ground_truth"] == "42") for row, truth in enumerate(truths)}
    assert {attempt.group_id: attempt.metrics["accuracy"] for attempt in attempts} == rights
    _, body = openai.requests[0]
    assert (body["temperature"], body["top_k"], body["stop"], body["model"]) == (0.7, 20, ["END"], "stand-in")
    assert body["max_tokens"] == 16, "agent.max_turn_tokens"
    assert openai.statuses[429] == 3, "asked again until there was room"
    assert "s3cret" not in "".join(
        path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()
    )


def test_kill_9_at_an_openai_compatible_url(world, openai, tmp_path) -> None:
    openai.seconds_per_answer = 0.05
    url = f"http://127.0.0.1:{openai.port}/v1"
    check_that_a_killed_one_goes_on(
        world, tmp_path / "out", "--model", url, "--agent", "tool_agent", "rollout.api_key_env=STAND_IN_KEY"
    )


def test_an_openai_compatible_url_that_does_not_answer_is_named(world, openai, tmp_path) -> None:
    openai.num_overloads, openai.answers_after = 0, tmp_path / "watchdog/001.txt"
    url = f"http://127.0.0.1:{openai.port}/v1"
    options = (
        "--on",
        world.folder / "data/val.parquet",
        "--rows",
        2,
        "--out",
        tmp_path,
        "--agent",
        "single_turn_agent",
    )
    run(
        "eval",
        world.config,
        "--model",
        url,
        *options,
        "rollout.api_key_env=STAND_IN_KEY",
        "eval.watchdog_s=0.5",
    )
    text = openai.answers_after.read_text()
    assert f"{url} ready, 0 restarts: 2 turns requested\n" in text
    assert f"generate at {url}, " in text
