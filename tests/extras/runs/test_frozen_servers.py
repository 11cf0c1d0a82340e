"""Servers of an opponent and of a teacher that the run starts: asked, killed, started again, stopped at the
end; and the same for `agentrl eval` and `agentrl play`.
"""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.data.trajectories import decode, read_parquet
from agentrl.errors import ConfigError
from agentrl.extras.research.audit import audit_run
from parts.frozen import write_frozen

DEBATE = """
from agentrl.plugins import AgentLoop
from agentrl.types import Message


class Debate(AgentLoop):
    name = "debate"
    uses_tools = False

    def opponents(self, task):
        return ["frozen"]

    async def run(self, task, session):
        other = session.conversation("other", [Message("user", "begin")], opponent="frozen")
        for _ in range(2):
            session.add_user_message((await other.generate()).message.content)
            other.add_user_message((await session.generate()).message.content)
"""
RESTARTED = "restart 1 of 3"


@pytest.fixture
def debate(world, tmp_path):
    """The overrides of a run in which the policy talks with an opponent, whose server the run starts."""
    (tmp_path / "debate.py").write_text(DEBATE)
    frozen = write_frozen(world.folder / "model", tmp_path / "frozen_model")
    return [
        f"trainer.run_dir={tmp_path / 'run'}",
        f"data.train_files=[{world.write_rows(tmp_path, {}, default='debate')}]",
        f"agent.plugins=[{tmp_path / 'debate.py'}]",
        f"agent.opponents.frozen.model.path={frozen}",
        "agent.max_turns=4",
    ]


def servers_of(command, folder):
    return [p for p in command.processes() if f"agentrl.extras.embedded {folder}" in " ".join(p.cmdline())]


@pytest.mark.slow
def test_the_run_starts_them_restarts_one_that_is_killed_and_stops_them(world, tmp_path, debate):
    teacher = write_frozen(world.folder / "model", tmp_path / "teacher_model")
    run = tmp_path / "run"
    command = world.start(
        "train",
        str(world.config),
        *debate,
        f"algorithm.distillation.servers.model.path={teacher}",
        "algorithm.distillation.servers.num_servers=2",
        "trainer.steps=12",
        "trainer.save_freq=-1",
        "rollout.on_outcome.model_error=drop",  # one that is lost is seen
    )
    command.wait_until(lambda: world.num_steps(run) >= 2)
    assert [len(servers_of(command, folder)) for folder in (tmp_path / "frozen_model", teacher)] == [1, 2]
    table = json.loads((run / "control" / "servers.json").read_text())
    assert {server["name"]: server["origin"] for server in table["servers"]} == {
        "server_0": "started",
        "opponent_frozen_0": "opponent_frozen",
        "teacher_0": "teacher",
        "teacher_1": "teacher",
    }
    servers_of(command, tmp_path / "frozen_model")[0].kill()
    command.wait_until(lambda: RESTARTED in command.output())
    assert command.wait(240) == 0, command.output()
    assert command.left_behind() == []
    assert {log.name for log in (run / "servers").iterdir()} >= {"opponent_frozen_0.log", "teacher_1.log"}
    audit = audit_run(run).audit
    assert audit.is_balanced
    result = json.loads((run / "result.json").read_text())
    assert result["counts"]["dropped"] == {}, "turns wait for the restart"
    for file in (run / "trajectories").glob("step_*.parquet"):
        for trajectory in decode(read_parquet(file)):
            other = trajectory.conversations[1]
            assert (other.name, other.opponent) == ("other", "frozen")
            assert trajectory.teacher_logprobs is not None
            assert trajectory.metrics["num_opponent_turns"] == 2


@pytest.mark.slow
def test_an_opponent_follows_the_policy_across_a_killed_server_and_a_resume(world, tmp_path, debate):
    run = tmp_path / "run"
    arguments = [
        "train",
        str(world.config),
        *(one for one in debate if "model.path" not in one),
        "agent.opponents.frozen.refresh_steps=2",
        "learner.optimizer.lr=0.05",
        "algorithm.entropy_coefficient=1.0",  # a random model earns no reward: this is what it learns from
        "trainer.save_freq=3",
        "buffer.max_staleness=0",
    ]
    first = world.start(*arguments, "trainer.steps=6")
    first.wait_until(lambda: world.num_steps(run) >= 2)
    table = json.loads((run / "control" / "servers.json").read_text())["servers"]
    [url] = [server["url"] for server in table if server["name"] == "opponent_frozen_0"]
    port = f"--port {url.rpartition(':')[2]}"
    [process] = [p for p in servers_of(first, world.folder / "model") if port in " ".join(p.cmdline())]
    process.kill()
    first.wait_until(lambda: RESTARTED in first.output())
    assert first.wait(240) == 0, first.output()
    second = world.start(*arguments, "trainer.steps=7")  # resumes at 6
    assert second.wait(240) == 0, second.output()
    assert "opponent frozen is the policy of step 6" in second.output()
    assert second.left_behind() == []

    records = {record["step"]: record for record in world.records(run).train}
    assert [records[step]["opponents/frozen/step"] for step in range(1, 8)] == [0, 2, 2, 4, 4, 6, 6]
    kept = [folder.name.removeprefix("step_").split("_v") for folder in (run / "opponents").iterdir()]
    at_step = {0: 0} | {int(step): int(version) for step, version in kept}
    for step in range(1, 8):
        file = run / f"trajectories/step_{step:06d}.parquet"
        played = {v for t in decode(read_parquet(file)) for v in t.conversations[1].opponent_versions}
        due = (step - 1) // 2 * 2
        # Without staleness a batch is played between two publishes, thus against one policy.
        assert len(played) == 1
        if due in at_step:
            assert played == {at_step[due]}
        else:
            assert due > 0, "older snapshots are removed"
            assert min(played) > 0


