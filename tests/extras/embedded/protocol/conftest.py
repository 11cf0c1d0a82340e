"""One suite for every server that speaks the protocol: the embedded server, and a real SGLang on a CPU (`make
test-sglang`).

`server` is the only fixture that knows what it talks to. A test that expects different things
of different servers asks their capabilities; one that is about one kind of server names it: ONLY_SGLANG,
ONLY_EMBEDDED in test_weights.py.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentrl.config.rollout import EmbeddedServerConfig
from agentrl.errors import ServerError
from agentrl.extras.embedded.launch import EmbeddedServer
from agentrl.http.client import HttpClient
from agentrl.servers.client import SGLangClient
from agentrl.servers.launch import Launcher
from agentrl.servers.protocol import generate_body, parse_generation
from agentrl.servers.supervisor import Supervisor
from agentrl.types import Generation, SamplingParams
from sglang_cpu.server import sglang_on_cpu

VOCAB_SIZE = 384
"""Room for the byte-level tokenizer of the quickstart."""
CONTEXT_TOKENS = 512


@dataclass(frozen=True)
class Capabilities:
    """What one kind of server does beyond, or in place of, what all do."""

    pause_modes: tuple[str, ...]
    refuses_foreign_ids: bool  # real SGLang on a CPU dies of them
    checksums_by_hf_name: bool
    is_ready_while_paused: bool
    knows_held_requests: bool  # real SGLang neither counts nor aborts what has not reached its scheduler
    cache_tokens: int


@dataclass(frozen=True)
class Server:
    """A running server with the weights of `model` as version 0; `other` has the same shapes and other
    values.
    """

    url: str
    model: Path
    other: Path
    capabilities: Capabilities


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("model", "other")):
        torch.manual_seed(seed)
        config = Qwen2Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT_TOKENS,
            initializer_range=0.3,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )
        Qwen2ForCausalLM(config).save_pretrained(folder / name)
    return folder / "model", folder / "other"


def embedded() -> tuple[Launcher, Capabilities]:
    config = EmbeddedServerConfig(num_blocks=24, page_size=16)
    capabilities = Capabilities(
        pause_modes=("abort",),
        refuses_foreign_ids=True,
        checksums_by_hf_name=True,
        is_ready_while_paused=True,
        knows_held_requests=True,
        cache_tokens=config.num_blocks * config.page_size,
    )
    return EmbeddedServer(config, "float32"), capabilities


def sglang() -> tuple[Launcher, Capabilities]:
    capabilities = Capabilities(
        pause_modes=("abort", "retract", "in_place"),
        refuses_foreign_ids=False,
        checksums_by_hf_name=False,
        is_ready_while_paused=False,
        knows_held_requests=False,
        cache_tokens=4096,
    )
    # The models have no tokenizer; prompts of 350 tokens are computed in three forwards.
    launcher = sglang_on_cpu(
        skip_tokenizer_init=True, max_total_tokens=capabilities.cache_tokens, chunked_prefill_size=128
    )
    return launcher, capabilities


BACKENDS: dict[str, Callable[[], tuple[Launcher, Capabilities]]] = {"embedded": embedded, "sglang": sglang}


@pytest.fixture(scope="session", params=["embedded", pytest.param("sglang", marks=pytest.mark.sglang)])
def running_server(
    request: pytest.FixtureRequest, models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    launcher, capabilities = BACKENDS[request.param]()
    log_file = tmp_path_factory.mktemp("log") / "server.log"
    supervisor = Supervisor(launcher, log_file=log_file, start_timeout_s=240, max_restarts=0)
    try:
        yield Server(supervisor.start(str(models[0]), "0"), *models, capabilities)
    finally:
        supervisor.stop()


@pytest.fixture
def server(running_server: Server) -> Server:
    """The server, running, idle, with its first weights as version 0."""

    async def reset(client: SGLangClient) -> None:
        await client.resume()
        await client.abort(None)
        with contextlib.suppress(ServerError):
            await client.end_weight_update()
        await client.update_weights_from_disk(str(running_server.model), version=0, flush_cache=True)

    run_with(running_server, reset)
    return running_server


Script = Callable[[SGLangClient], Awaitable[Any]]


def run_with(server: Server, script: Script) -> Any:
    async def main() -> Any:
        client = SGLangClient(server.url)
        with trio.fail_after(120):
            try:
                return await script(client)
            finally:
                await client.aclose()

    return trio.run(main)


@pytest.fixture
def sample_on(server: Server) -> Callable[..., Awaitable[Generation]]:
    """Generate without heeding the end-of-sequence token: what runs until its length, an abort or a pause
    ends it.
    """

    async def generate(input_ids: list[int], max_new_tokens: int, *, rid: str) -> Generation:
        body = generate_body(input_ids, SamplingParams(max_new_tokens), rid=rid)
        body["sampling_params"]["ignore_eos"] = True
        async with HttpClient(server.url) as http:
            return parse_generation(
                (await http.request("POST", "/generate", json=body)).json(), server=server.url
            )

    return generate


@pytest.fixture
def until_held(server: Server) -> Script:
    """Return once the paused server holds a request; one that does not count those is given the time that a
    request needs to arrive.
    """

    async def wait(client: SGLangClient) -> None:
        if not server.capabilities.knows_held_requests:
            await trio.sleep(1.0)
            return
        while not (await client.loads()).num_waiting:
            await trio.sleep(0.005)

    return wait


@pytest.fixture
def talk(server: Server) -> Callable[[Script], Any]:
    """Run an async function with a client of the server; then check that the server still generates."""

    def run(script: Script) -> Any:
        async def main(client: SGLangClient) -> Any:
            result = await script(client)
            await client.resume()
            assert await client.is_ready()
            return result

        return run_with(server, main)

    return run


@pytest.fixture(scope="session")
def distributions_of(models: tuple[Path, Path]) -> Callable[..., torch.Tensor]:
    """Log-probabilities of all tokens at each output position, by one plain forward of transformers: the
    independent reference.
    """
    loaded = {path: Qwen2ForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in models}

    @torch.no_grad()
    def compute(model: Path, prompt: list[int], output: list[int], temperature: float = 1.0) -> torch.Tensor:
        logits = loaded[model](torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        return torch.log_softmax(logits / temperature, -1)

    return compute


@pytest.fixture(scope="session")
def logprobs_of(distributions_of: Callable[..., torch.Tensor]) -> Callable[..., list[float]]:
    """Log-probabilities of given output tokens."""

    def compute(model: Path, prompt: list[int], output: list[int], temperature: float = 1.0) -> list[float]:
        return (
            distributions_of(model, prompt, output, temperature)
            .gather(1, torch.tensor(output)[:, None])[:, 0]
            .tolist()
        )

    return compute


@pytest.fixture
def scratch(tmp_path: Path, models: tuple[Path, Path]) -> Path:
    """A copy of the first model's folder, to be spoiled."""
    shutil.copytree(models[0], tmp_path / "scratch")
    return tmp_path / "scratch"


@pytest.fixture
def spawn() -> Iterator[Callable[[list[str]], subprocess.Popen[str]]]:
    """Start processes that are gone after the test."""
    processes: list[subprocess.Popen[str]] = []

    def start(command: list[str]) -> subprocess.Popen[str]:
        processes.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()
