"""Overhead besides the model: three-turn tool trajectories per second, 256 in flight, on an instant server.

Our side plays leases through the whole production path: AgentLoopManager, tool_agent, a typed tool function,
reward, Arrow. The peers run one after the other in their own environments (`--peers`, made by the peers'
setup script); a missing peer is reported as missing. Compare ratios within one run, not figures of different
runs. On a shared machine, trust ratios per CPU second: verl and AReaL use more than one core, and wait for
it.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import trio
from machine import write_result
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from agentrl.chat.chat import Chat
from agentrl.config.agent import AgentConfig
from agentrl.config.reward import RewardConfig
from agentrl.config.rollout import RolloutConfig
from agentrl.data.trajectories import encode, to_ipc
from agentrl.plugins import load_plugins, tool
from agentrl.rollout.asyncio_host import AsyncioHost
from agentrl.rollout.conversation_line import PromptLimits
from agentrl.rollout.garbage import collect_rarely
from agentrl.rollout.manager import AgentLoopManager
from agentrl.rollout.player_stack import PlayerParts
from agentrl.servers.client import SGLangClient
from agentrl.servers.protocol import Pulse, ServerLoad
from agentrl.servers.router import Router
from agentrl.types import Generation, Lease, Message, Task, Trajectory

CONCURRENCY = 256
GROUP_SIZE = 8
TURN = (
    'I will call the tool now.\n<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 30}}\n</tool_call>'
)
ANSWER = "#### 42"
TURNS = (TURN, TURN, ANSWER)
MARKS = (
    *(
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
    ),
    *("<think>", "</think>", "<tools>", "</tools>"),
)
VOCAB_SIZE = 512
PEERS = {
    "verl": ("peers_rl_venv", "verl_agent_loop.py"),
    "areal": ("peers_rl_venv", "areal_multi_turn.py"),
    "verifiers": ("peers_vf1_venv", "verifiers_toolenv.py"),
}
RATIOS = (("in_process", "verl", 5.0), ("in_process", "areal", 3.0), ("http", "verifiers", 8.0))
CLOCKS = ("trajectories_per_s", "trajectories_per_cpu_s")


# --------------------------------------------------------------------------------------------------- our side


@tool(runtime="trio")
async def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return str(a + b)


def write_tokenizer(folder: Path, template: str) -> None:
    """Write the peers' tokenizer: byte-level BPE with 512 tokens, ChatML markers, and their chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=list(MARKS), show_progress=False, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(["the quick brown fox 0123456789 + = ?"], trainer)
    missing = VOCAB_SIZE - tokenizer.get_vocab_size()
    tokenizer.add_tokens([AddedToken(f"<|x{index}|>", normalized=False) for index in range(missing)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})
    )
    (folder / "chat_template.jinja").write_text(template)


class InstantClient:
    """A server in this process; the k-th request of a trajectory gets the k-th turn."""

    def __init__(self, turns: Sequence[list[int]]) -> None:
        self._generations = [self._generation(turn) for turn in turns]
        self._asked: Counter[str] = Counter()

    @staticmethod
    def _generation(turn: Sequence[int]) -> Generation:
        length = len(turn)
        return Generation(
            np.array(turn, np.int32), np.full(length, -0.5, np.float32), np.zeros(length, np.int32), "stop"
        )

    async def generate(self, input_ids: Sequence[int], params: object, *, rid: str) -> Generation:
        await trio.lowlevel.checkpoint()
        trajectory = rid.rpartition("-")[0]
        turn = self._asked[trajectory]
        self._asked[trajectory] += 1
        return self._generations[turn]

    async def abort(self, rid: str) -> None:
        return

    async def settle_aborts(self) -> None:
        return

    async def serves(self, version: int) -> bool:
        return True

    async def pulse(self) -> Pulse:
        return Pulse(is_paused=False, load=ServerLoad(0, 0, sum(self._asked.values()), 1))

    async def aclose(self) -> None:
        return


