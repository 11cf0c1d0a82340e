"""SGLang's HTTP protocol, played for tests of the core: a small policy in numpy behind one event loop.

Statuses, fields and their meaning were measured on a real SGLang 0.5.23. An unknown route or value is
answered by 404 or 400, never by a guess. `played_sglang` returns the settings by which a run starts it in
SGLang's place.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from parts.small_policy import Cache, Floats, SmallPolicy, as_float32, log_softmax, read_weights

TESTS = Path(__file__).parents[1]
CACHE_TOKENS = 16384
STREAM_INTERVAL = 1
JOIN_TIMEOUT_S = 60.0
ORPHAN_S = 0.5

Json = dict[str, Any]


def played_sglang(**arguments: Any) -> Json:
    """Return keys of the config section `rollout` by which the program starts this server for SGLang.

    arguments: further arguments of the server.
    """
    path = f"{TESTS / 'parts/played'}:{TESTS}"
    return {
        "backend": "sglang",
        "sglang": {"python": sys.executable, "env": {"PYTHONPATH": path}, "args": arguments},
    }


@dataclass(frozen=True)
class PlayedServerLauncher:
    """Starts this server as one process, without SGLang's guard around it."""

    dtype: str = "float32"
    api_key: str | None = field(default=None, repr=False)

    def command(self, model_path: str, *, weight_version: str, host: str, port: int) -> list[str]:
        options = ["--host", host, "--port", str(port), "--dtype", self.dtype]
        options += ["--weight-version", weight_version, "--parent-pid", str(os.getpid())]
        options += ["--key-stdin"] if self.api_key else []
        return [sys.executable, "-m", "parts.played_server", "--model-path", model_path, *options]

    def environment(self) -> Mapping[str, str]:
        return {"PYTHONPATH": str(TESTS)}


class Refused(Exception):
    """A request that is answered by 400."""


@dataclass(eq=False)
class Job:
    """One request for tokens. starts: (version, index of the first token sampled under it)."""

    rid: str
    prompt: list[int]
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_ids: frozenset[int]
    scored_from: int | None
    cache: Cache = field(default_factory=Cache)
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    starts: list[tuple[str, int]] = field(default_factory=list)
    num_retractions: int = 0
    finish: Json | None = None
    has_news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def has_begun(self) -> bool:
        return bool(self.starts)

    def end(self, **reason: Any) -> None:
        if self.finish is None:
            self.finish = reason
            self.has_news.set()


