"""Templates, keys of attempts, names of data sets and models, and how many attempts are under way at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from agentrl.cli.evaluation import default_folder, load_base
from agentrl.config.evaluation import EvalConfig
from agentrl.config.model import ModelConfig
from agentrl.config.schema import Config
from agentrl.errors import ConfigError, DataError
from agentrl.evaluation.attempt_keys import (
    AttemptSettings,
    attempt_key,
    fingerprint,
    problem_hash,
    producer_of,
)
from agentrl.evaluation.concurrency import START, Concurrency
from agentrl.evaluation.data_sets import resolve_files
from agentrl.evaluation.model_place import read_place
from agentrl.evaluation.templates import TEMPLATES, Template, applied, find_template, template_of
from agentrl.types import Message, Task
from parts.trajectories import make_task


def task(question: str = "6 * 7?", **fields) -> Task:
    return make_task(question, **fields)


# -------------------------------------------------------------------------------------------------- templates


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_holds_the_question_once(name: str) -> None:
    template = TEMPLATES[name]
    messages = template.messages("What {question} is\\n this?")
    assert sum(message.content.count("What {question} is\\n this?") for message in messages) == 1
    assert [message.role for message in messages] == (["system", "user"] if template.system else ["user"])
    assert name == template.full_name


def test_a_template_takes_the_place_of_the_instructions_of_the_row() -> None:
    row = task(messages=(Message("system", "Be brief."), Message("user", "6 * 7?")))
    assert applied(row, find_template("question@1")).messages == (Message("user", "6 * 7?"),)
    assert applied(row, None) is row
    known = dataclasses.replace(row, extra_info={"question": "6 times 7?"})
    assert applied(known, find_template("question")).messages == (Message("user", "6 times 7?"),)


def test_a_conversation_has_no_question() -> None:
    row = task(messages=(Message("user", "a"), Message("assistant", "b"), Message("user", "c")))
    with pytest.raises(DataError, match="has user, assistant, user; use template none"):
        applied(row, find_template("boxed@1"))


def test_templates_are_chosen_by_data_set() -> None:
    templates = {"gsm8k": "gsm8k@1", "*": "boxed"}
    assert template_of("gsm8k", templates) == TEMPLATES["gsm8k@1"]
    assert template_of("aime_2024", templates) == TEMPLATES["boxed@1"]
    assert template_of("gsm8k", {}) is None
    with pytest.raises(ConfigError, match="'boxed@9' does not exist; available: none, gsm8k@1"):
        find_template("boxed@9")


# ------------------------------------------------------------------------------------------------------- keys


def produced(
    config: Config, *, model: str = "m", template: Template | None = None, is_scored: bool = True
) -> dict:
    reward = config.reward if is_scored else None
    return producer_of(
        AttemptSettings(model, config.model, config.data, config.agent, config.eval, reward), template
    )


def test_whatever_may_change_an_attempt_changes_its_key(tmp_path: Path) -> None:
    base = Config()
    ways = [
        produced(base),
        produced(base, model="other"),
        produced(base, template=TEMPLATES["boxed@1"]),
        produced(base, is_scored=False),
        *(
            produced(base.model_copy(update={"eval": EvalConfig(**{name: value})}))
            for name, value in {
                "temperature": 0.5,
                "top_p": 0.9,
                "top_k": 5,
                "min_p": 0.1,
                "stop": ("x",),
                "ignore_eos": True,
            }.items()
        ),
        produced(base.model_copy(update={"agent": base.agent.model_copy(update={"tools": ("python",)})})),
        produced(base.model_copy(update={"agent": base.agent.model_copy(update={"max_turns": 3})})),
        produced(base.model_copy(update={"reward": base.reward.model_copy(update={"weight": 2.0})})),
    ]
    keys = {attempt_key(way)("problem", 0, 0) for way in ways}
    assert len(keys) == len(ways)
    one = attempt_key(ways[0])
    assert len({one("problem", 0, 0), one("problem", 0, 1), one("problem", 1, 0), one("other", 0, 0)}) == 4


def test_how_many_attempts_there_are_changes_no_key() -> None:
    more = Config().model_copy(update={"eval": EvalConfig(n=32, timeout_s=1.0)})
    assert attempt_key(produced(more))("p", 0, 0) == attempt_key(produced(Config()))("p", 0, 0)


def test_a_file_that_was_edited_is_another_reward(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("1")
    custom = Config().reward.custom_function.model_copy(update={"path": str(file)})
    config = Config().model_copy(
        update={"reward": Config().reward.model_copy(update={"custom_function": custom})}
    )
    before = produced(config)
    file.write_text("2")
    assert before != produced(config)


def test_a_problem_is_its_content_wherever_it_stands() -> None:
    assert problem_hash(task()) == problem_hash(task(task_id="other:7"))
    different = [
        task("5 * 7?"),
        task(ground_truth="42"),
        task(agent_name="b"),
        task(extra_info={"a": 1}),
        task(tools_kwargs={"x": {}}),
    ]
    assert len({problem_hash(one) for one in [task(), *different]}) == len(different) + 1


def test_a_fingerprint_sees_weights_and_templates(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = bytearray(3 * 2**20)
    (tmp_path / "model.safetensors").write_bytes(weights)
    first = fingerprint(tmp_path)
    assert first == fingerprint(tmp_path)
    weights[: len(weights)] = bytes(byte ^ 1 for byte in weights)  # as a step of an optimizer: everywhere
    (tmp_path / "model.safetensors").write_bytes(weights)
    second = fingerprint(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("x")
    assert len({first, second, fingerprint(tmp_path)}) == 3
    with pytest.raises(ConfigError, match="not the folder of a model"):
        fingerprint(tmp_path / "absent")


# ------------------------------------------------------------------------------------------ names and options


@pytest.mark.parametrize(
    ("on", "problem"),
    [
        ([], "choose what to evaluate on"),
        (["gsm9k"], "'gsm9k' is not a dataset"),
        (["a/x.parquet", "b/x.parquet"], "contains 'x' twice"),
    ],
)
def test_what_is_no_data_set(tmp_path: Path, on: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        resolve_files(on, data_dir=None, scratch=tmp_path)


def test_where_the_model_is() -> None:
    config = ModelConfig()
    assert read_place("owner/model", config, urls=())[1].path == "owner/model"
    place, _ = read_place("http://a:1/,http://b:2", config, urls=())
    assert (place.kind, place.urls) == ("sglang", ("http://a:1", "http://b:2"))
    assert read_place("https://api.host/v1", config, urls=())[0].kind == "openai"
    for wrong, problem in {
        "http://a/v1,http://b": "all URLs must have the same protocol",
        "http://a,folder": "give one folder, or only URLs",
        "ftp://a": "is not the URL of a server",
    }.items():
        with pytest.raises(ConfigError, match=problem):
            read_place(wrong, config, urls=())


def test_options_come_to_a_config() -> None:
    config, is_named = load_base(
        ["agent.max_turns=3"],
        {"n": 4, "temperature": 0.0, "top_p": None},
        tools="python,calculator",
        templates=["gsm8k=gsm8k@1", "boxed"],
    )
    assert not is_named
    assert (config.eval.n, config.eval.temperature, config.agent.max_turns) == (4, 0.0, 3)
    assert config.agent.tools == ("python", "calculator")
    assert config.eval.templates == {"gsm8k": "gsm8k@1", "*": "boxed"}
    assert config.data.overlong_prompts == "error", "a benchmark loses no problem in silence"


def test_results_have_a_folder_of_the_models_name() -> None:
    assert default_folder("runs/a/model/") == Path("runs/eval/model")
    assert default_folder("http://127.0.0.1:30000/v1,http://b") == Path("runs/eval/127.0.0.1_30000_v1")
    assert default_folder("owner/Name-1.5B") == Path("runs/eval/Name-1.5B")


# ------------------------------------------------------------------------------------------------ concurrency


def rounds(concurrency: Concurrency, num: int) -> None:
    for _ in range(num):
        concurrency.went_well(concurrency.round, 0.0, 0)


def simulated(
    seconds_per_token: Callable[[int], float], *, num_rounds: int = 60, limit: int = 1024
) -> tuple[list[int], Concurrency]:
    """Return how many attempts of 100 tokens were under way in each round, on servers that are so fast with
    so many.
    """
    now = [0.0]
    concurrency = Concurrency(limit, clock=lambda: now[0])
    seen = []
    for _ in range(num_rounds):
        under_way, began_in = concurrency.now, concurrency.round
        seconds = 100 * seconds_per_token(under_way)
        now[0] += seconds
        seen.append(under_way)
        for _ in range(under_way):
            concurrency.went_well(began_in, seconds, 100)
    return seen, concurrency


def test_attempts_at_once_grow_fast_then_shrink_by_half_then_grow_slowly() -> None:
    concurrency = Concurrency(1000)
    assert concurrency.now == START
    rounds(concurrency, START)
    assert concurrency.now == 2 * START, "each round doubles"
    concurrency.trouble(concurrency.round, "overload")
    assert concurrency.now == START
    rounds(concurrency, START)
    assert concurrency.now in (START, START + 1), "a round makes room for one"
    assert concurrency.reasons == {"overload": 1}


def test_attempts_of_the_same_round_halve_once() -> None:
    concurrency = Concurrency(1000)
    for _ in range(START):
        concurrency.trouble(0, "timeout")
    assert concurrency.now == START // 2
    assert concurrency.reasons == {"timeout": 1}


def test_the_bounds_hold() -> None:
    concurrency = Concurrency(20)
    rounds(concurrency, 100)
    assert concurrency.now == 20
    for _ in range(20):
        concurrency.trouble(concurrency.round, "overload")
    assert concurrency.now == 1


@pytest.mark.parametrize(
    ("servers", "seconds_per_token"),
    {
        "a GPU, whose batches cost little": lambda num: 0.01 * (1 + num / 100),
        "one core, where everything takes its turn": lambda num: 0.001 * num,
        "slower by half, and then as fast as before": lambda num: 0.01 if num < 300 else 0.015,
    }.items(),
)
def test_servers_that_are_well_filled_are_not_spared(
    servers: str, seconds_per_token: Callable[[int], float]
) -> None:
    seen, concurrency = simulated(seconds_per_token)
    assert seen[-1] == 1024, servers
    assert not concurrency.reasons


def test_servers_that_collapse_get_as_many_as_they_bear() -> None:
    """Beyond 100 attempts their cache is too small: what one wins another loses, and all compute again."""
    seen, concurrency = simulated(lambda num: 0.01 * max(1.0, (num / 100) ** 3), num_rounds=400)
    assert set(concurrency.reasons) == {"latency"}
    assert min(seen[50:]) >= 40, "but not fewer"
    assert max(seen[50:]) <= 200


async def test_no_more_begin_than_there_is_room_for() -> None:
    concurrency = Concurrency(3)
    attempts = ["a", "b", "c", "d"]
    for attempt in attempts[:3]:
        await concurrency.begin(attempt)
    with trio.move_on_after(0.01) as waited:
        await concurrency.begin(attempts[3])
    assert waited.cancelled_caught
    concurrency.end(attempts[0])
    with trio.fail_after(1):
        await concurrency.begin(attempts[3])
