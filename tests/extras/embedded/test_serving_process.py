"""The process of the embedded server: its end, its key, and the ways in which its start is refused."""

import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
import torch
import trio
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentrl.config.model import ModelConfig
from agentrl.config.rollout import EmbeddedServerConfig, RolloutConfig
from agentrl.errors import ServerError, UserError
from agentrl.extras.embedded.launch import EmbeddedServer
from agentrl.extras.embedded.server import named_key, serve
from agentrl.http.client import HttpClient
from agentrl.servers.attached import AttachedServer
from agentrl.servers.client import SGLangClient
from agentrl.servers.health import generates
from agentrl.servers.launch import launcher
from agentrl.servers.supervisor import Supervisor
from agentrl.types import SamplingParams
from sglang_cpu.server import sglang_on_cpu

SMALL = EmbeddedServerConfig(num_blocks=8, page_size=16)


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


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


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


def test_the_server_ends_when_its_starter_is_killed(model, tmp_path):
    starter = f"""
import sys, time
from pathlib import Path
from agentrl.config.rollout import EmbeddedServerConfig
from agentrl.extras.embedded.launch import EmbeddedServer
from agentrl.servers.supervisor import Supervisor
s = Supervisor(EmbeddedServer(EmbeddedServerConfig(num_blocks=8, page_size=16), "float32"), log_file=Path({str(tmp_path)!r}) / "s.log",
               start_timeout_s=60, max_restarts=0)
s.start({model!r}, "0")
print(s.status().pid, flush=True)
time.sleep(600)
"""  # noqa: E501
    check_that_it_ends_with(starter)


def test_a_dead_generation_loop_ends_the_process_with_status_1(model):
    """Sampling is made to fail at its second call: the first is the warm-up."""
    broken = f"""
import logging, sys
from agentrl.config.rollout import EmbeddedServerConfig
from agentrl.extras.embedded import engine, server
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
real, calls = engine.sample, []
def sample(*args):
    calls.append(args)
    return real(*args) if len(calls) == 1 else 1 / 0
engine.sample = sample
sys.exit(server.serve({model!r}, port=0, config=EmbeddedServerConfig(num_blocks=8, page_size=16)))
"""
    process = subprocess.Popen([sys.executable, "-c", broken], stderr=subprocess.PIPE, text=True)
    listen(process)
    assert not generates(url_of(process), api_key=None, timeout_s=20)
    rest = process.stderr.read()
    assert process.wait(timeout=30) == 1
    assert "the generation loop died: the server ends" in rest


def test_a_server_with_a_key_answers_only_those_who_have_it_and_ends_by_sigterm(model, monkeypatch):
    monkeypatch.setenv("TEST_SERVER_KEY", "sesame")
    process = start_embedded(model, "--api-key-env", "TEST_SERVER_KEY")
    url = url_of(process)

    async def script():
        async with HttpClient(url) as http:
            without = [(await http.request("GET", path)).status for path in ("/model_info", "/ready")]
        wrong, right = SGLangClient(url, api_key="guess"), SGLangClient(url, api_key="sesame")
        with pytest.raises(ServerError) as refused:
            await wrong.model_info()
        generation = await right.generate([3], SamplingParams(1), rid="a")
        await wrong.aclose()
        await right.aclose()
        return without, refused.value.status, len(generation.token_ids)

    try:
        assert trio.run(script) == ([401, 200], 401, 1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.wait()


KEY = "a-key-that-stands-nowhere-else"


@pytest.mark.parametrize("kind", ["embedded", pytest.param("sglang", marks=pytest.mark.sglang)])
def test_a_supervised_server_asks_for_its_key_and_shows_it_to_nobody(model, tmp_path, kind):
    """Not in a command line or an environment of any of its processes, not in its log, not in a repr.

    Its stop ends it and is not mistaken for a death.
    """
    made = {
        "embedded": lambda: EmbeddedServer(SMALL, "float32", api_key=KEY),
        "sglang": lambda: sglang_on_cpu(key=KEY, skip_tokenizer_init=True),
    }[kind]()
    watched = supervisor(made, tmp_path, timeout_s=300)
    url = watched.start(model, "5")  # which it knows by a token, sampled with the key
    try:
        pid = watched.status().pid
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        shown = [text for process in processes for text in (*process.cmdline(), *process.environ().values())]
        statuses = (
            trio.run(statuses_of, url, None),
            trio.run(statuses_of, url, "guess"),
            trio.run(statuses_of, url, KEY),
        )
    finally:
        watched.stop()
    watched.stop()
    assert is_gone(pid)
    assert watched.status().restarts == 0
    gone = attached(url, start_timeout_s=1.0)
    with pytest.raises(ServerError, match=r"did not generate a token within .*_timeout_s=1: "):
        gone.wait_until_ready()
    gone.stop()
    assert statuses == ([401, 401, 401], [401, 401, 401], [200, 200, 400])
    log = (tmp_path / "servers" / "s.log").read_text()
    assert log, "the server's words are kept"
    assert not [text for text in (*shown, log, repr(made)) if KEY in text]


async def statuses_of(url, key):
    """Return what reading, generating and an update with nothing in it are answered."""
    async with HttpClient(url, headers={"Authorization": f"Bearer {key}"} if key else {}) as http:
        generate = {"input_ids": [3], "sampling_params": {"max_new_tokens": 1}}
        update = {"model_path": "/nowhere"}
        return [
            (await http.request("GET", "/model_info")).status,
            (await http.request("POST", "/generate", json=generate)).status,
            (await http.request("POST", "/update_weights_from_disk", json=update)).status,
        ]


def start_embedded(model, *options):
    sizes = ["--num-blocks", "8", "--page-size", "16", "--weight-version", "0"]
    command = [sys.executable, "-m", "agentrl.extras.embedded", model, "--port", "0", *sizes, *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    return listen(process)


def listen(process):
    """Wait until a server says where it listens."""
    process.lines = []
    for line in process.stderr:
        process.lines.append(line)
        if "listening on" in line:
            break
    return process


def url_of(process):
    url = process.lines[-1].split("listening on ")[1].strip()
    wait_for(lambda: generates_or_refuses(url))
    return url


def generates_or_refuses(url):
    async def ask():
        async with HttpClient(url) as http:
            try:
                return (await http.request("GET", "/ready")).status == 200
            except ServerError:
                return False

    return trio.run(ask)


# --------------------------------------------------------------------------------------------- refused starts


def test_a_taken_port_is_a_clear_error(model):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{port}.*--port"):
            serve(model, port=port)


def test_another_host_needs_a_key(model, monkeypatch):
    with pytest.raises(UserError, match=r"0\.0\.0\.0.*API key"):
        serve(model, host="0.0.0.0", port=0)
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(UserError, match="NO_SUCH_KEY"):
        named_key("NO_SUCH_KEY")


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        serve(str(tmp_path), port=0)


def test_a_broken_model_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no_such_architecture"}')
    process = subprocess.run(
        [sys.executable, "-m", "agentrl.extras.embedded", str(tmp_path), "--port", "0"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 2
    assert process.stderr.startswith("error: the model in ")
    assert "Traceback" not in process.stderr


def test_it_is_the_launcher_of_its_backend():
    made = launcher(RolloutConfig(backend="embedded"), ModelConfig(), api_key=None)
    assert isinstance(made, EmbeddedServer)
