"""A process that has imported what ranks need, and forks the programs of tests: imports cost more than most
of what these programs do, and every file has one.

It reads requests from stdin, one line of JSON each, and answers with two lines: the process id of the fork,
and the exit status. It has no threads of its own, which a fork would lose.
"""

import gc
import importlib
import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

LATE = (
    "agentrl.learner.checkpoint",
    "agentrl.learner.learner",
    "hypothesis",
    "peft",
    "pytest",
    "safetensors.torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.modeling_utils",
    "transformers.models.qwen2.modeling_qwen2",
)
"""What a learner, or a file of tests, imports late or all of them need."""


def serve() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _run(request)
        os.setpgid(child, child)  # a test that has waited long enough ends it with all its ranks
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _run(request: dict[str, Any]) -> None:
    """Be the program: `argv` in the folder `cwd` with the variables `environ`; stderr goes to a file."""
    status = 1
    try:
        output = os.open(request["stderr"], os.O_WRONLY | os.O_CREAT)
        for descriptor, target in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
            os.dup2(descriptor, target)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["environ"])
        sys.argv = request["argv"]
        runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - a fork must not go on with the code of its parent
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    gc.disable()  # loading torch and transformers takes a fifth less time
    sys.path[0] = str(Path(__file__).parents[1])
    for name in LATE:
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    gc.freeze()
    serve()
