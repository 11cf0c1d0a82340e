"""A whole run with a teacher on two ranks, and its replay."""

import pytest

import agentrl
from agentrl.config.rollout import EmbeddedServerConfig
from agentrl.errors import ConfigError
from agentrl.extras.embedded.launch import EmbeddedServer
from agentrl.extras.research.replay import load_replay_config, replay
from agentrl.servers.supervisor import Supervisor
from parts.frozen import write_frozen

pytestmark = pytest.mark.usefixtures("one_ray")


@pytest.mark.slow
def test_a_teacher_on_two_ranks_scores_what_was_sampled_and_again_in_a_replay(world, tmp_path):
    run_dir = tmp_path / "distilled"
    overrides = [
        f"trainer.run_dir={run_dir}",
        "trainer.steps=2",
        "learner.world_size=2",
        "trainer.save_freq=-1",
        "buffer.max_staleness=0",
        "rollout.group_size=1",
        f"algorithm.distillation.teacher={write_frozen(world.folder / 'model', tmp_path / 'teacher')}",
        "algorithm.distillation.with_rewards=false",
    ]
    result = agentrl.train(agentrl.load_config(str(world.config), overrides))
    assert result.step == 2
    assert result.counts.is_balanced
    kl = [record["learner/teacher_kl"] for record in world.records(run_dir).train]
    assert all(value > 0 for value in kl)

    again = replay(run_dir, load_replay_config(run_dir))
    repeated = [record["learner/teacher_kl"] for record in world.records(again.run_dir).train]
    assert repeated == pytest.approx(kl, rel=1e-6)


def test_a_teacher_with_another_tokenizer_is_refused_before_anything_starts(world, tmp_path):
    teacher = write_frozen(world.folder / "model", tmp_path / "teacher")
    file = teacher / "tokenizer.json"
    file.write_text(file.read_text().replace("<|im_end|>", "<|end|>"))
    config = agentrl.load_config(
        str(world.config),
        [f"trainer.run_dir={tmp_path / 'run'}", f"algorithm.distillation.teacher={teacher}"],
    )
    with pytest.raises(ConfigError, match=r"'<\|end\|>' instead of '<\|im_end\|>'"):
        agentrl.train(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_teacher_on_a_server_says_what_the_role_says_and_a_replay_needs_no_server(world, tmp_path):
    teacher = write_frozen(world.folder / "model", tmp_path / "teacher")
    server = Supervisor(
        EmbeddedServer(EmbeddedServerConfig(), "float32"),
        log_file=tmp_path / "teacher.log",
        start_timeout_s=240,
        max_restarts=0,
    )
    run_dir = tmp_path / "distilled"
    overrides = [
        f"trainer.run_dir={run_dir}",
        "trainer.steps=2",
        "trainer.save_freq=-1",
        "rollout.group_size=1",
        "algorithm.distillation.with_rewards=false",
    ]
    try:
        url = server.start(str(teacher), "frozen")
        on_server = f"algorithm.distillation.servers.urls=[{url}]"
        result = agentrl.train(agentrl.load_config(str(world.config), [*overrides, on_server]))
    finally:
        server.stop()
    assert result.counts.is_balanced
    kl = [record["learner/teacher_kl"] for record in world.records(run_dir).train]
    assert all(value > 0 for value in kl)

    again = replay(run_dir, load_replay_config(run_dir))
    overrides = ["algorithm.distillation.servers.urls=[]", f"algorithm.distillation.teacher={teacher}"]
    by_role = replay(run_dir, load_replay_config(run_dir, overrides, out=tmp_path / "by_role"))
    for other in (again, by_role):
        repeated = [record["learner/teacher_kl"] for record in world.records(other.run_dir).train]
        assert repeated == pytest.approx(kl, rel=1e-4)
