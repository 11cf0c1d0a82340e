"""A server that speaks the protocol's rollout routes but only waits: latency per token, and long-tailed lengths.

It stands in for a GPU server in benchmarks of the asynchrony: what it costs is time, not cores. The lengths are log-normal; the
k-th request of a server gets the k-th length of a seeded sequence, so that two runs see the same workload.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time

import numpy as np
import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route


class PacedEngine:
    """Answers after `length * seconds_per_token`, at most `slots` requests at once; counts the time with nothing to do."""

    def __init__(self, *, seconds_per_token: float, median_tokens: float, sigma: float, slots: int, vocab_size: int, stop_id: int) -> None:
        self._pace = seconds_per_token
        self._median, self._sigma = median_tokens, sigma
        self._slots = asyncio.Semaphore(slots)
        self._num_slots = slots
        self._vocab_size, self._stop_id = vocab_size, stop_id
        self._lengths = np.random.default_rng(0)
        self._running = 0
        self._changed = time.monotonic()
        self.busy_slot_s = 0.0
        self.idle_s = 0.0
        self.version = "default"
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._interrupt = asyncio.Event()

    def _account(self, change: int) -> None:
        now = time.monotonic()
        self.busy_slot_s += self._running * (now - self._changed)
        self.idle_s += (now - self._changed) * (self._running == 0)
        self._running, self._changed = self._running + change, now

    def _length(self, limit: int) -> int:
        return int(np.clip(self._lengths.lognormal(np.log(self._median), self._sigma), 1, limit))

    async def generate(self, body: dict) -> dict:
        prompt, limit = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        length = self._length(limit)
        async with self._slots:
            await self._resumed.wait()
            version, started = self.version, time.monotonic()
            self._account(+1)
            try:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._interrupt.wait(), timeout=length * self._pace)
            finally:
                self._account(-1)
        done = min(length, int((time.monotonic() - started) / self._pace))
        is_cut = done < length
        rng = np.random.default_rng(length)
        ids = rng.integers(0, 256, size=done).tolist()
        if not is_cut and length < limit:
            ids[-1:] = [self._stop_id]
        finish = {"type": "abort", "message": "Aborted"} if is_cut else {"type": "stop" if length < limit else "length"}
        return {
            "text": "",
            "output_ids": ids,
            "meta_info": {
                "id": body.get("rid", ""),
                "finish_reason": finish,
                "prompt_tokens": len(prompt),
                "completion_tokens": len(ids),
                "weight_version": version,
                "weight_versions": [{"version": version, "start": 0, "end": len(ids)}],
                "output_token_logprobs": [[-float(np.log(self._vocab_size)), token, None] for token in ids],
            },
        }

    async def pause(self) -> None:
        self._resumed.clear()
        self._interrupt.set()

    async def resume(self) -> None:
        self._interrupt.clear()
        self._resumed.set()

    def load(self) -> dict[str, float]:
        self._account(0)
        return {"busy_slot_s": self.busy_slot_s, "idle_s": self.idle_s, "slots": self._num_slots}


def build_app(engine: PacedEngine) -> Starlette:
    """Return the app: the routes that a run needs, and /benchmark/load."""

    def reply(value: object) -> Response:
        return Response(orjson.dumps(value), media_type="application/json")

    async def generate(request: Request) -> Response:
        return reply(await engine.generate(orjson.loads(await request.body())))

    async def pause(_: Request) -> Response:
        await engine.pause()
        return reply({"status": "ok"})

    async def resume(_: Request) -> Response:
        await engine.resume()
        return reply({"status": "ok"})

    async def update(request: Request) -> Response:
        engine.version = str(orjson.loads(await request.body())["weight_version"])
        return reply({"success": True, "message": ""})

    async def info(_: Request) -> Response:
        return reply({"model_path": "paced", "weight_version": engine.version, "max_model_len": 1 << 20})

    async def load(_: Request) -> Response:
        return reply(engine.load())

    async def nothing(_: Request) -> Response:
        return Response()

    return Starlette(
        routes=[
            Route("/generate", generate, methods=["POST"]),
            Route("/pause_generation", pause, methods=["POST"]),
            Route("/continue_generation", resume, methods=["POST"]),
            Route("/update_weights_from_disk", update, methods=["POST"]),
            Route("/model_info", info),
            Route("/get_model_info", info),
            Route("/server_info", info),
            Route("/ready", nothing),
            Route("/flush_cache", nothing, methods=["GET", "POST"]),
            Route("/abort_request", nothing, methods=["POST"]),
            Route("/benchmark/load", load),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seconds-per-token", type=float, default=0.01)
    parser.add_argument("--median-tokens", type=float, default=60)
    parser.add_argument("--sigma", type=float, default=1.0, help="of the log-normal length; 1.0 has a long tail")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--stop-id", type=int, required=True)
    args = parser.parse_args()

    async def serve() -> None:
        engine = PacedEngine(
            seconds_per_token=args.seconds_per_token,
            median_tokens=args.median_tokens,
            sigma=args.sigma,
            slots=args.slots,
            vocab_size=args.vocab_size,
            stop_id=args.stop_id,
        )
        config = uvicorn.Config(build_app(engine), host="127.0.0.1", port=args.port, log_level="warning", timeout_keep_alive=60)
        await uvicorn.Server(config).serve()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
