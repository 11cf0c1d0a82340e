"""Damages over all kinds of files of a run: none is silent, none a traceback (`damage.py`)."""

import json
import subprocess
import sys
from pathlib import Path

from agentrl.extras.research.audit import audit_run
from parts.written_run import write_whole_run
from extras.runs.damage import judge, kinds, summary

RECOUNT = Path(__file__).parent / "recount.py"


def test_no_damage_of_any_file_is_silent_or_a_traceback(tmp_path):
    run = write_whole_run(tmp_path / "run")
    found = summary(judge(run, 2 * len(kinds(run))))
    assert found["bad"] == []
    assert found["verdicts"]["detected"] > 0.7 * found["number"]


def test_a_count_from_the_files_alone_agrees_with_the_audit(tmp_path):
    run = write_whole_run(tmp_path / "run")
    done = subprocess.run([sys.executable, RECOUNT, run], capture_output=True, text=True, check=True)
    counted, audit = json.loads(done.stdout), audit_run(run).audit
    assert counted["problems"] == []
    assert counted["groups"] == {state: n for state, n in audit.counts().items() if n}
    (run / "trajectories/step_000003.parquet").unlink()
    done = subprocess.run([sys.executable, RECOUNT, run], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert json.loads(done.stdout)["problems"] == ["step 3 was learned from, and has no file of trajectories"]
