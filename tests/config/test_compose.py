"""Files and overrides become a Config; each mistake is one line that says what, where and what would be
right.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config.compose import HIDDEN, dump_config, load_config
from agentrl.config.reward import RewardConfig
from agentrl.config.schema import Config
from agentrl.errors import ConfigError

Write = Callable[[str, str], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Work in an empty folder; the fixture writes a file into it and returns its relative path."""
    monkeypatch.chdir(tmp_path)

    def write_file(name: str, text: str) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return name

    return write_file


def problem(path: str, *overrides: str, load: Callable[..., Any] = load_config) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------ composition


def test_an_empty_file_is_the_schema(write: Write) -> None:
    assert load_config(write("run.yaml", "")) == Config()
    assert load_config(write("run.yaml", "trainer:\nagent:\n")) == Config()


def test_defaults_list_with_groups_packages_and_self(write: Write) -> None:
    write("algorithm/careful.yaml", "clip_low: 0.1\nkl: {coefficient: 0.01}\n")
    write("sampling/four.yaml", "n: 4\ntemperature: 0.7\n")
    write("base.yaml", "trainer: {steps: 7, seed: 3}\n")
    first = write(
        "first.yaml", "defaults: [base, algorithm: careful, /sampling@eval: four, _self_]\neval: {n: 2}\n"
    )
    config = load_config(first)
    assert (config.algorithm.clip_low, config.algorithm.kl.coefficient) == (0.1, 0.01)
    assert (config.eval.n, config.eval.temperature, config.trainer.steps) == (2, 0.7, 7)
    last = write("last.yaml", "defaults: [_self_, /sampling@eval: four]\neval: {n: 2}\n")
    assert load_config(last).eval.n == 4


def test_a_defaults_list_names_configs(write: Write, recwarn: pytest.WarningsRecorder) -> None:
    write("quick.yaml", "trainer: {steps: 7}\n")
    assert load_config(write("run.yaml", "defaults: [quick]\n")).trainer.steps == 7
    assert load_config(write("run.yaml", "defaults: [/quick]\n")).trainer.steps == 7
    assert not list(recwarn), "hydra warns of a list without _self_"
    assert problem(write("run.yaml", "\ndefaults: [qick]\n")) == (
        "run.yaml:2: defaults: there is no config 'qick' in ., nor a packaged one; did you mean quick?"
    )
    assert problem("run.yaml").count("\n") == 0
    for path in ("../quick", f"{Path.cwd()}/quick"):
        assert problem(write("below/run.yaml", f"defaults: [{path}, _self_]\n")) == (
            f"below/run.yaml:1: defaults: {path!r} is a path; an entry is the name of a config in below or "
            "of a packaged one (agentrl config list), without .yaml"
        )


def test_a_file_of_a_group_names_others_of_its_group_and_of_the_packaged_ones(write: Write) -> None:
    write("algorithm/base.yaml", "clip_low: 0.1\n")
    write("algorithm/own.yaml", "defaults: [base, _self_]\nclip_high: 0.5\n")
    config = load_config(write("run.yaml", "defaults: [algorithm: own, _self_]\n")).algorithm
    assert (config.clip_low, config.clip_high) == (0.1, 0.5)
    write("algorithm/own.yaml", "defaults: [dapo, _self_]\nclip_low: 0.15\n")
    packaged = load_config(write("packaged.yaml", "defaults: [algorithm: dapo]\n")).algorithm
    assert load_config("run.yaml").algorithm == packaged.model_copy(update={"clip_low": 0.15})


def test_a_search_path_of_the_users_own_is_left_to_hydra(write: Write, tmp_path: Path) -> None:
    write("elsewhere/far.yaml", "trainer: {steps: 7}\n")
    places = f"hydra: {{searchpath: ['file://{tmp_path}/elsewhere']}}\n"
    assert load_config(write("run.yaml", f"defaults: [far, _self_]\n{places}")).trainer.steps == 7


def test_a_group_is_chosen_by_an_override(write: Write) -> None:
    write("algorithm/a.yaml", "clip_low: 0.1\n")
    write("algorithm/b.yaml", "clip_low: 0.3\n")
    path = write("run.yaml", "defaults: [algorithm: a]\n")
    assert load_config(path, ["algorithm=b"]).algorithm.clip_low == 0.3
    assert load_config(path, ["algorithm={clip_low: 0.4}"]).algorithm.clip_low == 0.4
    assert "a, b" in problem(path, "algorithm=c")


