"""The examples of agentrl/extras/hubs/README.md, in small: its commands, the real packages, a few steps."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.data.trajectories import decode, read_parquet
from parts.scripted import play
from agentrl.types import Trajectory
from parts.installed import interpreter_with, reasoning_gym_folder

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
SMALL = (
    *("trainer.steps=3", "trainer.test_freq=-1", "tracking.report=false", "buffer.groups_per_step=2"),
    *("rollout.group_size=4", "rollout.num_actors=1"),
)

LEAST_IN_A_GROUP = """
import verifiers as vf
from datasets import Dataset


def load_environment():
    rows = [{"question": f"{i} or {i + 7}?", "answer": ""} for i in range(10, 50)]

    def least(completions) -> list[float]:
        said = [completion[-1]["content"] for completion in completions]
        return [float(text == min(said)) for text in said]

    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[least]))
"""

NIM = {"piles": [1, 2]}
GAMES_OF_NIM = (
    ["[0 1]", "[1 1]", "[1 1]"],
    ["[0 1]", "[1 2]"],
    ["[1 1]", "[0 1]", "[1 1]"],
    ["[1 1]", "[1 1]", "[0 1]"],
    ["[1 2]", "[0 1]"],
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def learned(
    world, tmp_path: Path, example: str, data: list[str], *overrides: str, imitation_steps: int = 30
) -> list[dict]:
    """Run the commands of an example and return the records of its steps; nothing runs any more then."""
    rows = written(world, tmp_path, *data)
    script = [sys.executable, str(EXAMPLES / f"{example}_rows.py"), str(rows)]
    subprocess.run(script, check=True, timeout=120)
    imitate(world, tmp_path, example, f"trainer.steps={imitation_steps}")
    return trained(world, tmp_path, EXAMPLES / f"{example}.yaml", *overrides)


def written(world, tmp_path: Path, kind: str, *options: str) -> Path:
    """Write rows by `agentrl data KIND` and return their folder."""
    rows = tmp_path / "data"
    made = world.start("data", kind, str(rows), *options)
    assert made.wait() == 0, made.output()
    return rows


def imitate(world, tmp_path: Path, example: str, *overrides: str) -> None:
    """Make `warm_start` of the conversations in `data/sft.jsonl`, by the example's config."""
    sft = world.start(
        *("sft", str(EXAMPLES / f"{example}_sft.yaml"), f"data.train_files=[{tmp_path}/data/sft.jsonl]"),
        *(f"trainer.output={tmp_path}/warm_start", *overrides),
    )
    assert sft.wait(600) == 0, sft.output()


def trained(world, tmp_path: Path, config: Path, *overrides: str) -> list[dict]:
    """Train `warm_start` on the rows for three steps and return the records of the steps."""
    train = world.start(
        *("train", str(config), *SMALL, f"model.path={tmp_path}/warm_start", "data.val_files=[]"),
        *(f"data.train_files=[{tmp_path}/data/train.parquet]", f"trainer.run_dir={tmp_path}/run"),
        *overrides,
    )
    assert train.wait(900) == 0, train.output()
    assert train.left_behind() == []
    records = world.records(tmp_path / "run").train
    assert [record["step"] for record in records] == [1, 2, 3]
    assert all(math.isfinite(record["rollout/reward_mean"]) for record in records)
    assert "attempt failed" not in train.output()
    return records


def stored(tmp_path: Path, part: str) -> list[Trajectory]:
    files = sorted((tmp_path / "run" / part).glob("*.parquet"))
    return [trajectory for file in files for trajectory in decode(read_parquet(file))]


