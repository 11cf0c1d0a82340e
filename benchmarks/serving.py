"""Tokens per second of the embedded server over HTTP, beside vLLM's CPU build in its own process.

    python benchmarks/serving.py --model runs/smollm/model --requests 8,32 --prompt 96 --new 64
    python benchmarks/serving.py                    # a random model of 4 layers of 256, 64 requests
    python benchmarks/serving.py --earlier ../old   # the server of another checkout, too

Every way answers the same prompts greedily, in float32 unless it is named otherwise, on one thread, with
log-probabilities, the ways in turns. `turns`: groups of 8 play three turns, of which each repeats the
conversation so far. CPU seconds are those of the process that computes: on a shared machine they say more
than wall time. The gap is that of the server's log-probabilities to a plain float32 forward of transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from machine import write_result
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from agentrl.ports import ReservedPort

HERE = Path(__file__).parent
WAYS = {
    "float32": (),
    "bfloat16": ("--dtype=bfloat16",),
    "int8": ("--quantization=int8",),
}
START_S, ANSWER_S = 300.0, 1800.0
GROUP_SIZE, TURNS, ANSWER_OF_TOOL = 8, 3, 20
GAP_PROMPTS = 8

Prompt = list[int]


@dataclass(frozen=True)
class Server:
    """A running embedded server."""

    url: str
    process: psutil.Process

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system

    def generate(self, prompt: Prompt, num_tokens: int) -> list[tuple[float, int]]:
        """Return log-probability and id of each new token."""
        sampling = {"temperature": 0.0, "max_new_tokens": num_tokens, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        request = urllib.request.Request(
            self.url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
            found = json.load(reply)["meta_info"]["output_token_logprobs"]
        return [(item[0], item[1]) for item in found]

    def forget(self) -> None:
        """Let no prompt be answered from the keys and values of an earlier run."""
        with urllib.request.urlopen(self.url + "/flush_cache", timeout=ANSWER_S):
            pass


@dataclass(frozen=True)
class Workload:
    """Prompts that are sent at once, and the number of new tokens of each."""

    prompts: list[Prompt]
    lengths: list[int]

    @property
    def num_new(self) -> int:
        return sum(self.lengths)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="folder of a model (a random one)")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--requests", default="64", help="numbers of requests at once")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--new", default="16-256", help="new tokens of a request, or a range of them")
    parser.add_argument("--groups", type=int, default=2, help="groups of the workload of turns; 0: without")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--earlier", type=Path, help="another checkout, whose server is measured in float32")
    parser.add_argument(
        "--peers", type=Path, default=Path("~/.cache/agentrl-peers"), help="folder of the peers' environments"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or random_model(Path(folder))
        plans = [
            workload(num, options.prompt, options.new, vocabulary_of(model))
            for num in map(int, options.requests.split(","))
        ]
        sources = {way: (HERE.parent, WAYS[way]) for way in options.ways.split(",")}
        if options.earlier:
            sources["earlier"] = (options.earlier.resolve(), ())
        results: dict[str, Any] = {}
        for way, (source, arguments) in sources.items():
            with serving(model, source, arguments) as server:
                results[way] = measured(server, plans, model, options)
                print(way, json.dumps(results[way]), flush=True)
        vllm = options.peers.expanduser() / "peers_vllm_venv" / "bin" / "python"
        for way in ("float32", "bfloat16"):
            if way in sources:
                results[f"vllm {way}"] = vllm_result(vllm, model, plans, way, options.repeats)
                print(f"vllm {way}", json.dumps(results[f"vllm {way}"]), flush=True)
    write_result(options.out, {"settings": sys.argv[1:], "results": results})


def measured(
    server: Server, plans: Sequence[Workload], model: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Return the best of the repeats of each workload, and the gap of log-probabilities."""
    found: dict[str, Any] = {"requests": {}}
    for plan in plans:
        runs = [together(server, plan.prompts, plan.lengths) for _ in range(options.repeats)]
        found["requests"][len(plan.prompts)] = best(plan.num_new, [(run[0], run[1]) for run in runs])
    if options.groups:
        found["turns"] = best(*play_turns(server, plans[0], options.groups))
    plan = plans[-1]
    answers = together(server, plan.prompts, plan.lengths)[2]
    found["gap"] = gap_of(model, plan.prompts[:GAP_PROMPTS], answers)
    found["memory_bytes"] = server.process.memory_info().rss
    return found


