"""A run with an adapter per role: servers and learner agree on each, a resumed run goes on with all, and all
are exported.
"""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

import agentrl
from agentrl.cli.app import app
from agentrl.data.trajectories import decode, read_parquet
from agentrl.extras.research.replay import load_replay_config, replay

TEAM = """
from agentrl.plugins import AgentLoop
from agentrl.types import Message


class Team(AgentLoop):
    name = "team"
    uses_tools = False

    async def run(self, task, session):
        plan = (await session.generate()).message.content
        worker = session.conversation("worker", [Message("user", plan)])
        answer = (await worker.generate()).message.content
        session.add_user_message(answer)
        await session.generate()
"""


@pytest.mark.slow
def test_planner_and_worker_train_adapters_of_their_own(world, tmp_path):
    (tmp_path / "team.py").write_text(TEAM)
    run = tmp_path / "run"
    overrides = [
        f"trainer.run_dir={run}",
        f"data.train_files=[{world.write_rows(tmp_path, {}, default='team')}]",
        f"agent.plugins=[{tmp_path / 'team.py'}]",
        "agent.max_turns=4",
        "agent.max_response_tokens=256",
        "model.lora={rank: 4, alpha: 64, roles: {worker: [worker]}}",
        "learner.world_size=2",
        "learner.optimizer.lr=0.05",
        # a random model earns no reward: this is what it learns from
        "algorithm.entropy_coefficient=1.0",
        "buffer.max_staleness=0",
        "rollout.weights.verify=true",
        "trainer.save_freq=2",
    ]
    for steps in (2, 4):  # the second one resumes
        config = agentrl.load_config(str(world.config), [*overrides, f"trainer.steps={steps}"])
        result = agentrl.train(config)
        assert (result.step, result.counts.is_balanced) == (steps, True)

    # Steps after the first were sampled with trained adapters: server and learner agree token by token.
    records = world.records(run).train
    assert len(records) == 4
    assert all(record["learner/mismatch_max"] < 1e-4 for record in records)
    played = decode(read_parquet(run / "trajectories/step_000004.parquet"))
    assert all([one.name for one in attempt.conversations] == ["main", "worker"] for attempt in played)

    again = replay(run, load_replay_config(run))
    for record, repeated in zip(records, world.records(again.run_dir).train, strict=True):
        assert repeated["learner/entropy"] == pytest.approx(record["learner/entropy"], rel=1e-6)

    own, workers = (
        load_file(run / "adapters" / name / "adapter_model.safetensors") for name in (".", "worker")
    )
    assert own.keys() == workers.keys()
    ups = [name for name in own if "lora_B" in name]
    assert all(np.abs(tensors[name]).max() > 0 for tensors in (own, workers) for name in ups)
    assert all(np.abs(own[name] - workers[name]).max() > 1e-4 for name in ups)
    assert json.loads((run / "adapters/worker/adapter_config.json").read_text())["r"] == 4

    checkpoint = run / "checkpoints/step_000004"
    for role, expected in ((None, own), ("worker", workers)):
        out = tmp_path / f"exported_{role}"
        named = [] if role is None else ["--role", role]
        said = CliRunner().invoke(app, ["export", str(checkpoint), str(out), "--adapter", *named])
        assert said.exit_code == 0, said.output + repr(said.exception)
        exported = load_file(out / "adapter_model.safetensors")
        for name, tensor in expected.items():
            np.testing.assert_allclose(exported[name], tensor, atol=1e-6)
    unknown = CliRunner().invoke(app, ["export", str(checkpoint), str(tmp_path / "none"), "--role", "cook"])
    assert "has no adapter of role 'cook'; it has: worker" in str(unknown.exception)