class PlayedServer:
    """The state of one server."""

    def __init__(self, folder: Path, version: str, *, arguments: Mapping[str, Any]) -> None:
        self.policy, self.folder, self.version = SmallPolicy(folder), folder, version
        self.arguments = arguments
        self.num_pauses = 0
        self.is_paused = False
        self.jobs: dict[str, Job] = {}
        self._ends = _end_ids(folder)
        self._random = np.random.default_rng(arguments["random_seed"])
        self._work = asyncio.Event()
        self._is_updating = False
        self._is_in_session = False
        self._groups: dict[str, Any] = {}

    # ---------------------------------------------------------------------------------------------- sampling

    async def sample_forever(self) -> None:
        """One token of each running request after the other."""
        while True:
            running = [job for job in self.jobs.values() if self._may_run(job)]
            if not running:
                self._work.clear()
                await self._work.wait()
            for job in running:
                if self._may_run(job):
                    self._step(job)
                await asyncio.sleep(0)

    def _may_run(self, job: Job) -> bool:
        """Weights that are replaced wait for requests that have begun, and hold the others.

        With --hold-at-tokens, a request with so many tokens waits for the first pause: a pause in the middle
        of a generation, wherever the machine's time goes.
        """
        is_held = not job.has_begun and (self._is_updating or self._is_in_session)
        waits = len(job.output) == self.arguments["hold_at_tokens"] and not self.num_pauses
        return job.finish is None and not (self.is_paused or is_held or waits)

    def _step(self, job: Job) -> None:
        if not job.starts or job.starts[-1][0] != self.version:
            job.starts.append((self.version, len(job.output)))
        known = [*job.prompt, *job.output]
        is_first = not job.output and not job.prompt_logprobs
        logits = self.policy.logits(known[job.cache.num_tokens :], job.cache)
        if job.scored_from is not None and is_first:
            scores = log_softmax(logits)
            places = range(job.scored_from, len(job.prompt))
            job.prompt_logprobs = [float(scores[place - 1, job.prompt[place]]) for place in places]
        if not job.max_new_tokens:
            job.end(type="length", length=0)
            return
        token, logprob = self._sampled(job, logits[-1])
        job.output.append(token)
        job.logprobs.append(logprob)
        job.has_news.set()
        if token in job.stop_ids:
            job.end(type="stop", matched=token)
        elif len(job.output) == job.max_new_tokens:
            job.end(type="length", length=job.max_new_tokens)

    def _sampled(self, job: Job, logits: Floats) -> tuple[int, float]:
        """Return a token and its log-probability under the whole distribution."""
        if job.temperature == 0:
            token = int(logits.argmax())
            return token, float(log_softmax(logits)[token])
        scores = log_softmax(logits / np.float32(job.temperature))
        shares = np.exp(scores.astype(np.float64))
        order = np.argsort(-shares)
        is_kept = np.cumsum(shares[order]) - shares[order] < job.top_p
        if job.top_k > 0:
            is_kept[job.top_k :] = False
        kept = order[is_kept]
        token = int(self._random.choice(kept, p=shares[kept] / shares[kept].sum()))
        return token, float(scores[token])

    async def generate(self, body: Json) -> Job:
        """Admit a request; return it when it has ended."""
        job = self.admit(body)
        try:
            while job.finish is None:
                await job.has_news.wait()
                job.has_news.clear()
        finally:
            self.forget(job)
        return job

    def admit(self, body: Json) -> Job:
        params = body.get("sampling_params") or {}
        ids = body.get("input_ids")
        if not isinstance(ids, list) or not ids or not all(0 <= id < self.policy.vocab_size for id in ids):
            raise Refused(f"input_ids must be ids below {self.policy.vocab_size}")
        if body.get("lora_path") is not None or body.get("image_data") is not None:
            raise Refused("this server has neither adapters nor images")
        limit = params.get("max_new_tokens", 128)
        if len(ids) + limit > self.policy.context_tokens:
            raise Refused(
                "Requested token count exceeds the model's maximum context length of "
                f"{self.policy.context_tokens} tokens."
            )
        rid = body.get("rid") or f"unnamed-{time.monotonic_ns()}"
        if rid in self.jobs:
            raise Refused(f"Duplicate request ID detected: {rid}")
        stops = frozenset(params.get("stop_token_ids") or ()) | self._ends
        scored_from = body.get("logprob_start_len", -1)
        job = Job(
            rid,
            ids,
            limit,
            params.get("temperature", 1.0),
            params.get("top_p", 1.0),
            params.get("top_k", -1),
            frozenset() if params.get("ignore_eos") else stops,
            scored_from + 1 if scored_from >= 0 else None,
        )
        self.jobs[rid] = job
        self._work.set()
        return job

    def forget(self, job: Job) -> None:
        self.jobs.pop(job.rid, None)
        self._work.set()

    def abort(self, rid: str | None) -> None:
        for job in list(self.jobs.values()):
            if rid in (None, job.rid):
                job.end(type="abort", message="Aborted" if job.has_begun else "Abort in waiting queue")

    def answer(self, job: Job, *, is_cut: bool = False) -> Json:
        """Return the reply to a request, or an event of a stream before its end."""
        num = len(job.output)
        ends = [*(start for _, start in job.starts), num][1:]
        spans = [
            {"version": version, "start": start, "end": end}
            for (version, start), end in zip(job.starts, ends, strict=True)
            if end > start
        ]
        meta: Json = {
            "id": job.rid,
            "finish_reason": None if is_cut else job.finish,
            "completion_tokens": num,
            "weight_version": self.version,
            "num_retractions": job.num_retractions,
            "output_token_logprobs": [
                [value, id, None] for value, id in zip(job.logprobs, job.output, strict=True)
            ],
        }
        meta |= {} if is_cut else {"weight_versions": spans}
        meta |= {"prompt_tokens": len(job.prompt), "cached_tokens": 0} if job.has_begun else {}
        if job.scored_from is not None:
            scored = job.prompt[job.scored_from :]
            pairs = zip(job.prompt_logprobs, scored, strict=True)
            first = [None, job.prompt[job.scored_from - 1], None]
            meta["input_token_logprobs"] = [first, *([value, id, None] for value, id in pairs)]
        return {"text": "", "output_ids": list(job.output), "meta_info": meta}

    # ------------------------------------------------------------------------------------------------ pauses

    def pause(self, body: Json) -> Json:
        mode = body.get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            raise Refused(f"unknown mode {mode!r}")
        self.is_paused = True
        self.num_pauses += 1
        if mode == "abort":
            self.abort(None)
        if mode == "retract":
            for job in self.jobs.values():
                job.cache = Cache()
                job.num_retractions += job.has_begun
        return {"message": "Generation paused successfully.", "status": "ok"}

    def resume(self, body: Json) -> Json:
        self.is_paused = False
        self._work.set()
        return {"message": "Generation continued successfully.", "status": "ok"}

    # ----------------------------------------------------------------------------------------------- weights

    async def _quiet(self) -> None:
        """Return once no request runs: at once while paused, else when those that have begun have ended."""
        while not self.is_paused and any(job.has_begun and not job.finish for job in self.jobs.values()):
            await asyncio.sleep(0.002)

    async def update_from_disk(self, body: Json) -> Json:
        folder = Path(body["model_path"])
        try:
            weights = read_weights(folder)
        except (OSError, ValueError, KeyError) as error:
            return self._failed(f"Failed to load the weights: {error}")
        if body.get("load_format", "auto") != "auto":
            return self._failed(f"unknown load_format {body['load_format']!r}")
        if body.get("abort_all_requests"):
            self.abort(None)
        return await self._replace(weights, body, folder)

    async def _replace(self, weights: Mapping[str, Floats], body: Json, folder: Path | None) -> Json:
        wrong = [name for name, value in weights.items() if not self._fits(name, value)]
        if wrong:
            return self._failed(f"{wrong[0]} does not fit the model")
        self._is_updating = True
        try:
            await self._quiet()
            self.policy.weights = {**self.policy.weights, **weights}
            if body.get("flush_cache", True):
                for job in self.jobs.values():
                    job.cache = Cache()
            self.folder = folder or self.folder
            self.version = body.get("weight_version") or self.version
        finally:
            self._is_updating = False
            self._work.set()
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def _fits(self, name: str, value: Floats) -> bool:
        known = self.policy.weights.get(name)
        is_tied_head = name == "lm_head.weight" and "lm_head.weight" not in self.policy.weights
        return is_tied_head or (known is not None and known.shape == value.shape)

    @staticmethod
    def _failed(message: str) -> Json:
        return {"success": False, "message": message, "num_paused_requests": 0, "status": 400}

    def rename(self, body: Json) -> Json:
        if body.get("abort_all_requests", True):
            self.abort(None)
        self.version = body["new_version"]
        return {"success": True, "message": "", "new_version": self.version}

    async def begin_update(self, body: Json) -> Json:
        self._is_updating = True
        await self._quiet()
        self._is_updating = False
        self._is_in_session = True
        return {"success": True, "message": ""}

    async def end_update(self, body: Json) -> Json:
        self._is_in_session = False
        self._work.set()
        return {"success": True, "message": ""}

    async def join_group(self, body: Json) -> Json:
        from agentrl.servers.process_group import join_weights_group  # torch takes seconds

        def join() -> Any:
            return join_weights_group(
                address=body["master_address"],
                port=body["master_port"],
                rank=body["rank_offset"],
                world_size=body["world_size"],
                name=body["group_name"],
                backend=body["backend"],
                timeout_s=JOIN_TIMEOUT_S,
            )

        self._groups[body["group_name"]] = await asyncio.to_thread(join)
        return {"success": True, "message": "Succeeded to initialize custom process group."}

    async def leave_group(self, body: Json) -> Json:
        group = self._groups.pop(body["group_name"], None)
        if group is None:
            return self._failed("The group to be destroyed does not exist.")
        from agentrl.servers.process_group import leave_weights_group

        await asyncio.to_thread(leave_weights_group, group)
        return {"success": True, "message": ""}

    async def update_from_group(self, body: Json) -> Json:
        if not self._is_in_session:
            return self._failed(
                "update_weights_from_distributed must run between begin_weight_update() and "
                "end_weight_update()"
            )
        group = self._groups.get(body["group_name"])
        if group is None:
            return self._failed(
                f"Failed to receive weights: Group {body['group_name']} not in {list(self._groups)}. "
                "Please call `init_weights_update_group` first."
            )
        tensors = await asyncio.to_thread(_receive, body, group)
        return await self._replace(tensors, body, None)

    def checksums(self, body: Json) -> Json:
        """Whole weights under the names of files, as the embedded server sends them."""
        sums = {
            name: hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
            for name, value in self.policy.weights.items()
        }
        return {"success": True, "ranks": [{"checksums": sums}]}

    # --------------------------------------------------------------------------------------------- questions

    def loads(self, body: Json) -> Json:
        running = [job for job in self.jobs.values() if job.has_begun and job.finish is None]
        load = {
            "dp_rank": 0,
            "num_running_reqs": len(running),
            "num_waiting_reqs": len(self.jobs) - len(running),
            "num_used_tokens": sum(job.cache.num_tokens for job in running),
            "max_total_num_tokens": CACHE_TOKENS,
        }
        return {"loads": [load]}

    def model_info(self, body: Json) -> Json:
        return {
            "model_path": str(self.folder),
            "served_model_name": str(self.folder),
            "tokenizer_path": str(self.folder),
            "is_generation": True,
            "weight_version": self.version,
        }

    def server_info(self, body: Json) -> Json:
        return {
            "dtype": self.arguments["dtype"],
            "is_paused": self.is_paused,
            "version": "0.5.23",
            "device": "cpu",
            "quantization": None,
            "tp_size": 1,
        }