class Leases:
    """Leases `num_groups` groups and takes their trajectories, in place of the replay buffer."""

    def __init__(self, num_groups: int) -> None:
        self._left = iter(range(num_groups))
        self._expected = num_groups * GROUP_SIZE
        self.num_added = 0
        self.last: Trajectory | None = None
        self.finished = trio.Event()

    async def withdrawn(self) -> list[int]:
        return []

    async def lease(self, limit: int) -> list[Lease]:
        numbers = [number for _, number in zip(range(limit), self._left, strict=False)]
        if not numbers:
            await trio.sleep(0.05)
        return [Lease(number, make_task(number), GROUP_SIZE, 0) for number in numbers]

    async def add(self, trajectories: Sequence[Trajectory]) -> None:
        to_ipc(encode(trajectories))
        self.num_added += len(trajectories)
        self.last = trajectories[-1]
        if self.num_added >= self._expected:
            self.finished.set()

    async def drop_group(self, group_id: int, reason: str) -> None:
        raise RuntimeError(f"group {group_id} was dropped: {reason}")

    async def leave_out(self, group_id: int, member: int, reason: str) -> None:
        raise RuntimeError(f"member {member} of group {group_id} was left out: {reason}")


def make_task(number: int) -> Task:
    question = Message("user", f"What is 12 + 30? ({number})")
    return Task(f"bench:{number}", "arithmetic", (question,), "tool_agent", ground_truth="42")


def measure_ours(side: str, *, num_trajectories: int, template: str, profile: str | None) -> dict[str, Any]:
    """Play the trajectories and return the figures. `side`: in_process or http."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), template)
        chat = Chat.load(folder)
    turns = [[*chat.encode(text), chat.eos_token_ids[0]] for text in TURNS]
    if side == "in_process":
        return trio.run(play_all, chat, InstantClient(turns), num_trajectories, profile)
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("instant_server.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        server.stdin.write(json.dumps({"turns": turns}) + "\n")
        server.stdin.flush()
        client = SGLangClient(f"http://127.0.0.1:{int(server.stdout.readline())}")
        return trio.run(play_all, chat, client, num_trajectories, profile)
    finally:
        server.kill()
        server.wait()


async def play_all(chat: Chat, client: Any, num_trajectories: int, profile: str | None) -> dict[str, Any]:
    plugins = load_plugins()
    plugins.add_module(SimpleNamespace(__name__=add.__module__, add=add))
    router = Router(lambda url: client, context_tokens=8192)
    router.set_servers(["http://instant"], version=0)
    rollout = RolloutConfig(max_concurrent_trajectories=CONCURRENCY, group_size=GROUP_SIZE)
    agent = AgentConfig(tools=("add",), max_response_tokens=4096)
    with AsyncioHost() as host:
        parts = PlayerParts(plugins, chat, host, PromptLimits(2048, "filter"))
        manager = AgentLoopManager(agent, rollout, RewardConfig(), router, parts)
        await play(manager, CONCURRENCY)
        collect_rarely()  # as a rollout actor does
        with profiled(profile):
            started, cpu = time.perf_counter(), time.process_time()
            last = await play(manager, num_trajectories)
            elapsed, cpu = time.perf_counter() - started, time.process_time() - cpu
        await router.aclose()
    assert last is not None
    assert (last.metrics["num_turns"], last.metrics["num_tool_calls"], last.reward) == (3, 2, 1.0), last
    return {
        "trajectories_per_s": num_trajectories / elapsed,
        "trajectories_per_cpu_s": num_trajectories / cpu,
        "cpu_ms_per_trajectory": 1e3 * cpu / num_trajectories,
        "num_tokens": last.num_tokens,
        "num_action_tokens": last.num_action_tokens,
    }


async def play(manager: AgentLoopManager, num_trajectories: int) -> Trajectory | None:
    leases = Leases(num_trajectories // GROUP_SIZE)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(manager.run, leases, leases)
        await leases.finished.wait()
        nursery.cancel_scope.cancel()
    return leases.last


@contextmanager
def profiled(path: str | None) -> Iterator[None]:
    """Write a profile of the block to a text file, if one is named."""
    if path is None:
        yield
        return
    profile = cProfile.Profile()
    profile.enable()
    yield
    profile.disable()
    with open(path, "w", encoding="utf-8") as file:
        pstats.Stats(profile, stream=file).sort_stats("tottime").print_stats(45)


# -------------------------------------------------------------------------------------------------- all sides


def run_side(side: str, args: argparse.Namespace) -> dict[str, Any] | str:
    """Run one side in its own process; return its figures, or why there are none."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "BENCH_TEMPLATE": str(args.template),
    }
    if side in PEERS:
        venv, script = PEERS[side]
        python, script = args.peers / venv / "bin" / "python", args.peer_scripts / script
        if not python.exists() or not script.exists():
            return "not installed"
        if side == "areal":
            environment["PYTHONPATH"] = str(args.peers / "areal_x")
        command = [str(python), str(script), "--n", str(args.peer_trajectories)]
    else:
        command = [
            sys.executable,
            __file__,
            "--side",
            side,
            "--n",
            str(args.n),
            "--template",
            str(args.template),
        ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    if done.returncode != 0:
        return f"failed: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else done.returncode}"
    line = json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))
    if side not in PEERS:
        return line
    figures = line["figures"]
    # A peer that leaves work to other processes reports the CPU time of its own process alone.
    per_cpu_s = figures.get("traj_per_cpu_s", figures.get("traj_per_parent_cpu_s"))
    return {CLOCKS[0]: figures["traj_per_s"], CLOCKS[1]: per_cpu_s, **figures}


