"""A row that breaks after the data were opened (its file changed, a reader fails) ends the run by its name;
nothing else is lost.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trio
from ray.exceptions import RayTaskError

from agentrl.buffer.buffer import ReplayBuffer
from agentrl.buffer.journal import FILE, Journal
from agentrl.buffer.ledger import LedgerRules
from agentrl.cluster.actors import translate
from agentrl.config.data import DataConfig
from agentrl.data.dataset import Dataset
from agentrl.data.rows import AgentChoice
from agentrl.errors import DataError, InfrastructureError
from parts.trajectories import ATTEMPTS

ROW = {"data_source": "s", "prompt": [{"role": "user", "content": "?"}]}


def opened(folder: Path, journal: Journal) -> ReplayBuffer:
    agents = AgentChoice(lambda name: name, "single_turn_agent")
    rows = Dataset(
        [str(folder / "rows.jsonl")],
        DataConfig(),
        agents=agents,
        seed=0,
        shuffle=False,
        check=lambda task: None,
    )
    return ReplayBuffer(
        rows,
        LedgerRules(groups_per_step=2, max_staleness=1, group_size=1, total_groups=6),
        ATTEMPTS,
        journal=journal,
    )


def test_a_row_that_breaks_later_is_named_and_what_was_journaled_stays(tmp_path: Path) -> None:
    whole = "".join(json.dumps(ROW) + "\n" for _ in range(3))
    (tmp_path / "rows.jsonl").write_text(whole)
    journal = Journal(tmp_path / FILE)
    buffer = opened(tmp_path, journal)
    buffer.advance(0)
    (first,) = buffer.lease("a", 1, 0.0)
    lines = whole.splitlines(keepends=True)
    (tmp_path / "rows.jsonl").write_text(lines[0] + lines[1].replace('"role"', '"rolf"') + lines[2])
    with pytest.raises(
        DataError, match=r"rows.jsonl: row 1 \(line 2\): field 'prompt\[0\].role': must be one of"
    ):
        buffer.lease("a", 1, 0.0)
    buffer.close()
    journal.close()
    with pytest.raises(DataError, match=r"row 1 \(line 2\)"):  # the next start finds it at once
        opened(tmp_path, Journal(tmp_path / FILE))
    (tmp_path / "rows.jsonl").write_text(whole)
    again = opened(tmp_path, Journal(tmp_path / FILE))
    again.release("a")
    leases = again.lease("b", 3, 0.0)
    assert [lease.task.task_id for lease in leases] == ["rows:0", "rows:1", "rows:2"]
    assert leases[0].group_id == first.group_id


async def test_an_error_of_ours_is_found_in_the_groups_of_nurseries() -> None:
    async def lease() -> None:
        async with trio.open_nursery() as inner:
            inner.start_soon(trio.sleep_forever)
            raise DataError("rows.jsonl: row 7: broken")

    with pytest.raises(ExceptionGroup) as caught:
        async with trio.open_nursery() as outer:
            outer.start_soon(lease)
    found = translate(RayTaskError("run", "", caught.value), who="a rollout actor")
    assert (type(found), str(found)) == (DataError, "rows.jsonl: row 7: broken")
    other = translate(RayTaskError("run", "", ExceptionGroup("x", [KeyError("boom")])), who="a rollout actor")
    assert type(other) is InfrastructureError
