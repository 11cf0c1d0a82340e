"""`agentrl eval` beside lm_eval (EleutherAI's harness): right answers of one model by both.

    python benchmarks/beside_lm_eval.py gsm8k=runs/smollm/model arithmetic=runs/smollm/run/policy

Each argument is a task (benchmarks/lm_eval_tasks.py) and the folder of the model that plays it: greedily, the
same rows and prompts for both sides, on one embedded server. lm_eval has an environment of its own in
`--peers` (`pip install lm-eval transformers`, no torch needed). It renders and tokenizes prompts by
transformers and reads answers by the filters of its gsm8k; `agentrl eval` does both by its own code. Every
row on which the two disagree is listed with the cause. The exit status is 1 if a count of right answers
differs, or if lm_eval is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
from lm_eval_tasks import STOP, TASKS, TaskFiles, write_task
from machine import ROOT, facts, write_whole

from agentrl.config.rollout import EmbeddedServerConfig
from agentrl.extras.answers.gsm8k import canonical
from agentrl.extras.embedded.launch import EmbeddedServer
from agentrl.servers.supervisor import Supervisor

READINGS = {"strict": "strict-match", "flexible": "flexible-extract"}
"""Our reading -> lm_eval's filter."""
START_TIMEOUT_S = 900.0
TAIL_CHARS = 120
SIDE = Path(__file__).with_name("lm_eval_side.py")


@dataclass(frozen=True, slots=True)
class Reading:
    """What one side read in a text: the answer, None if there is none, and whether it is right."""

    answer: str | None
    is_right: bool


@dataclass(frozen=True, slots=True)
class Row:
    """One side of one row."""

    prompt_ids: Sequence[int]
    ids: Sequence[int]
    logprobs: Sequence[float]
    text: str
    read: Mapping[str, Reading]


@dataclass(frozen=True, slots=True)
class Peer:
    """lm_eval's environment."""

    python: Path
    version: str
    gsm8k_yaml: Path


def main() -> int:
    shared = Path(os.environ.get("AGENTRL_SHARED", ROOT.parent / "shared"))
    peers = Path(os.environ.get("PEERS_ROOT", "~/.cache/agentrl-peers")).expanduser()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="+", metavar="TASK=MODEL", help=f"tasks: {', '.join(TASKS)}")
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--in-flight", type=int, default=32, help="requests at once, of either side")
    parser.add_argument("--num-blocks", type=int, default=1024, help="of the server's KV cache")
    parser.add_argument("--data", type=Path, default=shared / "data")
    parser.add_argument("--peers", type=Path, default=peers, help="folder of lm_eval_venv")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "bench" / "lm_eval")
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    args = parser.parse_args()
    wanted = [text.partition("=") for text in args.tasks]
    for name, _, model in wanted:
        if name not in TASKS or not model:
            parser.error(f"{name}={model}: write TASK=MODEL, with a task of {', '.join(TASKS)}")
    peer = find_peer(args.peers / "lm_eval_venv" / "bin" / "python")
    if peer is None:
        print(f"lm_eval is not installed in {args.peers / 'lm_eval_venv'}: only our side is measured")
    what, settings, runs = facts(), {"max_tokens": args.max_tokens, "in_flight": args.in_flight}, []
    for name, _, model in wanted:
        figures = measure(name, Path(model).resolve(), peer, args)
        runs.append({**what, "lm_eval": peer and peer.version, "task": name, **settings, **figures})
        store(args.out, runs)
    show(runs)
    return int(not all(run["is_same"] for run in runs))


def store(out: Path | None, runs: Sequence[Mapping[str, Any]]) -> None:
    """Add runs to a file of figures, in place of earlier ones of their tasks."""
    if out is None:
        return
    earlier = json.loads(out.read_text())["runs"] if out.exists() else []
    done = {run["task"] for run in runs}
    kept = [run for run in earlier if run["task"] not in done]
    what = "agentrl eval beside lm_eval: greedy, one server, the same rows"
    write_whole(out, {"what": what, "runs": [*kept, *runs]})