@pytest.mark.slow
def test_a_run_that_goes_on_elsewhere_has_the_opponent_that_it_had(world, tmp_path, debate):
    arguments = [
        "train",
        str(world.config),
        *(one for one in debate if "model.path" not in one and "run_dir" not in one),
        "agent.opponents.frozen.refresh_steps=2",
        "learner.optimizer.lr=0.05",
        "algorithm.entropy_coefficient=1.0",
        "trainer.save_freq=3",
        f"trainer.upload_to=file://{tmp_path}/storage/run",
    ]
    here, there = tmp_path / "here", tmp_path / "there"
    first = world.start(*arguments, f"trainer.run_dir={here}", "trainer.steps=3")
    assert first.wait(240) == 0, first.output()
    [snapshot] = (here / "opponents").glob("step_000002_v*")
    weights = (snapshot / "model.safetensors").read_bytes()
    shutil.rmtree(here)

    second = world.start(*arguments, f"trainer.run_dir={there}", "trainer.steps=5")
    assert second.wait(240) == 0, second.output()
    assert "opponent frozen is the policy of step 2" in second.output()
    assert "is not in" not in second.output()
    assert (there / "opponents" / snapshot.name / "model.safetensors").read_bytes() == weights
    version = int(snapshot.name.partition("_v")[2])
    played = {
        v
        for t in decode(read_parquet(there / "trajectories/step_000004.parquet"))
        for v in t.conversations[1].opponent_versions
    }
    assert version in played
    summary = (there / "summary.md").read_text()
    assert "- opponent frozen: 40 attempts trained on, accuracy " in summary, summary


@pytest.mark.slow
def test_a_model_that_no_server_can_load_ends_the_start_with_its_reason(world, tmp_path, debate):
    weights = next((tmp_path / "frozen_model").glob("*.safetensors"))
    tensors = load_file(weights)
    del tensors["model.norm.weight"]
    save_file(tensors, weights)
    command = world.start("train", str(world.config), *debate, "trainer.steps=1")
    assert command.wait(240) != 0
    assert "the server refused to start" in command.output()
    assert "its files lack 1 weights, as 'model.norm.weight'" in command.output()
    assert command.left_behind() == []


@pytest.mark.slow
def test_an_evaluation_starts_the_opponent_and_its_weights_are_a_part_of_what_is_kept(
    world, tmp_path, debate
):
    (_, _, *opponent, _) = debate
    out = tmp_path / "results"

    def evaluate():
        asked = ["eval", world.config, *opponent, "agent.max_turns=4", "--agent", "debate", "--out", out]
        options = ["--on", world.folder / "data/val.parquet"]
        result = CliRunner().invoke(app, [str(word) for word in [*asked, *options]])
        if result.exception is not None:
            raise result.exception
        return result.output

    assert "starting 1 embedded server(s) of agent.opponents.frozen" in evaluate()
    attempts = decode(read_parquet(out / "attempts.parquet"))
    assert [attempt.conversations[1].opponent for attempt in attempts] == ["frozen"] * 9
    assert all(attempt.metrics["num_opponent_turns"] == 2 for attempt in attempts)
    assert "9 of them already finished" in evaluate()

    write_frozen(world.folder / "model", tmp_path / "frozen_model", seed=12)
    assert "already finished" not in evaluate()

    tokenizer = tmp_path / "frozen_model" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|im_end|>", "<|end|>"))
    with pytest.raises(
        ConfigError, match=r"agent.opponents.frozen: .* has another tokenizer than the policy"
    ):
        evaluate()


@pytest.mark.slow
def test_play_starts_the_opponent_of_its_row(world, tmp_path, debate):
    (tmp_path / "turns.yaml").write_text("[one, two]")
    asked = ["play", world.config, *debate, "--row", "0", "--model", tmp_path / "turns.yaml"]
    result = CliRunner().invoke(app, [str(word) for word in asked])
    assert result.exit_code == 0, result.output + repr(result.exception)
    assert "opponent frozen" in result.output
