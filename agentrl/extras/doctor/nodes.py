"""What is compared between the nodes of a cluster."""

from __future__ import annotations

import json
import platform
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import Any

from agentrl.errors import InfrastructureError
from agentrl.extras.doctor.cpu_peak import read_peak
from agentrl.extras.doctor.diagnosis import Diagnosis
from agentrl.granted import granted

PACKAGES = (
    "agentrl",
    "numpy",
    "peft",
    "pyarrow",
    "ray",
    "safetensors",
    "sglang",
    "tokenizers",
    "torch",
    "transformers",
    "trio",
)
ABSENT = "not installed"
MIN_OF_BEST = 0.5
"""A node that reaches less of the best one's speed holds the others up."""
SLOW_SKEW_S, WRONG_SKEW_S = 1.0, 60.0
"""Logs are hard to compare; object storage and certificates refuse."""
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a node has.

    versions: of Python, packages and the GPU driver. hardware: CPU, CPUs, memory and GPUs in words.
    sees_run: it sees the run folder of the driver.
    """

    versions: Mapping[str, str]
    hardware: Mapping[str, str]
    sees_run: bool


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What the examination of the node at `address` found.

    skew_s: its clock minus the driver's, None if it was not measured. skew_error_s: uncertainty of it.
    """

    address: str
    facts: NodeFacts
    diagnoses: tuple[Diagnosis, ...]
    skew_s: float | None = None
    skew_error_s: float = 0.0

    def as_json(self) -> str:
        """Return the report as text: nodes with another agentrl could not read each other's objects."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> NodeReport:
        """Return the report of a text of `as_json`.

        Raises:
            InfrastructureError: another version of agentrl wrote it, with other fields.
        """
        values: Any = None
        try:
            values = json.loads(text)
            facts, diagnoses = NodeFacts(**values["facts"]), values["diagnoses"]
            rest = {name: value for name, value in values.items() if name not in ("facts", "diagnoses")}
            return cls(facts=facts, diagnoses=tuple(Diagnosis(**own) for own in diagnoses), **rest)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InfrastructureError(
                f"its report cannot be read: agentrl is {_claimed(values)} there, {_version('agentrl')} here"
            ) from error


def _claimed(report: Any) -> str:
    """Return the version of agentrl that a report with unknown fields names."""
    try:
        return str(report["facts"]["versions"]["agentrl"])
    except (TypeError, KeyError):
        return "another"


def read_facts(marker: Path) -> NodeFacts:
    """Return the facts of this machine. `marker`: a file that the driver wrote into the run folder."""
    grant = granted()
    versions = {"Python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}
    if _DRIVER.is_file():
        versions["GPU driver"] = _DRIVER.read_text().splitlines()[0].strip()
    gpus = sorted(file.read_text() for file in Path("/proc/driver/nvidia/gpus").glob("*/information"))
    cpuinfo = Path("/proc/cpuinfo")
    core = read_peak(cpuinfo.read_text(errors="replace")) if cpuinfo.is_file() else None
    hardware = {
        "CPU": platform.processor() or platform.machine() if core is None else core.model,
        "CPUs": str(grant.num_cpus),
        "memory": f"{grant.memory_bytes / 2**30:.0f} GiB",
        "GPUs": ", ".join(_model(text) for text in gpus) or "none",
    }
    return NodeFacts(versions, hardware, marker.is_file())


def compare_nodes(reports: Sequence[NodeReport]) -> Iterator[Diagnosis]:
    """Yield how the nodes differ: versions, hardware, clocks, run folder, speed."""
    versions = list(_differences({own.address: own.facts.versions for own in reports}))
    cure = "the same environment on all nodes: one container image, or one pinned list of packages"
    same = f"equal on {len(reports)} node{'s' * (len(reports) > 1)}"
    yield (
        Diagnosis("versions", "wrong", "; ".join(versions), cure)
        if versions
        else Diagnosis("versions", "ok", same)
    )
    hardware = list(_differences({own.address: own.facts.hardware for own in reports}))
    cure = "ranks wait for the slowest node: give each role a pool of equal nodes (docs/cluster.md)"
    yield (
        Diagnosis("hardware", "slow", "; ".join(hardware), cure)
        if hardware
        else Diagnosis("hardware", "ok", same)
    )
    yield _compare_clocks(reports)
    blind = [own.address for own in reports if not own.facts.sees_run]
    if blind:
        text = f"not seen by {', '.join(blind)}: checkpoints, attempts and weights are read there"
        cure = "trainer.run_dir on a file system that all nodes mount at the same path (docs/cluster.md)"
        yield Diagnosis("shared run folder", "wrong", text, cure)
    else:
        yield Diagnosis("shared run folder", "ok", f"seen by {len(reports)} node{'s' * (len(reports) > 1)}")
    yield from _compare_speeds(reports)


def _differences(values: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Yield one text for each name whose value differs. `values`: by node and name."""
    for name in dict.fromkeys(chain.from_iterable(values.values())):
        nodes = defaultdict(list)
        for address, own in values.items():
            nodes[own.get(name, ABSENT)].append(address)
        if len(nodes) > 1:
            most_common = sorted(nodes.items(), key=lambda item: -len(item[1]))
            shown = ", ".join(f"{value} on {_listed(where)}" for value, where in most_common)
            yield f"{name} {shown}"


def _compare_clocks(reports: Sequence[NodeReport]) -> Diagnosis:
    # What the measurement leaves open counts in favour of the clocks.
    sure = {
        own.address: max(0.0, abs(own.skew_s) - own.skew_error_s) for own in reports if own.skew_s is not None
    }
    if not sure:
        return Diagnosis("clocks", "slow", "could not be compared", "`agentrl doctor --cluster` again")
    address, worst = max(sure.items(), key=lambda item: item[1])
    figures = {"skew_s": worst}
    if worst < SLOW_SKEW_S:
        return Diagnosis("clocks", "ok", f"within {SLOW_SKEW_S:g} s of each other", figures=figures)
    text = f"{address} is {worst:.1f} s off"
    cure = "chrony or systemd-timesyncd on all nodes"
    return Diagnosis("clocks", "wrong" if worst > WRONG_SKEW_S else "slow", text, cure, figures)


def _compare_speeds(reports: Sequence[NodeReport]) -> Iterator[Diagnosis]:
    """Yield a diagnosis for each measured rate that some nodes reach less than half of."""
    rates: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for report in reports:
        for own in report.diagnoses:
            for name, figure in own.figures.items():
                if name.endswith("_per_s"):
                    rates[own.part, name][report.address] = figure
    for (part, name), by_node in rates.items():
        best = max(by_node, key=by_node.__getitem__)
        behind = [node for node, rate in by_node.items() if rate < MIN_OF_BEST * by_node[best]]
        if behind:
            shown = ", ".join(f"{node} {by_node[node]:.3g}" for node in behind)
            text = f"{name} of {part}: {shown}; {best} has {by_node[best]:.3g}"
            yield Diagnosis("speed of nodes", "slow", text, "the lines of these nodes say what is slow there")


def _listed(addresses: Sequence[str]) -> str:
    shown = ", ".join(addresses[:4])
    return shown if len(addresses) <= 4 else f"{shown} and {len(addresses) - 4} more"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ABSENT


def _model(information: str) -> str:
    return next(
        (line.partition(":")[2].strip() for line in information.splitlines() if line.startswith("Model")), "?"
    )