def test_a_users_file_builds_on_a_packaged_one(write: Write) -> None:
    path = write(
        "mine.yaml", "defaults: [quickstart, _self_]\ntrainer: {steps: 5}\ntracking: {baselines: null}\n"
    )
    config = load_config(path)
    assert config.agent.max_turn_tokens == 64
    assert config.trainer.steps == 5
    assert config.tracking.baselines == {}


def test_relative_and_absolute_paths(write: Write, tmp_path: Path) -> None:
    write("deep/er/run.yaml", "data: {train_files: [data/train.parquet]}\n")
    for path in ("deep/er/run.yaml", "./deep/../deep/er/run.yaml", str(tmp_path / "deep/er/run.yaml")):
        assert load_config(path).data.train_files == ("data/train.parquet",)


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("trainer.steps=20", "trainer", "steps", 20),
        ("+trainer.steps=20", "trainer", "steps", 20),
        ("++trainer.seed=9", "trainer", "seed", 9),
        ("~trainer.seed", "trainer", "seed", 0),
        ("data.train_files=[a.parquet,b.parquet]", "data", "train_files", ("a.parquet", "b.parquet")),
        ("trainer.run_dir='a b, c'", "trainer", "run_dir", "a b, c"),
        ("trainer.steps=null", "trainer", "steps", None),
        ("rollout={group_size:2}", "rollout", "group_size", 2),
        (
            "agent.tool_config.web={limits:{n:[1,2]}}",
            "agent",
            "tool_config",
            {"web": {"limits": {"n": [1, 2]}}},
        ),
        (
            "reward.sources={openai/gsm8k:mine}",
            "reward",
            "sources",
            {**RewardConfig().sources, "openai/gsm8k": "mine"},
        ),
        ("trainer.experiment_name='123'", "trainer", "experiment_name", "123"),
    ],
)
def test_overrides_keep_hydras_grammar(
    write: Write, override: str, section: str, key: str, value: Any
) -> None:
    config = load_config(write("run.yaml", "trainer: {seed: 3}\n"), [override])
    assert getattr(getattr(config, section), key) == value


def test_interpolations_see_environment_and_defaults(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_TEST_STEPS", "12")
    path = write(
        "run.yaml",
        "trainer:\n  steps: ${oc.env:AGENTRL_TEST_STEPS}\n  experiment_name: n${rollout.group_size}\n",
    )
    config = load_config(path)
    assert (config.trainer.steps, config.trainer.experiment_name) == (12, f"n{Config().rollout.group_size}")


def test_nothing_is_touched(write: Write, tmp_path: Path) -> None:
    path = write("run.yaml", "trainer: {steps: 3}\n")
    root = logging.getLogger()
    before = (Path.cwd(), list(root.handlers), root.level, sorted(os.listdir(tmp_path)))
    for _ in range(3):
        load_config(path, ["trainer.seed=1"])
    assert (Path.cwd(), list(root.handlers), root.level, sorted(os.listdir(tmp_path))) == before


def test_a_program_that_uses_hydra_itself_is_left_alone(write: Write, tmp_path: Path) -> None:
    path = write("run.yaml", "trainer: {steps: 3}\n")
    write("other/mine.yaml", "x: 1\n")
    with initialize_config_dir(str(tmp_path / "other"), version_base="1.3"):
        assert load_config(path).trainer.steps == 3
        problem(path, "nope=1")
        assert compose("mine").x == 1


# --------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("rollout.group_sise=3", "rollout.group_size"),
        ("group_size=3", "rollout.group_size"),
        ("trainer.group_size=3", "rollout.group_size"),
        ("rollout.weights.transprt=disk", "rollout.weights.transport"),
        ("learner.optimizer={learning_rate: 1, lrr: 2}", "learner.optimizer.lr"),
        ("rolout={}", "rollout"),
        ("+agent.opponents.past.refresh_step=10", "agent.opponents.past.refresh_steps"),
        ("+agent.opponents.past={model: {pth: x}}", "agent.opponents.past.model.path"),
    ],
)
def test_an_unknown_key_names_the_nearest_and_its_origin(write: Write, override: str, meant: str) -> None:
    text = problem(write("run.yaml", ""), override)
    assert f"did you mean {meant}?" in text
    assert repr(override) in text


def test_an_unknown_key_names_file_and_line(write: Write) -> None:
    write("algorithm/mine.yaml", "clip_low: 0.1\nclip_hihg: 0.3\n")
    path = write("run.yaml", "defaults: [algorithm: mine, _self_]\n\nagent:\n  max_turn: 3\n")
    lines = problem(path).splitlines()
    assert sorted(lines) == [
        "unknown key agent.max_turn; did you mean agent.max_turns? (run.yaml:4)",
        "unknown key algorithm.clip_hihg; did you mean algorithm.clip_high? (algorithm/mine.yaml:2)",
    ]


