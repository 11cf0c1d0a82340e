"""Every benchmark runs at this commit, in a short form: to its end, within its deadline, with figures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.chat.chat import Chat
from agentrl.chat.tiny import write_tiny_tokenizer
from parts.learner import write_tiny_model

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
PARTS = {
    "controller_process",
    "house_reach",
    "instant_server",
    "lm_eval_side",
    "lm_eval_tasks",
    "machine",
    "paced_prediction",
    "paced_server",
    "paced_tool",
    "quickstart_runs",
    "soak_samples",
    "train_behind",
    "trl_step",
    "turns",
    "verl_advantages",
    "vllm_engine",
}
"""Modules that benchmarks share, and processes that they start."""
QUICK_RUN = (
    "trainer.steps=2 data.max_val_rows=8 buffer.groups_per_step=2 rollout.group_size=2 trainer.save_freq=-1 "
    "tracking.report=false"
)

SHORT: dict[str, str] = {
    "advantages": "--out {out} --peers {none}",
    "architectures": "llama --out {out}",
    "behaviour": "--updates 20 --steps 2 --folder {runs} --out {out}",
    "beside_lm_eval": "arithmetic={model} --rows 6 --max-tokens 8 --num-blocks 64 --peers {none} "
    "--runs {runs} --out {out}",
    "buffer_waits": "--groups 16 --actors 4 --steps 1 --out {out}",
    "coverage": "--evaluations 20 --problems 30 --out {out}",
    "data_plane": "--tokens 0.02 --attempt-tokens 256 --out {out}",
    "distillation": "--teacher {model} --steps 2 --out {out} --runs {runs} " + QUICK_RUN,
    "gpu_step": "--tokens 256 --microbatch-tokens 256 --warmups 1 --repeats 1 --out {out}",
    "hops": "--out {out}",
    "house": "--out {out}",
    "oracles": "record {runs} --cases plain",
    "in_flight": "--in-flight 50 --servers 1 --seconds 4 --seconds-per-token 0.005 --mean-tokens 20 "
    "--prompts 50,150 --out {out}",
    "journal_age": "--steps 40 --steps-without 40 --groups 4 --group-size 2 --arrivals 5 --out {out}",
    "lag": f"--rows on_policy --seeds 0 --steps 2 --eval-n 1 --out {{out}} --runs {{runs}} {QUICK_RUN}",
    "learner_memory": "--tokens 512 --hidden 64 --layers 2 --vocabulary 256 --out {out}",
    "learner_step": "--budgets 1024 2048 --repeats 1 --prompts 50 --hidden 32 --layers 1 --vocabulary 256 "
    "--trl {none} --out {out}",
    "load_memory": "--layers 1 --hidden 64 --dtypes bfloat16 --large --out {out}",
    "logprob_kernels": "--tokens 6 3 --vocabulary 30 --out {out}",
    "logprob_memory": "--tokens 64 --vocabulary 2000 --out {out}",
    "nim": f"--setups self_play past roles --steps 2 --out {{out}} --runs {{runs}} --overrides {QUICK_RUN}",
    "peak_memory": "--cases tiny:plain --tokens 64 --out {out}",
    "prefix_tree": "--forks 3 --tokens 64 --shared 0.5 --repeats 1 --hidden 32 --layers 1 --vocabulary 256 "
    "--out {out}",
    "publish": "--hidden 64 --bucket-mib 1 --repeats 1 --calls 2 --out {out}",
    "recipes": f"--recipes grpo --seeds 0 --steps 2 --at-least 0 --out {{out}} --runs {{runs}} {QUICK_RUN}",
    "resumed": f"--ways sigterm --seeds 0,1 --steps 6 --window 1 --out {{out}} --runs {{runs}} {QUICK_RUN} "
    "trainer.steps=6",
    "rollout_processes": "--processes 3 --groups 6 --group-size 2 --servers 1 --seconds-per-token 0.01 "
    "--mean-tokens 20 --out {out}",
    "rollout_overhead": "--n 64 --repeats 1 --peers {none} --template {template} --out {out}",
    "save": "--hidden 64 --repeats 1 --out {out}",
    "smollm": "--configs smollm_lora --seeds 0 --at-least 0 --warm-start-steps 1 --out {out} --runs {runs} "
    + QUICK_RUN,
    "serving": "--ways float32 --requests 2 --prompt 8 --new 4 --groups 1 --repeats 1 --peers {none} "
    "--out {out}",
    "simulation": "--setups sync_vs_async --scale none --steps 1 --in-flight 512 --out {out}",
    "sizes": "--ranks 8 --models 7B --out {out}",
    "smollm_step": "--model {model} --steps 2 --peers {none} --out {out}",
    "soak": "--calls 100 --minutes 0.5 --warm-up 0.2 --in-flight 20 --every 2 --seconds-per-token 0.01 "
    "--mean-tokens 20 --kill-every 10 --out {out}",
    "verl_losses": "--tables modes --out {out}",
    "verl_scripts": "{checkout} {checkout}/table.tsv --verl none --out {out}",
    "view_live": f"--runs {{runs}} --out {{out}} {QUICK_RUN}",
    "view_attempts": "--files 4 --rows 40 --tokens 12 --out {out}",
    "worlds": "--out {out}",
    "sync_vs_async": "--steps 2 --warmup 5 --seconds-per-token 0.0005 --mean-tokens 20 --out {out}",
}
DEADLINE_S = 900
"""Of one benchmark, on two busy cores; most need seconds."""


def test_every_benchmark_has_a_short_form() -> None:
    assert {path.stem for path in BENCHMARKS.glob("*.py")} - PARTS == set(SHORT)


def write_checkout(folder: Path) -> None:
    """Write one script as verl has them, and what became of it before."""
    folder.mkdir()
    (folder / "run.sh").write_text(
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=a.parquet "
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct\n"
    )
    (folder / "table.tsv").write_text("file\tclass\nrun.sh\tclean\n")


def run_to_the_end(command: list[str], **env: str) -> tuple[int, str]:
    """Return the exit status and what was said.

    Its whole process group is killed at the deadline, which fails the test.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        start_new_session=True,
        env={**os.environ, **env},
    )
    try:
        said, _ = process.communicate(timeout=DEADLINE_S)
        return process.returncode, said
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S + 60)
@pytest.mark.parametrize("name", SHORT)
def test_a_benchmark_runs(name: str, tmp_path: Path) -> None:
    """The figures of such short forms may miss what is wanted of the long ones (exit code 1); they are there
    all the same.
    """
    out = tmp_path / "figures.json"
    template = ROOT / "agentrl" / "chat" / "tiny.jinja"
    places = {"out": out, "runs": tmp_path / "runs", "none": tmp_path / "none", "template": template}
    if "{model}" in SHORT[name]:
        places["model"] = tmp_path / "model"
        write_tiny_tokenizer(places["model"])
        write_tiny_model(places["model"], Chat.load(str(places["model"])).vocab_size)
    if "{checkout}" in SHORT[name]:
        places["checkout"] = tmp_path / "checkout"
        write_checkout(places["checkout"])
    arguments = SHORT[name].format(**places).split()
    status, said = run_to_the_end(
        [sys.executable, str(BENCHMARKS / f"{name}.py"), *arguments], OMP_NUM_THREADS="1"
    )
    assert "Traceback" not in said, said[-4000:]
    assert status in (0, 1), said[-4000:]
    if "--out" in arguments:
        figures = json.loads(out.read_text())
        assert all(
            {"commit", "cpu"} <= measured.keys()
            for measured in ([figures] if "cpu" in figures else figures["runs"])
        )
