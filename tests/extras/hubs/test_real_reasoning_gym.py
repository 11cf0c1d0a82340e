"""The real reasoning-gym, installed into a folder of its own: pip compiles a part of it."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from parts.installed import reasoning_gym_folder

HERE = Path(__file__).parent
GENERATORS = (
    *(
        "binary_matrix",
        "countdown",
        "n_queens",
        "puzzle24",
        "simple_integration",
    ),
    *("spiral_matrix", "string_insertion", "basic_arithmetic", "bitwise_arithmetic", "chain_sum", "gcd"),
    *("leg_counting", "maze", "number_sorting", "spell_backward", "word_sorting"),
)
"""All whose scorer evaluates answers, but one that takes minutes and one that makes other tasks in each
process; and some others.
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def real() -> dict[str, str]:
    """Return the variables of a process that finds the real package."""
    return {**os.environ, "PYTHONPATH": reasoning_gym_folder()}


def run(code: str, env: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, *(["-c", code] if "\n" in code else [code]), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def print_evaluating() -> None:
    import inspect
    import sys

    from reasoning_gym.factory import DATASETS

    from agentrl.extras.hubs.evaluated_answers import ANSWER_FORMS, is_evaluating

    evaluating = {
        name
        for name, (dataset, _) in DATASETS.items()
        if is_evaluating(inspect.getsource(sys.modules[dataset.__module__]))
    }
    print(sorted(evaluating - set(ANSWER_FORMS)), sorted(set(ANSWER_FORMS) - set(DATASETS)))


def test_every_scorer_that_may_evaluate_an_answer_is_known(real) -> None:
    code = f"{inspect.getsource(print_evaluating)}\nprint_evaluating()\n"
    assert run(code, real).split("\n")[0] == "[] []"


def test_each_process_makes_the_same_tasks_whose_own_answers_reach_the_scorer(real) -> None:
    """Python's hashes of texts differ between the processes."""
    script = str(HERE / "generated_tasks.py")
    one, other = (run(script, {**real, "PYTHONHASHSEED": seed}, *GENERATORS) for seed in ("1", "2"))
    assert json.loads(one) == json.loads(other)
    for name, made in json.loads(one).items():
        assert made["own_scores"] == [1.0, 1.0], name
        assert made["given"] == [True, True], name


def test_rows_are_written_and_scored(real, tmp_path) -> None:
    command = ["-m", "agentrl.cli", "data", "reasoning_gym", str(tmp_path), "--train=8", "--val=4"]
    written = subprocess.run(
        [sys.executable, *command, "--generators=chain_sum,countdown"],
        env=real,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert written.returncode == 0, written.stderr
    scores = run(f"{inspect.getsource(print_scores)}\nprint_scores({str(tmp_path)!r})\n", real)
    assert json.loads(scores) == [[1.0, 0.0], [1.0, 0.01], [1.0, 0.0], [1.0, 0.01]]


def test_a_generator_that_makes_other_tasks_in_each_process_is_refused(real, tmp_path) -> None:
    command = [sys.executable, "-m", "agentrl.cli", "data", "reasoning_gym", str(tmp_path)]
    for seed, status in (("random", 2), ("0", 0)):
        done = subprocess.run(
            [*command, "--train=16", "--val=8", "--generators=gcd,polynomial_multiplication"],
            env={**real, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == status, done.stderr
        assert ("'polynomial_multiplication' makes another task" in done.stderr) == bool(status)
        assert (tmp_path / "train.parquet").exists() != bool(status)


def print_scores(folder: str) -> None:
    import json

    import pyarrow.parquet as pq

    from agentrl.extras.hubs.generated import Generated
    from agentrl.extras.hubs.reasoning_gym import ReasoningGym
    from agentrl.testing import play

    scores = []
    for row in pq.read_table(f"{folder}/val.parquet").to_pylist():
        origin = {
            "reasoning_gym": row["extra_info"]["reasoning_gym"],
            "question": row["extra_info"]["question"],
        }
        right = Generated(**origin["reasoning_gym"]).entry()["answer"]
        played = [
            play(
                [f"<answer>{says}</answer>"],
                agent="single_turn_agent",
                reward=ReasoningGym,
                extra_info=origin,
            )
            for says in (right, "__import__('os')")
        ]
        scores.append([sum(event.value for event in one.rewards) for one in played])
    print(json.dumps(scores))
