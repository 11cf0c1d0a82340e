"""Check `ray`: Ray starts or is joined, an actor starts, an array travels, and the pools of the run fit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import ray

from agentrl.cluster.cluster import ray_session
from agentrl.cluster.pools import reserve
from agentrl.config.schema import Config
from agentrl.errors import ConfigError, InfrastructureError
from agentrl.extras.doctor.diagnosis import Diagnosis
from agentrl.extras.doctor.subject import Subject

SLOW_START_S = 20.0
SLOW_ACTOR_S = 15.0
ACTOR_S = 40.0
RESERVE_S = 5.0
ARRAY_BYTES = 16 << 20


class Echo:
    """An actor that measures what it is sent."""

    def count(self, array: Any) -> int:
        return int(array.nbytes)


def diagnose(subject: Subject) -> Iterator[Diagnosis]:
    """Start Ray as the run does, and use it."""
    started = time.monotonic()
    with ray_session(subject.config.cluster) as summary:
        yield judge_duration("ray", summary, time.monotonic() - started, SLOW_START_S)
        yield _start_actor()
        if subject.is_given:
            yield _try_pools(subject.config)


def judge_duration(part: str, text: str, seconds: float, slow_s: float) -> Diagnosis:
    """Judge how long something took to start."""
    text, figures = f"{text}; ready after {seconds:.1f} s", {"seconds": seconds}
    if seconds > slow_s:
        cure = "end other programs, or look at the disk of the packages: every process imports them"
        return Diagnosis(part, "slow", text, cure, figures)
    return Diagnosis(part, "ok", text, figures=figures)


def _start_actor() -> Diagnosis:
    started = time.monotonic()
    actor: Any = ray.remote(Echo).options(num_cpus=0).remote()
    array = np.zeros(ARRAY_BYTES, np.uint8)
    try:
        count: int = ray.get(actor.count.remote(array), timeout=ACTOR_S)
    except ray.exceptions.RayError as error:
        text = f"no actor answered within {ACTOR_S:g} s: {str(error).splitlines()[0]}"
        return Diagnosis("ray actor", "wrong", text, "look into /tmp/ray/session_latest/logs")
    text = f"an actor received {count / 1e6:.0f} MB"
    return judge_duration("ray actor", text, time.monotonic() - started, SLOW_ACTOR_S)


def _try_pools(config: Config) -> Diagnosis:
    """Reserve the nodes and GPUs of the run for a moment."""
    layout = config.placement.layout(config.num_ranks)
    if not layout.reservations:
        return Diagnosis("placement", "ok", "everything is on CPUs, anywhere")
    names = ", ".join(layout.reservations)
    try:
        with reserve(layout.reservations, timeout_s=RESERVE_S):
            return Diagnosis("placement", "ok", f"the pools {names} fit")
    except ConfigError as error:
        return Diagnosis("placement", "wrong", str(error), "placement.pools as the nodes are, or more nodes")
    except InfrastructureError as error:
        return Diagnosis("placement", "slow", str(error), "wait for the other jobs, or end them")