def find_peer(python: Path) -> Peer | None:
    """Return lm_eval's environment, or None if it is not installed there."""
    question = (
        "import importlib.metadata as m, lm_eval, os, transformers; "
        "print(m.version('lm_eval')); print(os.path.dirname(lm_eval.__file__))"
    )
    if not python.exists():
        return None
    done = subprocess.run(
        [python, "-c", question], env=offline(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        return None
    version, folder = done.stdout.split("\n")[:2]
    return Peer(python, version, Path(folder) / "tasks" / "gsm8k" / "gsm8k.yaml")


def offline() -> dict[str, str]:
    """Return the environment of a side: no hub, no proxy between it and the server."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "NO_PROXY": "127.0.0.1"}


# ------------------------------------------------------------------------------------------------- both sides


def measure(name: str, model: Path, peer: Peer | None, args: argparse.Namespace) -> dict[str, Any]:
    """Play one task by both sides on one server; return counts and differences."""
    folder = args.runs.resolve() / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if name == "arithmetic":
        agentrl("data", "arithmetic", str(folder / "data"), "--val", str(args.rows))
    task = write_task(
        name,
        folder / "task",
        data=args.data.resolve(),
        arithmetic=folder / "data" / "val.parquet",
        base=peer.gsm8k_yaml if peer else Path("gsm8k.yaml"),
        num_rows=args.rows,
        max_tokens=args.max_tokens,
    )
    with served(model, folder, num_blocks=args.num_blocks) as (url, cpu_s):
        times = [cpu_s()]
        ours = play_ours(task, url, folder / "agentrl", args)
        times.append(cpu_s())
        theirs = play_theirs(task, url, model, peer, folder / "lm_eval.json", args) if peer else None
        times.append(cpu_s())
    found: dict[str, Any] = {"model": "/".join(model.parts[-3:]), "rows": len(ours)}
    sides = {"agentrl": ours} if theirs is None else {"agentrl": ours, "lm_eval": theirs}
    for (side, rows), (before, after) in zip(sides.items(), pairwise(times), strict=False):
        cost = {"tokens": sum(len(row.ids) for row in rows), "server_cpu_s": round(after - before, 1)}
        found[f"by_{side}"] = {"right": right_answers(rows)} | cost
    compared = {"is_same": False} if theirs is None else compare(ours, theirs)
    return found | compared


@contextmanager
def served(model: Path, folder: Path, *, num_blocks: int) -> Iterator[tuple[str, Callable[[], float]]]:
    """Serve a model; yield the URL, and a function that returns the server's CPU seconds."""
    config = EmbeddedServerConfig(num_blocks=num_blocks)
    supervisor = Supervisor(
        EmbeddedServer(config, "float32"),
        log_file=folder / "server.log",
        start_timeout_s=START_TIMEOUT_S,
        max_restarts=0,
    )
    try:
        url = supervisor.start(str(model), "0")
        [server] = psutil.Process().children()

        def cpu_s() -> float:
            times = server.cpu_times()
            return times.user + times.system

        yield url, cpu_s
    finally:
        supervisor.stop()


def agentrl(*words: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "agentrl.cli", *words],
        cwd=ROOT,
        env=offline(),
        stdin=subprocess.DEVNULL,
        check=True,
    )


def play_ours(task: TaskFiles, url: str, out: Path, args: argparse.Namespace) -> list[Row]:
    agentrl(
        *("eval", "--model", url, "--on", task.on, "--out", str(out), "--greedy"),
        *("--max-tokens", str(args.max_tokens), *task.options),
        f"eval.stop={json.dumps(STOP)}",
        f"rollout.max_concurrent_trajectories={args.in_flight}",
    )
    attempts = pq.read_table(out / "attempts.parquet").to_pylist()
    return [our_row(attempt) for attempt in sorted(attempts, key=lambda attempt: attempt["group_id"])]


def our_row(attempt: Mapping[str, Any]) -> Row:
    """Return an attempt of `agentrl eval`, of one turn, as a row."""
    mask, metrics = attempt["action_mask"], dict(attempt["metrics"])
    start = mask.index(True)
    assert all(mask[start:]), f"{attempt['task_id']}: more than one turn"
    text = attempt["messages"][-1]["content"]
    answers = {name: canonical(text, strict=name == "strict") for name in READINGS}
    [reward] = json.loads(attempt["extra_info"])["reward_details"]
    return Row(
        attempt["token_ids"][:start],
        attempt["token_ids"][start:],
        attempt["behavior_logprobs"][start:],
        text,
        {name: Reading(answers[name], metrics[f"reward/{reward}/accuracy_{name}"] == 1) for name in READINGS},
    )


def play_theirs(
    task: TaskFiles, url: str, model: Path, peer: Peer, out: Path, args: argparse.Namespace
) -> list[Row]:
    subprocess.run(
        [
            *(peer.python, SIDE, task.yaml, "--url", url, "--model", model),
            *("--in-flight", str(args.in_flight), "--out", out),
        ],
        env=offline(),
        stdin=subprocess.DEVNULL,
        check=True,
    )
    return [their_row(row) for row in json.loads(out.read_text())["rows"]]


def their_row(row: Mapping[str, Any]) -> Row:
    """Return a row of lm_eval's side."""
    found = {name: row["read"][filter_name] for name, filter_name in READINGS.items()}
    read = {
        name: Reading(None if each["answer"] == "[invalid]" else each["answer"], each["is_right"])
        for name, each in found.items()
    }
    return Row(row["prompt_ids"], row["ids"], row["logprobs"], row["text"], read)


# ------------------------------------------------------------------------------------------------- comparison


def right_answers(rows: Sequence[Row]) -> dict[str, int]:
    return {name: sum(row.read[name].is_right for row in rows) for name in READINGS}


def compare(ours: Sequence[Row], theirs: Sequence[Row]) -> dict[str, Any]:
    """Return how many rows agree in what, and every row whose tokens or verdicts differ, with the cause.

    `other_answers` has the rows in which the same text was read as different answers.

    Raises:
        ValueError: the sides have different numbers of rows.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"agentrl has {len(ours)} rows, lm_eval {len(theirs)}")
    pairs = list(zip(ours, theirs, strict=True))
    differing = [
        {"row": index} | difference
        for index, (one, other) in enumerate(pairs)
        if (difference := differences(one, other)) is not None
    ]
    return {
        "is_same": right_answers(ours) == right_answers(theirs),
        "same_prompts": sum(list(one.prompt_ids) == list(other.prompt_ids) for one, other in pairs),
        "same_tokens": sum(first_difference(one, other) is None for one, other in pairs),
        "same_verdicts": {
            name: sum(one.read[name].is_right == other.read[name].is_right for one, other in pairs)
            for name in READINGS
        },
        "same_answers": {
            name: sum(is_same_answer(one.read[name], other.read[name]) for one, other in pairs)
            for name in READINGS
        },
        "differing": differing,
        "other_answers": [
            {"row": index, "reading": name, "text": one.text[-TAIL_CHARS:]} | answers_of(one, other, name)
            for index, (one, other) in enumerate(pairs)
            for name in READINGS
            if first_difference(one, other) is None and not is_same_answer(one.read[name], other.read[name])
        ],
    }


def is_same_answer(ours: Reading, theirs: Reading) -> bool:
    """Return whether both sides read the same number, or none."""
    return number_of(ours.answer) == number_of(theirs.answer)


def number_of(answer: str | None) -> Fraction | None:
    """Return the number that lm_eval compares as text, or None: 18, 18.00 and $18. are the same."""
    if answer is None:
        return None
    try:
        return Fraction(answer.replace(",", "").replace("$", "").removesuffix("."))
    except ValueError:
        return None


def answers_of(ours: Row, theirs: Row, name: str) -> dict[str, str | None]:
    return {"agentrl": ours.read[name].answer, "lm_eval": theirs.read[name].answer}


def first_difference(ours: Row, theirs: Row) -> int | None:
    """Return the first position at which the sides sampled different tokens.

    Our tokens end with a stop text; those of the server, which lm_eval's side keeps, do not.
    """
    is_cut = any(stop in ours.text for stop in STOP)
    sampled = theirs.ids[: len(ours.ids)] if is_cut else theirs.ids
    for position, (one, other) in enumerate(zip_longest(ours.ids, sampled)):
        if one != other:
            return position
    return None


def differences(ours: Row, theirs: Row) -> dict[str, Any] | None:
    """Return in what the sides of a row differ, and why; None if in nothing that matters."""
    position = first_difference(ours, theirs)
    verdicts = {
        name: {"agentrl": ours.read[name].is_right, "lm_eval": theirs.read[name].is_right}
        for name in READINGS
        if ours.read[name].is_right != theirs.read[name].is_right
    }
    if position is None and not verdicts and list(ours.prompt_ids) == list(theirs.prompt_ids):
        return None
    return {
        "cause": cause(ours, theirs, position),
        "verdicts": verdicts,
        "answers": {name: answers_of(ours, theirs, name) for name in READINGS},
        "agentrl_text": ours.text[-TAIL_CHARS:],
        "lm_eval_text": theirs.text[-TAIL_CHARS:],
    }


def cause(ours: Row, theirs: Row, position: int | None) -> str:
    """Return the first of: other prompt, other tokens (with the first pair's log-probabilities), other
    reading.
    """
    if list(ours.prompt_ids) != list(theirs.prompt_ids):
        return f"prompt: {len(ours.prompt_ids)} and {len(theirs.prompt_ids)} tokens"
    if position is None:
        return "reading"
    chosen = [
        f"{row.ids[position]} ({row.logprobs[position]:.6f})" if position < len(row.ids) else "the end"
        for row in (ours, theirs)
    ]
    return f"generation: token {position} is {chosen[0]} and {chosen[1]}, with its log-probability"


def show(runs: Sequence[Mapping[str, Any]]) -> None:
    heads = f"{'agentrl':>8}{'lm_eval':>8}{'same verdict':>14}{'same answer':>13}"
    print(f"{'task':<18}{'rows':>5}  {'reading':<10}{heads}")
    for run in runs:
        ours, theirs = run["by_agentrl"]["right"], run.get("by_lm_eval", {}).get("right", {})
        for reading in READINGS:
            same, read = (run.get(name, {}).get(reading, "-") for name in ("same_verdicts", "same_answers"))
            counts = f"{ours[reading]:>8}{theirs.get(reading, '-'):>8}{same:>14}{read:>13}"
            print(f"{run['task']:<18}{run['rows']:>5}  {reading:<10}{counts}")
        for each in run.get("differing", ()):
            print(f"  row {each['row']}: {each['cause']}; verdicts that differ: {each['verdicts'] or 'none'}")


if __name__ == "__main__":
    sys.exit(main())