@pytest.mark.parametrize(
    ("override", "right"),
    [
        ("trainer.steps=0", "trainer.steps: 0 is wrong; it must be at least 1"),
        ("trainer.steps=1.5", "a whole number"),
        ("trainer.steps=many", 'trainer.steps: "many" is wrong; it must be a whole number'),
        ("learner.optimizer.lr=0", "greater than 0"),
        ("algorithm.clip_low=1.5", "at most 1"),
        ("eval.top_p=2", "at most 1"),
        ("data.shuffle=maybe", "true or false"),
        ("data.train_files=a.parquet", "a list, as in [a, b]"),
        ("data.train_files=[a,3]", "data.train_files[1]: 3 is wrong; it must be text"),
        ("learner.optimizer.betas=[0.9]", "complete"),
        ("learner.optimizer.betas=[0.9,0.9,0.9]", "a list of 2"),
        ("agent=3", "agent: 3 is wrong; it must be a section"),
        ("agent.tool_config=[1]", "a mapping, as in {name: value}"),
        ("rollout.weights.transport=carrier_pigeon", "one of disk, distributed"),
        ("rollout.on_outcome={completd: train}", "one of completed, truncated"),
        ("rollout.on_outcome={timeout: forget}", "one of train, mask, retry, replace, drop, shrink"),
        ("data.prompt_key=null", "data.prompt_key: null is wrong; it must be text"),
        ("rollout.top_p=0.9", "top_p=1"),
        ("algorithm.mode=on_policy", "algorithm.mode=decoupled"),
        ("learner.minibatches_per_step=99", "a minibatch needs at least one group"),
    ],
)
def test_a_wrong_value_says_what_would_be_right(write: Write, override: str, right: str) -> None:
    text = problem(write("run.yaml", ""), override)
    assert right in text
    assert len(text.splitlines()) == 1
    assert "pydantic" not in text.lower()


def test_each_problem_has_its_line(write: Write) -> None:
    path = write("run.yaml", "trainer:\n  steps: 0\nagent:\n  max_turns: none\n")
    assert problem(path, "data.shuffle=3").splitlines() == [
        "data.shuffle: 3 is wrong; it must be true or false (override 'data.shuffle=3')",
        'agent.max_turns: "none" is wrong; it must be a whole number (run.yaml:4)',
        "trainer.steps: 0 is wrong; it must be at least 1 (run.yaml:2)",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\nb: 3\n", "run.yaml:2: invalid YAML"),
        (
            "trainer: {steps: 1}\ntrainer: {seed: 2}\n",
            "run.yaml:2: invalid YAML: found duplicate key trainer",
        ),
        ("\ttrainer: 3\n", "run.yaml:1: invalid YAML"),
        ("- 3\n", "a config must be a mapping of sections"),
        ("just text\n", "a config must be a mapping of sections"),
        ("defaults: 3\n", "defaults must be a list"),
        ("defaults: [nope]\n", "defaults: there is no config 'nope'"),
        (
            "trainer: {run_dir: '${oc.env:AGENTRL_UNSET}'}\n",
            "trainer.run_dir: Environment variable 'AGENTRL_UNSET' not found (run.yaml:1)",
        ),
        ("trainer: {run_dir: '${trainer.nope}'}\n", "Interpolation key 'trainer.nope' not found"),
        ("trainer:\n  run_dir: ???\n", "Missing mandatory value"),
    ],
)
def test_a_broken_file_is_one_line(write: Write, text: str, message: str) -> None:
    found = problem(write("run.yaml", text))
    assert message in found
    assert len(found.splitlines()) == 1


def test_a_broken_file_of_the_defaults_list_is_named(write: Write) -> None:
    write("base.yaml", "trainer: {steps: 1\n")
    assert problem(write("run.yaml", "defaults: [base]\n")).startswith("base.yaml:")


def test_a_missing_file_names_the_nearest(write: Write) -> None:
    write("configs/our_own.yaml", "")
    assert "nearest: configs/our_own.yaml" in problem("configs/ourown.yaml")
    assert "nearest: configs/our_own.yaml" in problem("our_own.yaml")
    assert "is a folder" in problem("configs")
    assert "must end in .yaml" in problem(write("run.json", "{}"))


