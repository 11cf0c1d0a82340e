"""The functions between a row and its gradient, seen in a real run of one step.

A run of the quickstart's config, on a policy that has learned nothing, is started with the functions of
MILESTONES wrapped. Each records the functions of agentrl on the stack when it is first called on the way of
one row: leased from the buffer, played by the tool agent, learned from by the controller's loop. The union of
these stacks is what a reader opens to follow one trajectory, plus one border per further process.

`hops_of_all_agents` is the same figure without following one row: the stacks of all agents are united, rows
are read by the check of the data, and the frames of the command above the controller's loop count.

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

AGENT = "agents/tool_agent.py:ToolAgent.run"
LEASE = "agentrl/buffer/buffer.py:ReplayBuffer.lease"
LOOP = "agentrl/controller/train.py:train"
MILESTONES = {
    # module: {function at the end of a part of the way: (how a function on its stack begins for the figure
    # of all agents, a function on its stack for the way of one row)}
    "agentrl.data.rows": {"read_row": ("agentrl/buffer/", LEASE)},
    "agentrl.buffer.ledger": {
        "Ledger.lease": ("", ""),
        "Ledger.add_member": ("", ""),
        "Ledger.take": ("", ""),
    },
    "agentrl.chat.conversation": {
        "Conversation.next_prompt": ("agents/", AGENT),
        "Conversation.add_generation": ("agents/", AGENT),
    },
    "agentrl.extras.embedded.sampler": {"sample": ("", "")},
    "agentrl.servers.protocol": {"parse_generation": ("agents/", AGENT)},
    "agentrl.cluster.buffer": {"FileStore.store": ("", "")},
    "agentrl.algorithms.advantages.groups": {"grpo": ("", LOOP)},
    "agentrl.learner.packing": {"plan_microbatches": ("", LOOP)},
    "agentrl.algorithms.corrections": {"importance_weights": ("", "")},
    "agentrl.algorithms.policy_losses": {"PolicyTokens.log_ratios": ("", "")},
}
LOSS = "PolicyTokens.log_ratios"
TIMEOUT_S = 600

HOOK = """
import functools, importlib.abc, importlib.machinery, json, os, sys
MILESTONES, FOLDERS, ROOT = {milestones!r}, {folders!r}, {root!r}
AGENT, LOOP = {agent!r}, {loop!r}
PACKAGES = tuple(os.path.join(ROOT, name) + os.sep for name in ("agentrl", "agents", "tools", "interactions"))

def stack_above(frame):
    names = []
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(PACKAGES) and not code.co_name.startswith("<"):
            names.append(os.path.relpath(code.co_filename, ROOT) + ":" + code.co_qualname)
        frame = frame.f_back
    return names[::-1]

def of_any_row(names, place):
    return names if any(each.startswith(place) for each in names) else None

def of_one_row(names, function):
    agents = [each for each in names if each.startswith("agents/")]
    if (function and function not in names) or agents not in ([], [AGENT]):
        return None
    return names[names.index(LOOP):] if LOOP in names else names

def record(file, names, name):
    with open(file + "." + str(os.getpid()), "w") as out:
        json.dump(dict(process=os.getpid(), stack=names + [name]), out)
    os.replace(file + "." + str(os.getpid()), file)

def recording(name, function, places):
    ways = [(os.path.join(folder, name), way, place)
            for folder, way, place in zip(FOLDERS, (of_any_row, of_one_row), places)]
    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        for file, way, place in ways:
            if not os.path.exists(file) and (names := way(stack_above(sys._getframe(1)), place)) is not None:
                record(file, names, name)
        return function(*args, **kwargs)
    return wrapped

class Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module):
        super().exec_module(module)
        for path, places in MILESTONES[module.__name__].items():
            owner, _, name = path.rpartition(".")
            holder = getattr(module, owner) if owner else module
            setattr(holder, name, recording(path, getattr(holder, name), places))

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


Stacks = dict[str, dict[str, Any]]
"""By milestone: its process, and the functions above it."""


def stacks(folder: Path) -> tuple[Stacks, Stacks]:
    """Return what the milestones recorded in a run of one step in `folder`: of any row, and of one row."""
    agentrl("data", "arithmetic", str(folder / "data"))
    outputs = [f"trainer.output={folder / 'policy'}", "trainer.untrained_output=null", "trainer.steps=1"]
    agentrl(
        "sft",
        "configs/quickstart_sft.yaml",
        f"data.train_files=[{folder / 'data' / 'sft.parquet'}]",
        *outputs,
    )
    found = folder / "any_row", folder / "one_row"
    for each in found:
        each.mkdir()
    names = {"milestones": MILESTONES, "folders": [str(each) for each in found], "root": str(ROOT)}
    (folder / "sitecustomize.py").write_text(HOOK.format(**names, agent=AGENT, loop=LOOP))
    files = [
        f"data.train_files=[{folder / 'data' / 'train.parquet'}]",
        f"model.path={folder / 'policy'}",
        f"trainer.run_dir={folder / 'run'}",
    ]
    small = [
        "trainer.steps=1",
        "buffer.groups_per_step=6",  # of six rows, one is for the tool agent
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
    of_any, of_one = (
        {file.name: json.loads(file.read_text()) for file in sorted(each.iterdir())} for each in found
    )
    if missing := {name for names in MILESTONES.values() for name in names} - (of_any.keys() & of_one.keys()):
        raise SystemExit(f"no row came by {', '.join(sorted(missing))}")
    return of_any, of_one


def functions_of(recorded: Stacks) -> list[str]:
    return list(dict.fromkeys(name for one in recorded.values() for name in one["stack"]))


def num_processes(recorded: Stacks) -> int:
    return len({one["process"] for one in recorded.values()})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        of_any, recorded = stacks(Path(folder))
    functions, processes = functions_of(recorded), num_processes(recorded)
    result = {
        "hops": len(functions) + processes - 1,
        "hops_of_all_agents": len(functions_of(of_any)) + num_processes(of_any) - 1,
        "files": len({name.partition(":")[0] for name in functions if ":" in name}),
        "processes": processes,
        "rank_to_loss": len(recorded[LOSS]["stack"]),
        "stacks": {name: one["stack"] for name, one in recorded.items()},
    }
    for name, one in recorded.items():
        print(name, *(f"    {frame}" for frame in one["stack"]), sep="\n")
    print({name: value for name, value in result.items() if name != "stacks"})
    write_result(arguments.out, result)


if __name__ == "__main__":
    main()
