"""A run whose processes are killed and stopped at random moments makes all its steps, and can account for
every group: `make test-slow`.
"""

import time

import pytest

from extras.runs.chaos import KINDS, Chaos

NUM_KILLS = 8
NUM_STEPS = 120


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_survives_kills_of_every_kind_of_process(world):
    """The seed is another each time: the report names it, and `python tests/extras/runs/chaos.py --seed` plays it
    again.
    """
    overrides = [
        f"data.val_files=[{world.folder}/data/val.parquet]",
        "buffer.max_staleness=2",
        "rollout.num_servers=2",
        "trainer.save_freq=3",
        "trainer.test_freq=1000",
    ]
    seed = time.monotonic_ns() % 100_000
    chaos = Chaos(
        str(world.config),
        world.folder / f"chaos_{seed}",
        overrides,
        seed=seed,
        kills=NUM_KILLS,
        steps=NUM_STEPS,
    )
    report = chaos.run()
    print(report)
    assert report.problems == [], report
    assert {event.kind for event in report.events} == set(KINDS), report
    assert report.accuracy is not None, "it was validated at the end"
