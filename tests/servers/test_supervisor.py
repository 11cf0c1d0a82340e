"""Server processes: start, death and restart, end, and the ways in which a start is refused."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
import torch
import trio
import yaml
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentrl import guard
from agentrl.config.model import ModelConfig
from agentrl.config.rollout import RolloutConfig, SGLangServerConfig
from agentrl.errors import ServerError
from agentrl.servers.attached import AttachedServer
from agentrl.servers.client import SGLangClient
from agentrl.servers.health import ServerWatchdog, generates
from agentrl.servers.launch import SGLangServer, launcher
from agentrl.servers.supervisor import Supervisor
from agentrl.types import SamplingParams
from parts.played_server import PlayedServerLauncher


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1,
        pad_token_id=0,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def running(model, tmp_path_factory):
    """A server for tests that leave it as it was."""
    watched = supervisor(PlayedServerLauncher(), tmp_path_factory.mktemp("running"))
    watched.start(model, "5")
    yield watched
    watched.stop()


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


async def tell(url, verb):
    client = SGLangClient(url)
    await (client.pause("abort") if verb == "pause" else client.resume())
    await client.aclose()


async def ask_until_it_fails(url, harm):
    """Sample over and over, and do `harm` to the server meanwhile; a request fails then, instead of waiting
    for ever.
    """

    async def ask():
        with trio.fail_after(60), contextlib.suppress(ServerError):
            while True:
                await sample(url, 100)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await trio.sleep(0.2)
        harm()


@contextlib.contextmanager
def answering(answers):
    """Yield the URL of an HTTP server that answers each path with a JSON body."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self):
            body = json.dumps(answers[self.path]).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def is_gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def attached(url, *, start_timeout_s=60.0, hang_timeout_s=60.0, max_restarts=3):
    server = AttachedServer(
        url,
        start_timeout_s=start_timeout_s,
        hang_timeout_s=hang_timeout_s,
        max_restarts=max_restarts,
        api_key=None,
    )
    server.start()
    return server


class Script:
    """A launcher of arbitrary Python instead of a server."""

    api_key = None

    def __init__(self, code):
        self._code = code

    def command(self, model_path, *, weight_version, host, port):
        return [sys.executable, "-c", self._code, host, str(port)]

    def environment(self):
        return {}


def supervisor(made, tmp_path, *, max_restarts=3, timeout_s=60.0, hang_timeout_s=None):
    log_file = tmp_path / "servers" / "s.log"
    return Supervisor(
        made,
        log_file=log_file,
        start_timeout_s=timeout_s,
        max_restarts=max_restarts,
        hang_timeout_s=hang_timeout_s,
    )


async def sample(url, num_tokens=2):
    client = SGLangClient(url)
    try:
        return await client.generate([3], SamplingParams(num_tokens), rid="a")
    finally:
        await client.aclose()


def test_a_server_that_hangs_or_dies_is_restarted_until_the_budget_is_spent(model, tmp_path):
    """Both in the middle of a request: a stopped process would keep it for ever, and is killed first."""
    watched = supervisor(PlayedServerLauncher(), tmp_path, max_restarts=1, hang_timeout_s=4.0)
    try:
        url = watched.start(model, "5")
        first = watched.status()
        assert (first.state, first.restarts, first.url) == ("needs_weights", 0, url)
        watched.mark_ready(watched.status().url)
        assert watched.status().state == "ready"
        assert set(trio.run(sample, url).versions) == {5}

        trio.run(ask_until_it_fails, url, partial(os.kill, first.pid, signal.SIGSTOP))
        wait_for(lambda: watched.status().state == "needs_weights" and watched.status().restarts)
        second = watched.status()
        assert (second.restarts, second.url != url, is_gone(first.pid)) == (1, True, True)
        assert set(trio.run(sample, second.url).versions) == {5}
        watched.restart(url)  # of the server that is gone already
        watched.mark_ready(url)
        assert watched.status().state == "needs_weights"
        watched.mark_ready(watched.status().url)
        assert watched.status().state == "ready"

        trio.run(ask_until_it_fails, second.url, partial(os.kill, second.pid, signal.SIGKILL))
        wait_for(lambda: watched.status().state == "failed")
        assert "signal SIGKILL" in watched.status().message
        assert "listening on" in watched.status().message  # the end of its log
        watched.mark_ready(watched.status().url)
        assert watched.status().state == "failed"
    finally:
        watched.stop()


