"""Check `python`: the interpreter, and the packages that agentrl needs."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from agentrl.extras.doctor.diagnosis import Diagnosis
from agentrl.extras.doctor.subject import Subject

OWN = "agentrl"


def diagnose(subject: Subject) -> Iterator[Diagnosis]:
    """Compare the interpreter and its packages with what the installed agentrl asks for."""
    wanted = metadata(OWN)["Requires-Python"]
    running = platform.python_version()
    where = "in a virtual environment" if sys.prefix != sys.base_prefix else "of the system"
    text = f"{platform.python_implementation()} {running} {where}"
    if not SpecifierSet(wanted).contains(running, prereleases=True):
        yield Diagnosis("python", "wrong", f"{text}; agentrl needs {wanted}", f"install Python {wanted}")
    else:
        yield Diagnosis("python", "ok", text)
    yield judge_packages(requires(OWN) or [])


def judge_packages(requirements: list[str]) -> Diagnosis:
    """Compare what is installed with requirements, as in the metadata of a package. Extras are left out."""
    wanted = [Requirement(line) for line in requirements]
    always = [own for own in wanted if own.marker is None or own.marker.evaluate({"extra": ""})]
    problems = [problem for own in always if (problem := _problem(own)) is not None]
    if not problems:
        return Diagnosis("packages", "ok", f"agentrl {version(OWN)} and the {len(always)} packages it needs")
    names = " ".join(f"'{own}'" for own in always if _problem(own) is not None)
    return Diagnosis("packages", "wrong", "; ".join(problems), f"pip install {names}")


def _problem(wanted: Requirement) -> str | None:
    try:
        found = version(wanted.name)
    except PackageNotFoundError:
        return f"{wanted.name} is not installed"
    if wanted.specifier.contains(found, prereleases=True):
        return None
    return f"{wanted.name} {found} is installed, agentrl needs {wanted.specifier}"
