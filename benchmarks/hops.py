"""The functions between a row and its gradient, seen in a real run of one step.

A run of the quickstart's config, on a policy that has learned nothing, is started with the functions of
MILESTONES wrapped. Each records the functions of agentrl on the stack when it is first called, in whatever
process. The union of these stacks is what a reader opens to follow one trajectory, plus one border per
further process.

Usage: python benchmarks/hops.py [--out docs/results/hops.json]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import ROOT, write_result

MILESTONES = {
    # module: {function at the end of a part of the way: the process whose call counts, by a file on its
    # stack}
    "agentrl.data.rows": {"read_row": "agentrl/buffer/"},
    "agentrl.buffer.ledger": {"Ledger.lease": "", "Ledger.add_member": "", "Ledger.take": ""},
    "agentrl.chat.conversation": {
        "Conversation.next_prompt": "agents/",
        "Conversation.add_generation": "agents/",
    },
    "agentrl.serving.embedded.sampler": {"sample": ""},
    "agentrl.sglang.protocol": {"parse_generation": "agents/"},
    "agentrl.data.trajectories": {"encode": ""},
    "agentrl.algorithms.advantages.groups": {"grpo": ""},
    "agentrl.learner.packing": {"pack": ""},
    "agentrl.algorithms.corrections": {"importance_weights": ""},
    "agentrl.algorithms.policy_losses": {"PolicyTokens.log_ratios": ""},
}
LOSS = "PolicyTokens.log_ratios"
TIMEOUT_S = 600

HOOK = """
import functools, importlib.abc, importlib.machinery, json, os, sys
MILESTONES, FOLDER, ROOT = {milestones!r}, {folder!r}, {root!r}
PACKAGES = tuple(os.path.join(ROOT, name) + os.sep for name in ("agentrl", "agents", "tools", "interactions"))

def recording(name, function, place):
    file = os.path.join(FOLDER, name)
    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        if not os.path.exists(file):
            frame, names = sys._getframe(1), []
            while frame is not None:
                code = frame.f_code
                if code.co_filename.startswith(PACKAGES) and not code.co_name.startswith("<"):
                    names.append(os.path.relpath(code.co_filename, ROOT) + ":" + code.co_qualname)
                frame = frame.f_back
            if any(each.startswith(place) for each in names):
                with open(file + "." + str(os.getpid()), "w") as out:
                    json.dump(dict(process=os.getpid(), stack=names[::-1] + [name]), out)
                os.replace(file + "." + str(os.getpid()), file)
        return function(*args, **kwargs)
    return wrapped

class Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module):
        super().exec_module(module)
        for path, place in MILESTONES[module.__name__].items():
            owner, _, name = path.rpartition(".")
            holder = getattr(module, owner) if owner else module
            setattr(holder, name, recording(path, getattr(holder, name), place))

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name not in MILESTONES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        spec.loader = Loader(name, spec.origin)
        return spec

sys.meta_path.insert(0, Finder())
"""


def agentrl(*arguments: str, **environment: str) -> None:
    command = [str(Path(sys.executable).with_name("agentrl")), *arguments]
    subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        check=True,
        timeout=TIMEOUT_S,
    )


def stacks(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what each milestone recorded in a run of one step in `folder`: its process and the functions
    above it.
    """
    agentrl("data", "arithmetic", str(folder / "data"))
    outputs = [f"trainer.output={folder / 'policy'}", "trainer.untrained_output=null", "trainer.steps=1"]
    agentrl(
        "sft",
        "configs/quickstart_sft.yaml",
        f"data.train_files=[{folder / 'data' / 'sft.parquet'}]",
        *outputs,
    )
    found = folder / "stacks"
    found.mkdir()
    (folder / "sitecustomize.py").write_text(
        HOOK.format(milestones=MILESTONES, folder=str(found), root=str(ROOT))
    )
    files = [
        f"data.train_files=[{folder / 'data' / 'train.parquet'}]",
        f"model.path={folder / 'policy'}",
        f"trainer.run_dir={folder / 'run'}",
    ]
    small = [
        "trainer.steps=1",
        "buffer.groups_per_step=4",
        "rollout.group_size=4",
        "trainer.val_before_train=false",
    ]
    without = [
        "data.val_files=[]",
        "tracking.baselines={}",
        "tracking.report=false",
        "buffer.drop_constant_groups=false",
    ]
    agentrl("train", "configs/quickstart.yaml", *files, *small, *without, PYTHONPATH=str(folder))
    return {file.name: json.loads(file.read_text()) for file in sorted(found.iterdir())}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        recorded = stacks(Path(folder))
    functions = list(dict.fromkeys(name for one in recorded.values() for name in one["stack"]))
    processes = {one["process"] for one in recorded.values()}
    result = {
        "hops": len(functions) + len(processes) - 1,
        "files": len({name.partition(":")[0] for name in functions if ":" in name}),
        "processes": len(processes),
        "rank_to_loss": len(recorded[LOSS]["stack"]),
        "stacks": {name: one["stack"] for name, one in recorded.items()},
    }
    for name, one in recorded.items():
        print(name, *(f"    {frame}" for frame in one["stack"]), sep="\n")
    print({name: value for name, value in result.items() if name != "stacks"})
    write_result(arguments.out, result)


if __name__ == "__main__":
    main()
