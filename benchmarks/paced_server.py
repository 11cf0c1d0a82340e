"""A fake inference server that only waits: fixed time per token, long-tailed lengths, turns with tool calls.

It implements the protocol's rollout routes, and replaces a GPU server in benchmarks of waiting: it costs
time, not cores. The k-th trajectory of a server gets the k-th script of a seeded sequence: lengths of its
turns (log-normal) and durations of its tool calls (exponential). So two runs have the same work, in whatever
order it is done. A tool call names its seconds, which `wait` of paced_tool.py sleeps.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from agentrl.chat.chat import Chat
from agentrl.rollout.open_files import raise_open_files

TIMEOUT_S = 60.0
MAX_CONNECTIONS = 65_536
NEVER_S = 1e6

Fault = Literal["500", "half_a_body", "never"]
FAULTS: tuple[Fault, ...] = ("500", "half_a_body", "never")


@dataclass(frozen=True)
class Workload:
    """The distribution of trajectories, and the speed of a server.

    slots: number of concurrent requests, each at `seconds_per_token`; further requests wait.
    mean_tokens: of a turn; log-normal with `sigma`, at most `max_tokens`.
    tool_share: mean latency of a tool call (exponential), as a share of the mean time of a turn.
    fault_share: share of generations that fail: with status 500, with half a body, or without an answer.
    """

    seconds_per_token: float
    slots: int = 64
    turns: int = 3
    mean_tokens: float = 200.0
    sigma: float = 1.0
    max_tokens: int = 8000
    tool_share: float = 0.3
    fault_share: float = 0.0
    seed: int = 0

    @property
    def mean_turn_s(self) -> float:
        return self.mean_tokens * self.seconds_per_token

    def seconds_of(self, num_tokens: float) -> float:
        """Return the seconds that all slots together need for `num_tokens`: tokens / (slots x rate)."""
        return num_tokens * self.seconds_per_token / self.slots


class Script:
    """The remaining work of a trajectory: tokens per turn, and seconds of the tool calls between turns."""

    def __init__(self, workload: Workload, rng: np.random.Generator) -> None:
        median = workload.mean_tokens / np.exp(workload.sigma**2 / 2)
        lengths = rng.lognormal(np.log(median), workload.sigma, size=workload.turns)
        self._lengths = np.clip(lengths, 1, workload.max_tokens).astype(int).tolist()
        self._latencies = rng.exponential(
            workload.tool_share * workload.mean_turn_s, size=workload.turns - 1
        ).tolist()
        self._rest: list[int] | None = None  # remaining tokens of the current turn

    @property
    def latency(self) -> float | None:
        """Seconds of the tool call that ends the next turn; None: it is the last turn."""
        return self._latencies[0] if len(self._lengths) > 1 else None

    def turn(self, words: Words) -> list[int]:
        """Return the remaining tokens of the current turn, or those of the next turn."""
        if self._rest is None:
            self._rest = words.turn(self._lengths.pop(0), self._latencies.pop(0) if self._latencies else None)
        return self._rest

    def take(self, num_tokens: int) -> None:
        """Record that `num_tokens` of the turn were sampled."""
        assert self._rest is not None, "no turn was begun"
        self._rest = self._rest[num_tokens:] or None

    @property
    def is_over(self) -> bool:
        return self._rest is None and not self._lengths


class Words:
    """Writes turns of a given length in tokens.

    A tool call needs about two dozen, which is the minimum then.
    """

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        # Whole words, whose ids are above Python's cached small integers, as in a real vocabulary.
        words = [
            id for id in range(257, chat.vocab_size) if chat.decode([id], skip_special=True).strip().isalpha()
        ]
        self._filler = list(itertools.islice(itertools.cycle(words), 100_000))

    def turn(self, length: int, latency: float | None) -> list[int]:
        end = [self._chat.eos_token_ids[0]]
        if latency is not None:
            call = json.dumps({"name": "wait", "arguments": {"seconds": round(latency, 3)}})
            end = [*self._chat.encode(f"<tool_call>{call}</tool_call>"), *end]
        return [*self._filler[: max(0, length - len(end))], *end]


class PacedEngine:
    """Answers after `length * seconds_per_token`, at most `slots` requests at once; measures idle time.

    A pause of mode `abort` ends the requests in flight with their partial output. Other modes suspend them.
    """

    def __init__(self, workload: Workload, chat: Chat) -> None:
        self._workload = workload
        self._slots = asyncio.Semaphore(workload.slots)
        self._scripts: dict[str, Script] = {}
        self._words = Words(chat)
        self._rng = np.random.default_rng(workload.seed)
        self._logprob = -float(np.log(chat.vocab_size))
        self._resumed, self._interrupt = asyncio.Event(), asyncio.Event()
        self._resumed.set()
        self._paused_s = 0.0
        self._paused_at: float | None = None
        self._running = 0
        self._changed = time.monotonic()
        self.busy_slot_s = 0.0
        self.idle_s = 0.0
        self.num_tokens = 0
        self.version = "default"

    def _account(self, change: int) -> None:
        now = time.monotonic()
        self.busy_slot_s += self._running * (now - self._changed)
        self.idle_s += (now - self._changed) * (self._running == 0)
        self._running, self._changed = self._running + change, now

    async def generate(self, body: dict) -> dict:
        # no turn of a trajectory asks for one token: this is a health probe
        if body["sampling_params"]["max_new_tokens"] == 1:
            await self._resumed.wait()
            return self._reply(body, [1], self.version, {"type": "length", "length": 1})
        key, limit = body["rid"].rpartition("-")[0], body["sampling_params"]["max_new_tokens"]
        if (script := self._scripts.get(key)) is None:
            script = self._scripts[key] = Script(self._workload, self._rng)
        async with self._slots:
            await self._resumed.wait()
            turn = script.turn(self._words)
            length = min(len(turn), limit)
            version = self.version
            self._account(+1)
            try:
                done = await self._sample(length)
            finally:
                self._account(-1)
        script.take(done if done < length else len(turn))  # at the limit of tokens the turn is over
        if script.is_over:
            del self._scripts[key]
        self.num_tokens += done
        if done < length:
            finish = {"type": "abort", "message": "Aborted"}
        else:
            finish = (
                {"type": "stop", "matched": turn[-1]}
                if length == len(turn)
                else {"type": "length", "length": length}
            )
        return self._reply(body, turn[:done], version, finish)

    async def draw_fault(self) -> Fault | None:
        """Return how a generation fails, after a delay; None if it should succeed."""
        if self._rng.random() >= self._workload.fault_share:
            return None
        fault = FAULTS[self._rng.integers(len(FAULTS))]
        await asyncio.sleep(NEVER_S if fault == "never" else self._workload.mean_turn_s * self._rng.random())
        return fault

    async def _sample(self, length: int) -> int:
        """Wait for the time of `length` tokens, plus pauses; return how many tokens it was before an
        abort."""
        pace = self._workload.seconds_per_token
        started, paused_before = time.monotonic(), self._paused_s
        while (left := length * pace - (time.monotonic() - started - (self._paused_s - paused_before))) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._interrupt.wait(), timeout=left)
            if self._interrupt.is_set():
                return min(
                    length, int((time.monotonic() - started - (self._paused_s - paused_before)) / pace)
                )
            await self._resumed.wait()
        return length

    def _reply(self, body: dict, ids: Sequence[int], version: str, finish: dict) -> dict:
        return {
            "text": "",
            "output_ids": ids,
            "meta_info": {
                "id": body.get("rid", ""),
                "finish_reason": finish,
                "prompt_tokens": len(body["input_ids"]),
                "completion_tokens": len(ids),
                "weight_version": version,
                "weight_versions": [{"version": version, "start": 0, "end": len(ids)}],
                "output_token_logprobs": [[self._logprob, token, None] for token in ids],
            },
        }

    def pause(self, mode: str) -> None:
        self._resumed.clear()
        self._paused_at = time.monotonic()
        if mode == "abort":
            self._interrupt.set()

    def resume(self) -> None:
        if self._paused_at is not None:
            self._paused_s += time.monotonic() - self._paused_at
            self._paused_at = None
        self._interrupt.clear()
        self._resumed.set()

    @property
    def is_resumed(self) -> bool:
        return self._resumed.is_set()

    def rank_load(self) -> dict[str, int]:
        """Return the reply of /v1/loads.

        The tokens in use grow while requests run, as health checks expect.
        """
        self._account(0)
        used = int(self.busy_slot_s / self._workload.seconds_per_token)
        waiting = max(0, len(self._scripts) - self._running)
        return {
            "num_running_reqs": self._running,
            "num_waiting_reqs": waiting,
            "num_used_tokens": used,
            "max_total_num_tokens": 1 << 40,
        }

    def load(self) -> dict[str, float]:
        self._account(0)
        return {"busy_slot_s": self.busy_slot_s, "idle_s": self.idle_s, "num_tokens": self.num_tokens}


class HalfABody(Response):
    """Announces a body, sends half of it, and closes the connection."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1000")]})
        await send({"type": "http.response.body", "body": b'{"output_ids": [', "more_body": True})


