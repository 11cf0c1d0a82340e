"""Whole runs whose plugins fail: said, counted, kept with the user's line, and ended if nothing can come of
them.
"""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.slow

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    table = {0: 1.0, 1: 0.0}
    return table[(len(solution_str) + len(ground_truth)) % 3]
"""
AGENT = """
from agentrl.errors import PluginError
from agentrl.plugins import AgentLoop

class Broken(AgentLoop):
    name = "broken"

    async def run(self, task, session):
        raise PluginError("no key for the service")
"""


def rows_of(run: Path) -> list[dict]:
    return pq.read_table(run / "failures.parquet").to_pylist()


def test_a_reward_with_an_honest_bug_is_seen_everywhere(world, tmp_path):
    reward, run = tmp_path / "mine.py", tmp_path / "run"
    reward.write_text(REWARD)
    overrides = [f"trainer.run_dir={run}", "trainer.steps=4", f"reward.custom_function.path={reward}"]
    command = world.start(
        "train", str(world.config), *overrides, f"data.val_files=[{world.folder}/data/val.parquet]"
    )
    assert command.wait() == 0, command.output()
    said, rows = command.output(), rows_of(run)
    assert f"reward 'custom' raised KeyError: 2 at {reward}:4\n" in said
    assert "attempts could not be scored" in said
    assert " failed  " in said
    assert "alarm failed_share at step " in said
    assert {(row["place"], row["error"], row["plugin"]) for row in rows} == {
        (f"{reward}:4", "KeyError", "custom")
    }
    assert {row["became"] for row in rows} == {"dropped", "not_scored"}
    records = world.records(run).train
    result = json.loads((run / "result.json").read_text())
    dropped = {row["group_id"] for row in rows if row["became"] == "dropped"}
    assert (
        len(dropped) >= result["counts"]["dropped"]["reward_error"]
    )  # the last ones were dropped while the run ended
    assert (
        0
        < sum(record["attempts/reward_error"] for record in records if "attempts/reward_error" in record)
        <= len(rows)
    )
    summary = (run / "summary.md").read_text()
    assert "reward 'custom' raised KeyError: 2 (mine.py:4)" in summary
    assert "BufferCounts" not in summary + said
    assert "not scored" in summary


def test_an_agent_that_always_fails_ends_the_run_with_its_text_within_seconds(world, tmp_path):
    agent, run = tmp_path / "broken.py", tmp_path / "run"
    agent.write_text(AGENT)
    rows = world.write_rows(tmp_path, {}, default="broken")
    overrides = [
        f"agent.plugins=[{agent}]",
        f"data.train_files=[{rows}]",
        f"trainer.run_dir={run}",
        "buffer.stall_timeout_s=30",
    ]
    command = world.start("train", str(world.config), *overrides, "trainer.steps=2", "--debug")
    assert command.wait() == 1, command.output()
    said = command.output()
    assert (
        "(rollout.max_failed_share=0.9); the first: agent 'broken' raised PluginError: no key for the "
        "service (broken.py:9)" in said
    )
    assert f'File "{agent}", line 9, in run' in said
    assert "stall_timeout_s" not in said
    assert len(rows_of(run)) >= 16


PARTNER = """
from agentrl.plugins import Interaction

class Mine(Interaction):
    name = "NAME"

    async def start(self, **_): ...

    async def respond(self, messages):
        return {"text": "again"}
"""


def test_a_partner_that_always_fails_ends_a_run_that_also_has_rows_without_it(world, tmp_path):
    """Otherwise the run would go on, and train on the other rows alone."""
    partner, run = tmp_path / "mine.py", tmp_path / "run"
    partner.write_text(PARTNER.replace("NAME", "gsm8k"))
    overrides = [f"agent.plugins=[{partner}]", f"trainer.run_dir={run}", "trainer.steps=100"]
    command = world.start("train", str(world.config), *overrides)
    assert command.wait() == 1, command.output()
    said = command.output()
    assert "interaction 'gsm8k' failed in " in said
    first = "interaction 'gsm8k' returned dict {'text': 'again'}; return agentrl.plugins.InteractionReply"
    assert f"(rollout.max_failed_share=0.9); the first: {first} (mine.py:9)" in said


QUITS = """
import os
from agentrl.plugins import AgentLoop, Reward, RewardResult

class Quits(AgentLoop):
    name = "quits"

    async def run(self, task, session):
        await session.generate()
        os._exit(3)
"""
SPINS = """
from agentrl.plugins import AgentLoop

class Quits(AgentLoop):
    name = "quits"

    async def run(self, task, session):
        await session.generate()
        while True:
            pass
"""


def test_a_plugin_that_ends_the_process_is_named_and_its_attempt_counts(world, tmp_path):
    agent, run = tmp_path / "quits.py", tmp_path / "run"
    agent.write_text(QUITS)
    rows = world.write_rows(tmp_path, {}, default="quits")
    overrides = [f"agent.plugins=[{agent}]", f"data.train_files=[{rows}]", f"trainer.run_dir={run}"]
    command = world.start(
        "train", str(world.config), *overrides, "trainer.steps=2", "rollout.max_actor_restarts=2"
    )
    assert command.wait() == 1, command.output()
    said = command.output()
    what = f"agent 'quits' ended its process: os._exit(3) at {agent}:10"
    assert f"died ({what}); " in said
    assert f"died ({what}) and rollout.max_actor_restarts is used up" in said
    failed = rows_of(run)
    assert {(row["kind"], row["plugin"], row["place"]) for row in failed} == {
        ("agent", "quits", f"{agent}:10")
    }
    assert {row["became"] for row in failed} == {"retried"}
    assert not list((run / "attempts").glob("*.last_words"))


def test_a_loop_that_is_not_given_back_costs_the_process_and_one_interrupt_ends_the_run(world, tmp_path):
    agent, run = tmp_path / "quits.py", tmp_path / "run"
    agent.write_text(SPINS)
    rows = world.write_rows(tmp_path, {}, default="quits")
    overrides = [f"agent.plugins=[{agent}]", f"data.train_files=[{rows}]", f"trainer.run_dir={run}"]
    command = world.start(
        "train", str(world.config), *overrides, "trainer.steps=2", "agent.trajectory_timeout_s=15"
    )
    command.wait_until(lambda: "takes over" in command.output(), timeout_s=300)
    assert f"agent 'quits' at {agent}:" in command.output()
    assert "has not given back the event loop for" in command.output()
    command.interrupt()
    assert command.wait(60) == 130, command.output()
    assert "Traceback" not in command.output()