def _receive(body: Json, group: Any) -> dict[str, Floats]:
    import torch

    from agentrl.servers.process_group import broadcast, unflatten

    specs = [
        (getattr(torch, dtype.removeprefix("torch.")), tuple(shape))
        for dtype, shape in zip(body["dtypes"], body["shapes"], strict=True)
    ]
    flat = torch.empty(
        sum(dtype.itemsize * torch.Size(shape).numel() for dtype, shape in specs), dtype=torch.uint8
    )
    broadcast(flat, group)
    return {
        name: as_float32(tensor.float().numpy())
        for name, tensor in zip(body["names"], unflatten(flat, specs), strict=True)
    }


def _end_ids(folder: Path) -> frozenset[int]:
    path = folder / "generation_config.json"
    found = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
    return frozenset([found] if isinstance(found, int) else found or ())


# ------------------------------------------------------------------------------------------------------- HTTP


Route = Callable[[Json], Any]


class Front:
    """HTTP/1.1 of one server: JSON in, JSON out, and streams of events."""

    def __init__(self, server: PlayedServer, key: str | None) -> None:
        self._server, self._key = server, key
        self._routes: dict[tuple[str, str], Route] = {
            ("POST", "/abort_request"): self._abort,
            ("POST", "/pause_generation"): server.pause,
            ("POST", "/continue_generation"): server.resume,
            ("POST", "/flush_cache"): self._flush,
            ("POST", "/update_weights_from_disk"): server.update_from_disk,
            ("POST", "/update_weight_version"): server.rename,
            ("POST", "/begin_weight_update"): server.begin_update,
            ("POST", "/end_weight_update"): server.end_update,
            ("POST", "/init_weights_update_group"): server.join_group,
            ("POST", "/destroy_weights_update_group"): server.leave_group,
            ("POST", "/update_weights_from_distributed"): server.update_from_group,
            ("POST", "/weights_checker"): server.checksums,
            ("GET", "/v1/loads"): server.loads,
            ("GET", "/model_info"): server.model_info,
            ("GET", "/server_info"): server.server_info,
            ("GET", "/health"): self._health,
            ("GET", "/ready"): self._health,
        }

    def _abort(self, body: Json) -> None:
        if body.get("abort_all"):
            self._server.abort(None)
        elif body.get("rid"):
            self._server.abort(body["rid"])

    def _flush(self, body: Json) -> str:
        if self._server.jobs and not self._server.is_paused:
            raise Refused("Flush cache failed.")
        return "Cache flushed."

    def _health(self, body: Json) -> Json | None:
        return {"status": 503} if self._server.is_paused else None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                method, path, headers, content = await _read_request(reader)
                if self._key is not None and headers.get("authorization") != f"Bearer {self._key}":
                    await _write(writer, 401, {"error": "Unauthorized"})
                else:
                    await self._answer(writer, method, path.partition("?")[0], content)
        writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, method: str, path: str, content: bytes) -> None:
        try:
            body = json.loads(content) if content else {}
            if (method, path) == ("POST", "/generate"):
                await self._generate(writer, body)
                return
            route = self._routes.get((method, path))
            if route is None:
                await _write(writer, 404, {"error": {"message": f"no {method} {path}"}})
                return
            answer = route(body)
            answer = await answer if isinstance(answer, Awaitable) else answer
            status = answer.pop("status", 200) if isinstance(answer, dict) else 200
            await _write(writer, status if isinstance(status, int) else 200, answer)
        except (Refused, json.JSONDecodeError, KeyError) as error:
            await _write(writer, 400, {"error": {"message": str(error)}})

    async def _generate(self, writer: asyncio.StreamWriter, body: Json) -> None:
        if not body.get("stream"):
            await _write(writer, 200, self._server.answer(await self._server.generate(body)))
            return
        job = self._server.admit(body)
        interval = (body.get("sampling_params") or {}).get("stream_interval", STREAM_INTERVAL)
        num_sent = 0
        try:
            await _begin_stream(writer)
            while job.finish is None:
                await job.has_news.wait()
                job.has_news.clear()
                if job.finish is None and len(job.output) - num_sent >= interval:
                    num_sent = len(job.output)
                    await _send_event(writer, json.dumps(self._server.answer(job, is_cut=True)))
            await _send_event(writer, json.dumps(self._server.answer(job)))
            await _send_event(writer, "[DONE]")
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        finally:
            self._server.forget(job)