def compare(args: argparse.Namespace) -> None:
    sides = ("in_process", "verl", "areal", "http", "verifiers")
    results: dict[str, list[Any]] = {side: [] for side in sides}
    for repeat in range(args.repeats):
        for side in sides:
            results[side].append(run_side(side, args))
            print(f"repeat {repeat}: {side:<12}", _shown(results[side][-1]), flush=True)
    ratios: dict[str, dict[str, float]] = {}
    for ours, peer, wanted in RATIOS:
        name = f"{ours}/{peer}"
        ratios[name] = {
            clock: _median(results[ours], clock) / _median(results[peer], clock)
            for clock in CLOCKS
            if results[ours] and results[peer] and _are_figures(results[ours] + results[peer])
        }
        if not ratios[name]:
            why = next((run for run in results[peer] + results[ours] if isinstance(run, str)), "absent")
            print(f"{ours} against {peer}: no figure: {why}")
            continue
        per_s, per_cpu_s = (ratios[name][clock] for clock in CLOCKS)
        print(
            f"{ours} against {peer}: {per_s:.1f} times per second, {per_cpu_s:.1f} times per CPU second "
            f"(wanted: at least {wanted:g})"
        )
    write_result(args.out, {"results": results, "ratios": ratios})


def _are_figures(runs: Sequence[Any]) -> bool:
    return all(isinstance(run, dict) for run in runs)


def _median(runs: Sequence[Any], clock: str) -> float:
    return statistics.median(run[clock] for run in runs)


def _shown(result: dict[str, Any] | str) -> str:
    if isinstance(result, str):
        return result
    return f"{result[CLOCKS[0]]:8.1f} trajectories/s, {result[CLOCKS[1]]:8.1f} per CPU second"


def main() -> None:
    shared = Path(os.environ.get("AGENTRL_SHARED", Path(__file__).parents[2] / "shared"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=4096, help="trajectories of our sides")
    parser.add_argument("--peer-trajectories", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--peers",
        type=Path,
        default=Path(os.environ.get("PEERS_ROOT", "~/.cache/agentrl-peers")).expanduser(),
    )
    parser.add_argument("--peer-scripts", type=Path, default=shared / "bench")
    parser.add_argument(
        "--template",
        type=Path,
        default=None,
        help="chat template; default: Qwen 2.5's from the installed trl",
    )
    parser.add_argument(
        "--side", choices=("in_process", "http"), help="measure one of our sides and print its figures"
    )
    parser.add_argument("--profile", help="with --side: write a profile to this file")
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    args = parser.parse_args()
    args.template = args.template or installed_template()
    if args.side:
        template = args.template.read_text(encoding="utf-8")
        print(
            json.dumps(
                measure_ours(args.side, num_trajectories=args.n, template=template, profile=args.profile)
            )
        )
    else:
        compare(args)


def installed_template() -> Path:
    return Path(str(distribution("trl").locate_file("trl/chat_templates/qwen2_5.jinja")))


if __name__ == "__main__":
    main()
