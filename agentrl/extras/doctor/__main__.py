"""`python -m agentrl.extras.doctor NAME MODULE [OPTION]...`: one check in this process.

stdin: a subject as JSON. stdout: one diagnosis per line, then `LAST_LINE`.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from importlib import import_module

from agentrl.errors import AgentRLError
from agentrl.extras.doctor.diagnosis import Diagnosis
from agentrl.extras.doctor.examine import LAST_LINE
from agentrl.extras.doctor.subject import Subject

SEE = "agentrl/extras/doctor/README.md explains the check; --debug shows the traceback"


def main() -> None:
    """Run the check that the command line names."""
    name, module, *options = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # at the deadline: files are removed
    # Libraries print to standard output; only diagnoses may go there.
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    subject = Subject.parse(sys.stdin.read())

    def write(line: str) -> None:
        results.write(f"{line}\n")
        results.flush()

    try:
        for diagnosis in import_module(module).diagnose(subject, *options):
            write(diagnosis.as_json())
    except AgentRLError as error:
        traceback.print_exc()
        write(Diagnosis(name, "wrong", str(error), SEE).as_json())
    except Exception as error:  # noqa: BLE001 - boundary of one check: what it met is a finding
        traceback.print_exc()
        first = (str(error).strip().splitlines() or ["no message"])[0]
        write(Diagnosis(name, "wrong", f"{type(error).__name__}: {first}", SEE).as_json())
    write(LAST_LINE)


if __name__ == "__main__":
    main()