def together(
    server: Server, prompts: Sequence[Prompt], lengths: Sequence[int]
) -> tuple[float, float, list[list[tuple[float, int]]]]:
    """Send all requests at once; return wall and CPU seconds, and the answers."""
    server.forget()
    wall, cpu = time.perf_counter(), server.cpu_s()
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(server.generate, prompts, lengths))
    return time.perf_counter() - wall, server.cpu_s() - cpu, answers


def play_turns(server: Server, plan: Workload, num_groups: int) -> tuple[int, list[tuple[float, float]]]:
    """Play groups whose members send the whole conversation at each turn; return new tokens and seconds."""
    generator, num_new = random.Random(1), max(1, plan.lengths[0] // TURNS)
    prompts = [[generator.randrange(20, 260) for _ in range(100)] for _ in range(num_groups)]

    def member(index: int) -> None:
        own = random.Random(index)
        conversation = list(prompts[index // GROUP_SIZE])
        for _ in range(TURNS):
            answer = server.generate(conversation, num_new)
            conversation += [token for _, token in answer]
            conversation += [own.randrange(20, 260) for _ in range(ANSWER_OF_TOOL)]

    num = num_groups * GROUP_SIZE
    server.forget()
    wall, cpu = time.perf_counter(), server.cpu_s()
    with ThreadPoolExecutor(num) as pool:
        list(pool.map(member, range(num)))
    return num * TURNS * num_new, [(time.perf_counter() - wall, server.cpu_s() - cpu)]


def best(num_new: int, seconds: Sequence[tuple[float, float]]) -> dict[str, float]:
    return {
        "tokens_per_s": round(num_new / min(wall for wall, _ in seconds), 1),
        "tokens_per_cpu_s": round(num_new / min(cpu for _, cpu in seconds), 1),
    }


def gap_of(
    model: Path, prompts: Sequence[Prompt], answers: Sequence[list[tuple[float, int]]]
) -> dict[str, float]:
    """Return mean and maximum of |log-probability of the server - of a plain float32 forward|."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    gaps = []
    for prompt, answer in zip(prompts, answers, strict=False):
        logprobs, ids = (torch.tensor(column) for column in zip(*answer, strict=True))
        with torch.no_grad():
            logits = reference(torch.tensor([[*prompt, *ids.tolist()]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]
        gaps.append((logprobs - expected).abs())
    joined = torch.cat(gaps)
    return {"mean": float(joined.mean()), "max": float(joined.max())}


@contextmanager
def serving(model: Path, source: Path, arguments: Sequence[str]) -> Iterator[Server]:
    """Run the server of the checkout in `source` on one thread."""
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "agentrl.extras.embedded", str(model), "--num-blocks=1024"]
    with ReservedPort() as port, tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, f"--port={port.number}", *arguments], cwd=source, env=environment, stderr=log
        )
        server = Server(f"http://127.0.0.1:{port.number}", psutil.Process(process.pid))
        try:
            until_ready(server)
            yield server
        except OSError:
            log.seek(0)
            sys.stderr.writelines(log.readlines()[-5:])
            raise
        finally:
            process.terminate()
            process.wait()


def until_ready(server: Server) -> None:
    """Wait for the first answer; raise OSError if the server has ended."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            server.generate([20], 1)
            return
        except OSError:
            if server.process.status() == psutil.STATUS_ZOMBIE or time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def vllm_result(python: Path, model: Path, plans: Sequence[Workload], dtype: str, repeats: int) -> Any:
    """Run the peer on the same prompts; return what it printed, or why there is nothing."""
    if not python.exists():
        return f"not installed: {python}"
    given = {"model": str(model), "dtype": dtype, "repeats": repeats}
    given["workloads"] = [{"prompts": plan.prompts, "lengths": plan.lengths} for plan in plans]
    done = subprocess.run(
        [python, HERE / "vllm_engine.py"],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else f"failed: {done.stderr.strip().splitlines()[-1:]}"


def workload(num: int, num_prompt: int, new: str, vocabulary: int) -> Workload:
    generator = random.Random(num)
    low, _, high = new.partition("-")
    prompts = [[generator.randrange(20, min(260, vocabulary)) for _ in range(num_prompt)] for _ in range(num)]
    return Workload(prompts, [generator.randint(int(low), int(high or low)) for _ in range(num)])


def vocabulary_of(model: Path) -> int:
    return int(json.loads((model / "config.json").read_text())["vocab_size"])


def random_model(folder: Path) -> Path:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    return folder / "model"


if __name__ == "__main__":
    main()