def test_a_paused_server_is_no_hanging_one(running):
    clock = [0.0]
    dog = ServerWatchdog(timeout_s=20.0, api_key=None, clock=lambda: clock[0])
    dog.begin(running.status().url)

    def look():
        clock[0] += 30.0
        return dog.probe()

    assert look() is None  # idle: it samples a token
    trio.run(tell, running.status().url, "pause")
    assert look() is None
    trio.run(tell, running.status().url, "resume")
    os.kill(running.status().pid, signal.SIGSTOP)
    try:
        clock[0] += 10.0
        assert dog.probe() is None, "not before the time is over"
        assert look() == "the server hung: it sent nothing for rollout.server_hang_timeout_s=20"
    finally:
        os.kill(running.status().pid, signal.SIGCONT)


def test_a_load_that_never_changes_is_a_hanging_server(tmp_path):
    """What SGLang shows when its scheduler hangs: HTTP answers, with the last snapshot."""
    answers = {
        "/v1/loads": {
            "loads": [
                {
                    "num_running_reqs": 2,
                    "num_waiting_reqs": 0,
                    "num_used_tokens": 7,
                    "max_total_num_tokens": 99,
                }
            ]
        },
        "/server_info": {},
        "/ready": {},
    }
    with answering(answers) as url:
        dog = ServerWatchdog(timeout_s=20.0, api_key=None, clock=iter((0, 0, 19, 20, 40, 41)).__next__)
        dog.begin(url)
        assert [dog.probe() is None for _ in range(3)] == [
            True,
            True,
            False,
        ]  # the first look has nothing to compare with
        answers["/v1/loads"]["loads"][0]["num_used_tokens"] = 8
        assert dog.probe() is None


def test_an_attached_server_that_stops_is_waited_for_and_needs_weights_again(running):
    url, pid = running.status().url, running.status().pid
    server = attached(url, hang_timeout_s=4.0, max_restarts=2)
    try:
        server.wait_until_ready()
        assert server.status().url == url
        assert (server.status().state, server.status().kind) == ("needs_weights", "sglang")
        server.mark_ready(url)
        assert server.status().state == "ready"
        os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: server.status().state == "starting")
        assert "the server hung" in server.status().message
        os.kill(pid, signal.SIGCONT)
        wait_for(lambda: server.status().state == "needs_weights")
        assert server.status().restarts == 1
        trio.run(tell, url, "pause")  # as a failed publish leaves it
        server.restart(url)
        wait_for(lambda: server.status().restarts == 2 and server.status().state == "needs_weights")
        assert generates(url, api_key=None, timeout_s=10)
        server.restart(url)
        wait_for(lambda: server.status().state == "failed")
    finally:
        os.kill(pid, signal.SIGCONT)
        server.stop()


def test_a_server_that_ends_while_starting_shows_the_end_of_its_log(tmp_path):
    watched = supervisor(Script("print('no such device'); raise SystemExit(3)"), tmp_path)
    with pytest.raises(ServerError, match=r"exit status 3(.|\n)*no such device"):
        watched.start("m", "0")
    assert watched.status().state == "failed"
    watched.stop()


def test_a_refused_argument_is_one_line(tmp_path):
    usage = "usage: launch_server.py [--model-path PATH]\n" * 30
    watched = supervisor(
        Script(
            f"print({usage!r} + 'launch_server.py: error: unrecognized arguments: --tensors 2'); raise "
            "SystemExit(2)"
        ),
        tmp_path,
    )
    with pytest.raises(ServerError) as refused:
        watched.start("m", "0")
    assert str(refused.value) == "the server refused to start: unrecognized arguments: --tensors 2"
    watched.stop()


def test_a_server_that_never_generates_is_ended_with_all_its_children(tmp_path):
    code = "import subprocess, sys, time, signal; signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
    code += (
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); print(p.pid, "
        "flush=True); time.sleep(600)"
    )
    watched = supervisor(Script(code), tmp_path, timeout_s=2)
    with pytest.raises(ServerError, match="server_start_timeout_s=2"):
        watched.start("m", "0")
    child = int((tmp_path / "servers" / "s.log").read_text())
    wait_for(lambda: is_gone(child))
    assert is_gone(watched.status().pid)