async def _read_request(reader: asyncio.StreamReader) -> tuple[str, str, dict[str, str], bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path, _ = head[0].split(" ")
    pairs = (line.partition(":") for line in head[1:] if line)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    return method, path, headers, await reader.readexactly(int(headers.get("content-length", 0)))


async def _write(writer: asyncio.StreamWriter, status: int, answer: Any) -> None:
    data = b"" if answer is None else json.dumps(answer).encode()
    head = (
        f"HTTP/1.1 {status} Answer\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    writer.write(head.encode() + data)
    await writer.drain()


async def _begin_stream(writer: asyncio.StreamWriter) -> None:
    writer.write(
        b"HTTP/1.1 200 Answer\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    await writer.drain()


async def _send_event(writer: asyncio.StreamWriter, text: str) -> None:
    data = f"data: {text}\n\n".encode()
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
    await writer.drain()


def read_arguments(words: Sequence[str] | None = None) -> tuple[argparse.Namespace, str | None]:
    """Return the arguments, and the key of the file that `--config` names."""
    parser = argparse.ArgumentParser(prog="launch_server")
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--weight-version", default="default")
    parser.add_argument("--random-seed", type=int, default=0)
    parser.add_argument("--hold-at-tokens", type=int)
    parser.add_argument("--parent-pid", type=int)
    parser.add_argument("--key-stdin", action="store_true")
    parser.add_argument("--config", type=Path)
    options = parser.parse_args(words)
    key = sys.stdin.readline().rstrip("\n") if options.key_stdin else None
    if options.config is not None:
        key = json.loads(options.config.read_text().partition("api-key:")[2])
    return options, key


async def run(options: argparse.Namespace, key: str | None) -> None:
    server = PlayedServer(options.model_path, options.weight_version, arguments=vars(options))
    front = await asyncio.start_server(Front(server, key).serve, options.host, options.port)
    print(f"listening on http://{options.host}:{options.port}", flush=True)
    async with front, asyncio.TaskGroup() as tasks:
        tasks.create_task(server.sample_forever())
        tasks.create_task(front.serve_forever())
        while options.parent_pid in (None, os.getppid()):
            await asyncio.sleep(ORPHAN_S)
        os._exit(1)


def main(words: Sequence[str] | None = None) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run(*read_arguments(words)))


if __name__ == "__main__":
    main()
