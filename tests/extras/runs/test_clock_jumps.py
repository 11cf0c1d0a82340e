"""A run on machines whose wall clock jumps by days, forth and back, at every look: nothing times out, ends or
is measured wrong.
"""

from __future__ import annotations

import os
import time

import pytest

JUMPING = """
import itertools, os, time
_now, _jumps = time.time, itertools.cycle((0.0, 86400.0, -86400.0))
time.time = lambda: _now() + next(_jumps)
time.time_ns = lambda: int(1e9 * time.time())
open(os.path.join(os.path.dirname(__file__), f"{os.getpid()}.jumps"), "w").close()
"""
"""As `sitecustomize`, which every Python process reads at its start: the driver, Ray's workers, the
server.
"""


@pytest.mark.slow
def test_nothing_is_measured_by_the_wall_clock(world, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(JUMPING)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    )
    run_dir = world.folder / "clock_jumps"
    arguments = [
        f"trainer.run_dir={run_dir}",
        "trainer.steps=3",
        "trainer.save_freq=1",
        "trainer.test_freq=3",
        "buffer.max_staleness=1",
    ]
    began = time.monotonic()
    run = world.start(
        "train", str(world.config), *arguments, f"data.val_files=[{world.folder}/data/val.parquet]"
    )
    assert run.wait(500) == 0, run.output()
    elapsed_s = time.monotonic() - began
    assert len(list(tmp_path.glob("*.jumps"))) >= 5, "driver, buffer, rollout actor, rank and server"

    records = world.records(run_dir)
    assert [record["step"] for record in records.train] == [1, 2, 3]
    durations = {
        (record["step"], name): value
        for record in [*records.train, *records.validation]
        for name, value in record.items()
        if name.endswith("_s") and not name.endswith("_per_s")
    }
    assert len(durations) > 3 * 10
    assert {name: value for name, value in durations.items() if not 0 <= value <= elapsed_s} == {}
    assert all(word not in run.output() for word in ("died", "lost", "restart", "did not"))