def build_app(engine: PacedEngine) -> Starlette:
    """Return the app: all routes that a run needs, and /benchmark/load."""

    def reply(value: object) -> Response:
        return Response(orjson.dumps(value), media_type="application/json")

    async def generate(request: Request) -> Response:
        body = orjson.loads(await request.body())
        match await engine.draw_fault():
            case None:
                return reply(await engine.generate(body))
            case "half_a_body":
                return HalfABody()
            case _:
                return Response(status_code=500)

    async def pause(request: Request) -> Response:
        engine.pause(orjson.loads(await request.body())["mode"])
        return reply({"status": "ok"})

    async def resume(_: Request) -> Response:
        engine.resume()
        return reply({"status": "ok"})

    async def update(request: Request) -> Response:
        body = orjson.loads(await request.body())
        engine.version = str(body.get("weight_version") or body["new_version"])
        return reply({"success": True, "message": ""})

    async def info(_: Request) -> Response:
        return reply({"model_path": "paced", "weight_version": engine.version, "max_model_len": 1 << 20})

    async def load(_: Request) -> Response:
        return reply(engine.load())

    async def loads(_: Request) -> Response:
        return reply({"loads": [engine.rank_load()]})

    async def ready(_: Request) -> Response:
        return Response(status_code=200 if engine.is_resumed else 503)

    async def nothing(_: Request) -> Response:
        return Response()

    return Starlette(
        routes=[
            Route("/generate", generate, methods=["POST"]),
            Route("/pause_generation", pause, methods=["POST"]),
            Route("/continue_generation", resume, methods=["POST"]),
            Route("/update_weights_from_disk", update, methods=["POST"]),
            Route("/update_weight_version", update, methods=["POST"]),
            Route("/model_info", info),
            Route("/get_model_info", info),
            Route("/server_info", info),
            Route("/v1/loads", loads),
            Route("/ready", ready),
            Route("/health_generate", nothing),
            Route("/flush_cache", nothing, methods=["GET", "POST"]),
            Route("/abort_request", nothing, methods=["POST"]),
            Route("/benchmark/load", load),
        ]
    )