def test_a_command_that_does_not_exist_is_one_line(tmp_path):
    class Missing(Script):
        def command(self, *args, **kwargs):
            return ["/nowhere/python"]

    with pytest.raises(ServerError, match="cannot start /nowhere/python"):
        supervisor(Missing(""), tmp_path).start("m", "0")


def check_that_it_ends_with(starter):
    """Run the program `starter`, which says a process id, and kill it; the process ends."""
    process = subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True)
    try:
        pid = int(process.stdout.readline())
        assert not is_gone(pid)
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: is_gone(pid))


def test_the_guard_runs_where_nothing_was_imported_before():
    """Its folder has a module `types`, which must not be taken for that of the standard library."""
    subprocess.run(
        [sys.executable, "-S", "-P", guard.__file__, "--help"], check=True, capture_output=True, timeout=60
    )


def test_the_guard_takes_its_command_down_with_the_starter(tmp_path):
    command = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    starter = f"""
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-m", "agentrl.guard", "--parent-pid", str(os.getpid()), "--", sys.executable, "-c", {command!r}],
                 start_new_session=True)
time.sleep(600)
"""  # noqa: E501
    check_that_it_ends_with(starter)


@pytest.mark.parametrize(
    ("code", "status"), [("raise SystemExit(4)", 4), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_the_guard_reports_how_its_command_ended(code, status):
    guard = [
        sys.executable,
        "-m",
        "agentrl.guard",
        "--parent-pid",
        str(os.getpid()),
        "--",
        sys.executable,
        "-c",
        code,
    ]
    assert subprocess.run(guard, check=False).returncode == status


def test_the_guard_hands_the_key_over_in_a_file_that_is_gone_afterwards():
    code = """
import os, sys
file = sys.argv[2]
mode = oct(os.stat(os.path.dirname(file)).st_mode & 0o77)
print(sys.argv[1], file, mode, len(open(file).read()), end=" ")
print([n for n in os.environ if "ame" in os.environ[n]], repr(sys.stdin.read()), flush=True)
print(open(file).read(), file=sys.stderr)
"""
    guard = [sys.executable, "-m", "agentrl.guard", "--parent-pid", str(os.getpid()), "--api-key-stdin", "--"]
    shown = subprocess.run(
        [*guard, sys.executable, "-c", code], check=True, capture_output=True, text=True, input="ses: #ame\n"
    ).stdout
    option, file, mode, length, with_key, more, content = shown.split(maxsplit=6)
    assert (option, mode, length, with_key, more) == (
        "--config",
        "0o0",
        str(len('api-key: "ses: #ame"\n')),
        "[]",
        "''",
    )
    assert yaml.safe_load(content) == {"api-key": "(the API key)"}, "a server that logs its arguments"
    assert not Path(file).exists()

    refused = subprocess.run(
        [*guard, "server", "--config", "own.yaml"],
        check=False,
        capture_output=True,
        text=True,
        input="sesame\n",
    )
    assert (refused.returncode, refused.stderr.splitlines()[-1]) == (
        2,
        "error: a server takes one --config, and that with its API key is written here; put what yours holds "
        "into rollout.sglang.args",
    )


# ---------------------------------------------------------------------------------------------- command lines


def test_the_launcher_follows_the_backend():
    made = launcher(
        RolloutConfig(
            backend="sglang",
            sglang=SGLangServerConfig(python="/opt/sg/bin/python", args={"tp_size": 2}, env={"A": "1"}),
        ),
        ModelConfig(dtype="bfloat16"),
        api_key=None,
    )
    assert isinstance(made, SGLangServer)
    command = made.command("m", weight_version="3", host="127.0.0.1", port=5)
    assert command[command.index("--") + 1 :] == [
        *(
            "/opt/sg/bin/python",
            "-m",
            "sglang.launch_server",
            "--model-path",
            "m",
            "--host",
            "127.0.0.1",
            "--port",
            "5",
        ),
        *("--dtype", "bfloat16", "--weight-version", "3", "--tp-size", "2"),
    ]
    assert Path(command[0]).name.startswith("python")
    assert made.environment() == {"A": "1", "SGLANG_MM_AVOID_RETOKENIZE": "1"}
    recording = launcher(
        RolloutConfig(backend="sglang", replay_experts=True), ModelConfig(), api_key=None
    ).command("m", weight_version="3", host="127.0.0.1", port=5)
    assert "--enable-return-routed-experts" in recording
    assert "--enable-return-routed-experts" not in command