def test_words_of_reasoning_gym(world, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", reasoning_gym_folder())
    words = json.dumps({"spell_backward": {"max_word_len": 3}})
    system = "--system=Answer between <answer> and </answer>."
    options = ["--generators=spell_backward", f"--config={words}", "--train=200", "--val=8", system]
    records = learned(world, tmp_path, "spell_backward", ["reasoning_gym", *options])
    assert all(0 <= record["rollout/reward_mean"] <= 1 for record in records)


def test_the_ladder_of_openenv(world, tmp_path) -> None:
    python = interpreter_with("openenv==0.10.0")
    server = {"command": [python, str(EXAMPLES / "ladder_server.py"), "--port", "{port}"]}
    options = ["--shown=text", "--field=move", "--no-about", "--system=", "--train=32", "--val=4"]
    records = learned(
        world,
        tmp_path,
        "ladder",
        ["openenv", f"--server=ladder={json.dumps(server)}", *options],
        f"agent.environment_config.openenv.servers.ladder.command={json.dumps(server['command'])}",
    )
    assert all(0 <= record["rollout/reward_mean"] <= 1 for record in records)


def test_numbers_of_verifiers(world, tmp_path) -> None:
    python, folder = interpreter_with("verifiers==0.4.0"), EXAMPLES / "verifiers_environments"
    options = [f"--python={python}", f"--path={folder}", "--train=32", "--val=4"]
    records = learned(
        world,
        tmp_path,
        "larger_number",
        ["verifiers", "--environment=larger_number", *options],
        f"agent.environment_config.verifiers.python={python}",
        f"agent.environment_config.verifiers.path=[{folder}]",
    )
    assert all(0 <= record["rollout/reward_mean"] <= 1 for record in records)


def test_a_group_of_the_earlier_verifiers(world, tmp_path) -> None:
    """Rewards that compare the attempts of a group reach the learner."""
    python = interpreter_with("verifiers==0.1.14")
    (tmp_path / "least.py").write_text(LEAST_IN_A_GROUP)
    options = [f"--python={python}", f"--path={tmp_path}", "--train=32", "--val=4"]
    learned(
        world,
        tmp_path,
        "larger_number",
        ["verifiers", "--environment=least", *options],
        f"agent.environment_config.verifiers.python={python}",
        f"agent.environment_config.verifiers.path=[{tmp_path}]",
        "reward.sources={verifiers/least: verifiers_group}",
        imitation_steps=200,  # after fewer, some turns are empty, which the package takes for failures
    )
    groups: dict[tuple[str, int], dict[str, set[float]]] = {}
    for attempt in stored(tmp_path, "trajectories"):
        said = groups.setdefault((attempt.task_id, attempt.group_id), {})
        said.setdefault(attempt.messages[-1].content, set()).add(attempt.reward)
    assert len(groups) == 6
    for said in groups.values():
        assert said == {text: {float(text == min(said))} for text in said}


def test_a_lake_of_gymnasium(world, tmp_path) -> None:
    options = ["--games=FrozenLake-v1", '--options={"FrozenLake-v1": {"is_slippery": false}}']
    sizes = ["--no-about", "--system=", "--train=32", "--val=4"]
    records = learned(world, tmp_path, "lake", ["gymnasium", *options, *sizes])
    assert all(0 <= record["rollout/reward_mean"] <= 1 for record in records)


def test_customers_at_the_desk(world, tmp_path) -> None:
    """Tasks in tau2-bench's layout, with the domain of examples/desk.py and a customer of two replies."""
    desk = EXAMPLES / "desk"
    database = json.dumps({"database": f"{desk}/database.json"})
    options = [
        f"--tasks={desk}/tasks.json",
        "--environment=desk",
        f"--plugin={desk}.py",
        "--partner=scripted",
    ]
    options += [f"--policy=@{desk}/policy.md", f"--config={database}", "--val=1"]
    written(world, tmp_path, "tau2", *options)
    model = shutil.copytree(world.folder / "model", tmp_path / "warm_start") / "config.json"
    longer = json.loads(model.read_text()) | {"max_position_embeddings": 4096}  # four tools are described
    model.write_text(json.dumps(longer))
    trained(
        world,
        tmp_path,
        world.config,
        f"agent.plugins=[{desk}.py]",
        f"agent.environment_config.desk.database={desk}/database.json",
        "agent.interaction_config.scripted.replies=[Cancel it., Thank you.]",
        "agent.tools=[]",
        "agent.max_response_tokens=400",
        "data.max_prompt_tokens=3000",
        "learner.microbatch_tokens=4096",
    )
    attempts = stored(tmp_path, "trajectories")
    assert len(attempts) == 24
    assert {attempt.extra_info["id"] for attempt in attempts} == {"cancelled", "refused"}
    for attempt in attempts:  # a random model calls nothing, which is right for a customer to be refused
        assert attempt.reward == float(attempt.extra_info["id"] == "refused")


def test_two_seats_of_textarena(world, tmp_path) -> None:
    """One policy plays against itself, and in validation against its start, whose server the run starts."""
    python = interpreter_with("textarena==0.7.4")
    options = ["--games=Nim-v0", f"--options={json.dumps({'Nim-v0': NIM})}", f"--python={python}"]
    rows = written(world, tmp_path, "textarena", *options, "--val-opponent=frozen", "--train=16", "--val=4")
    (rows / "sft.jsonl").write_text("".join(map(conversations_of_nim, [python] * 5, GAMES_OF_NIM)))
    imitate(
        world, tmp_path, "larger_number", "trainer.steps=80", "trainer.batch_size=16", "data.max_tokens=1024"
    )
    trained(
        world,
        tmp_path,
        world.config,
        f"agent.environment_config.textarena.python={python}",
        f"agent.opponents.frozen.model.path={tmp_path}/warm_start",
        f"data.val_files=[{rows}/val.parquet]",
        "data.max_prompt_tokens=512",
        "agent.max_turns=8",
        "agent.max_response_tokens=800",
        "algorithm.conversation_credit=own",
    )
    over = [game for game in stored(tmp_path, "trajectories") if game.metrics["reward/textarena/is_over"]]
    names = [{game.conversations[seat].name for seat in game.segment_conversations} for game in over]
    assert {"player_0", "player_1"} in names
    for game, spoken in zip(over, names, strict=True):
        assert spoken <= {"player_0", "player_1"}
        if len(spoken) == 2:
            assert game.reward == 0.0, "zero-sum"
    validation = stored(tmp_path, "validation")
    assert validation
    for game in validation:
        mine = f"player_{game.extra_info['environment_kwargs']['seat']}"
        seats = {one.name: one.opponent for one in game.conversations[1:]}
        assert all(seats[name] == (None if name == mine else "frozen") for name in seats)


def conversations_of_nim(python: str, turns: list[str]) -> str:
    """Play a game and return what each seat saw and said, as lines for `agentrl sft`."""
    played = play(
        turns,
        agent="textarena",
        environment="textarena",
        environment_kwargs={"game": "Nim-v0", "options": json.dumps(NIM)},
        environment_config={"textarena": {"python": python}},
        reward="textarena",
        max_turns=4,
        max_response_tokens=4000,
    )
    assert played.failure is None, played.failure
    seats = [
        [{"role": m.role, "content": m.content} for m in one.messages] for one in played.conversations[1:]
    ]
    return "".join(f"{json.dumps({'messages': messages})}\n" for messages in seats)