def test_bytes_that_are_no_text(write: Write, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x00a")
    assert "invalid UTF-8" in problem("run.yaml")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.steps=1,2", "has several values"),
        ("trainer.logger=[console", "cannot be read"),
        ("trainer", "cannot be read"),
        ("+trainer.steps=3", "already"),
        ("~trainer.seed", "does not exist"),
    ],
)
def test_a_broken_override_is_one_line(write: Write, override: str, message: str) -> None:
    text = problem(write("run.yaml", "trainer: {steps: 1}\n"), override)
    assert message in text
    assert len(text.splitlines()) == 1


# ------------------------------------------------------------------------------------------------------- dump


@pytest.mark.parametrize(
    "name",
    sorted(p.name for p in (Path(__file__).parents[2] / "configs").glob("*.yaml") if "sft" not in p.name),
)
def test_packaged_configs_load_and_survive_a_dump(name: str, tmp_path: Path) -> None:
    config = load_config(str(Path(__file__).parents[2] / "configs" / name))
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump_config(config))
    assert load_config(str(copy)) == config


texts = st.text(max_size=8).filter(
    lambda text: text != "???"
)  # how OmegaConf spells a value that must be given
texts |= st.sampled_from(
    [
        "1e3",
        "007",
        "null",
        "no",
        "${a}",
        "\\\\${",
        "\x85",
        " x ",
        "a: b",
        "#",
        "0x1F",
        "1_000",
        "12:30",
        ".5",
        "~",
    ]
)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
free_form = st.dictionaries(
    st.text(st.characters(categories=["L"]), min_size=1, max_size=5),
    scalars | st.lists(scalars, max_size=3),
    max_size=12,
)


# Few examples of many values each: reading a whole config takes most of the time.
@given(kwargs=free_form, name=texts, files=st.lists(texts, max_size=6))
@settings(max_examples=5, deadline=None)
def test_every_config_survives_a_dump(
    tmp_path_factory: pytest.TempPathFactory, kwargs: Any, name: str, files: list[str]
) -> None:
    raw = {
        "reward": {"custom_function": {"kwargs": kwargs}},
        "trainer": {"experiment_name": name},
        "data": {"train_files": files},
    }
    config = Config.model_validate(raw)
    copy = tmp_path_factory.mktemp("dump") / "copy.yaml"
    copy.write_text(dump_config(config))
    assert load_config(str(copy)) == config


def test_a_dump_hides_what_is_named_like_a_secret(write: Write) -> None:
    path = write(
        "run.yaml",
        "agent: {tool_config: {web: {api_key: abc123, hf_token: xyz789, stop_token: keep, n: 3}}}\nrollout: "
        "{api_key_env: MY_KEY}\n",
    )
    text = dump_config(load_config(path))
    assert "abc123" not in text
    assert "xyz789" not in text
    copy = load_config(write("copy.yaml", text))
    assert copy.agent.tool_config["web"] == {
        "api_key": HIDDEN,
        "hf_token": HIDDEN,
        "stop_token": "keep",
        "n": 3,
    }
    assert copy.rollout.api_key_env == "MY_KEY"


def test_the_home_folder_is_meant_wherever_a_path_begins_with_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my.yaml").write_text(
        "data: {train_files: [~/a.parquet]}\nmodel: {path: ~/m}\nagent: {tools: ['~/t.py:f'], tool_config: "
        "{search: {corpus: ~/c}}}\n"
        "tracking: {baselines: {b: ~/b}}\n"
    )
    config = load_config(
        "~/my.yaml",
        [
            "trainer.run_dir=~/run",
            "reward.custom_function.path='~/r.py'",
            "data.val_files=[~/v, ~/w]",
            "agent.tool_config.x={a: 'not ~/b', c: ~/c}",
        ],
    )
    paths = (
        *config.data.train_files,
        config.model.path,
        config.agent.tools[0],
        config.agent.tool_config["search"]["corpus"],
    )
    assert paths == (f"{tmp_path}/a.parquet", f"{tmp_path}/m", f"{tmp_path}/t.py:f", f"{tmp_path}/c")
    assert config.data.val_files == (f"{tmp_path}/v", f"{tmp_path}/w")
    assert config.tracking.baselines == {"b": f"{tmp_path}/b"}
    assert (config.trainer.run_dir, config.reward.custom_function.path) == (
        f"{tmp_path}/run",
        f"{tmp_path}/r.py",
    )
    assert config.agent.tool_config["x"] == {"a": "not ~/b", "c": f"{tmp_path}/c"}