@contextmanager
def paced_servers(workload: Workload, model: Path, *, count: int = 1) -> Iterator[list[str]]:
    """Run paced servers in their own processes, each with all of the workload's slots; yield their URLs."""
    processes = []
    try:
        for index in range(count):
            processes.append(start_server(replace(workload, seed=workload.seed + index), model))
        yield [url_of(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def start_server(workload: Workload, model: Path) -> subprocess.Popen[str]:
    """Start one server in its own process; `url_of` waits for it."""
    command = [sys.executable, __file__, "--model", str(model), "--workload", json.dumps(asdict(workload))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def url_of(process: subprocess.Popen[str]) -> str:
    """Return the URL of a server once it listens."""
    assert process.stdout is not None, "it was started by start_server"
    return f"http://127.0.0.1:{int(process.stdout.readline())}"


def read_load(url: str) -> dict[str, float]:
    """Return the server's counters since its start: busy_slot_s, idle_s, num_tokens."""
    with urllib.request.urlopen(f"{url}/benchmark/load", timeout=TIMEOUT_S) as reply:
        return json.loads(reply.read())


def set_version(url: str, version: int) -> None:
    """Set the version that the server reports, as a publish does."""
    body = json.dumps({"new_version": str(version)}).encode()
    with urllib.request.urlopen(
        urllib.request.Request(f"{url}/update_weight_version", body), timeout=TIMEOUT_S
    ):
        return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder with the tokenizer")
    parser.add_argument("--workload", required=True, help="fields of Workload, as JSON")
    args = parser.parse_args()
    raise_open_files(MAX_CONNECTIONS)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(4096)
    print(listener.getsockname()[1], flush=True)

    async def serve() -> None:
        workload = Workload(**json.loads(args.workload))
        app, level = (
            build_app(PacedEngine(workload, Chat.load(args.model))),
            "critical" if workload.fault_share else "warning",
        )
        await uvicorn.Server(uvicorn.Config(app, log_level=level, timeout_keep_alive=600)).serve(
            sockets=[listener]
        )

    asyncio.run(serve())


if __name__ == "__main__":
    main()
