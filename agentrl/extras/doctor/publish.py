"""Check `publish`: one publish to an embedded server of this machine, over the transport of the config."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import trio

from agentrl.cluster.workers import LocalWorker
from agentrl.config.model import ModelConfig
from agentrl.config.rollout import EmbeddedServerConfig, WeightsConfig
from agentrl.errors import ServerError
from agentrl.extras.doctor.diagnosis import Diagnosis
from agentrl.extras.doctor.local_policy import open_policy, write_random_model
from agentrl.extras.doctor.subject import Subject, existing
from agentrl.extras.embedded.launch import EmbeddedServer
from agentrl.learner.learner import Learner
from agentrl.servers.client import SGLangClient
from agentrl.servers.supervisor import Supervisor
from agentrl.servers.trio_run import in_trio
from agentrl.weights.pace import FIRST_BYTES_PER_S, SLACK
from agentrl.weights.publish import Publisher, PublishReport

SCALED_BYTES = 64 << 20
"""At most so many are published; a larger model needs as many times longer."""
MIN_BYTES_PER_S = FIRST_BYTES_PER_S / SLACK
"""A slower publish exceeds the deadline that the first one of a run gets for its bytes."""
START_S, PUBLISH_S = 60.0, 20.0


@dataclass(frozen=True, slots=True)
class PublishSpeed:
    """A publish of `num_bytes` that took `seconds`."""

    num_bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / max(self.seconds, 1e-9)


def diagnose(subject: Subject) -> Iterator[Diagnosis]:
    """Publish a random model twice; the second time is measured, because the first one forms groups."""
    weights = subject.config.rollout.weights
    if "embedded" in weights.kind.refused_by:
        untried = f"transport {weights.transport} was not tried: only SGLang takes it"
        yield Diagnosis("publish", "ok", untried)
        return
    config = subject.config
    # The learner never computes in float16; its bytes are as many.
    dtype = "float32" if config.model.dtype == "float32" else "bfloat16"
    own = (
        None if subject.num_parameters is None else subject.num_parameters * (4 if dtype == "float32" else 2)
    )
    wanted = min(own or SCALED_BYTES, SCALED_BYTES)
    speed = measure_publish(weights, existing(subject.weights_folder), num_bytes=wanted, dtype=dtype)
    yield judge_publish(speed, transport=weights.transport, num_bytes=own)


def judge_publish(speed: PublishSpeed, *, transport: str, num_bytes: int | None) -> Diagnosis:
    """Judge the rate of a publish. `num_bytes`: of the config's model; None: unknown."""
    text = (
        f"{transport}: {speed.num_bytes / 1e6:.0f} MB in {speed.seconds:.1f} s to an embedded server here "
        f"({speed.bytes_per_s / 1e6:.0f} MB/s)"
    )
    if num_bytes is not None and num_bytes > speed.num_bytes:
        text += f"; the model's {num_bytes / 1e9:.1f} GB take about {num_bytes / speed.bytes_per_s:.0f} s"
    figures = {"bytes_per_s": speed.bytes_per_s}
    # A small model takes as long as the requests do.
    if speed.bytes_per_s < MIN_BYTES_PER_S and speed.num_bytes >= SCALED_BYTES // 2:
        cure = "rollout.weights.folder on a faster disk, or transport=distributed"
        if transport != "disk":
            cure = "end other programs, or look at the network between learner and servers"
        return Diagnosis("publish", "slow", text, cure, figures)
    return Diagnosis("publish", "ok", text, figures=figures)


def measure_publish(weights: WeightsConfig, folder: Path, *, num_bytes: int, dtype: str) -> PublishSpeed:
    """Publish a random model of about `num_bytes` from this process to a new server; compare its weights.

    Raises:
        InfrastructureError: the server did not start, or did not get the weights.
    """
    # One rank in this process: several sources, groups between GPUs and changes have nothing to do here.
    own = weights.model_copy(
        update={"sources": 1, "backend": "auto", "delta": False, "adapter": "merged", "verify": False}
    )
    logging.getLogger("agentrl").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix=".agentrl-doctor-", dir=folder) as place:
        model = Path(place) / "model"
        write_random_model(model, num_bytes=num_bytes, dtype=dtype)
        launcher = EmbeddedServer(EmbeddedServerConfig(num_blocks=16), dtype)
        log_file = Path(place) / "server.log"
        server = Supervisor(launcher, log_file=log_file, start_timeout_s=START_S, max_restarts=0)
        with ThreadPoolExecutor(1) as pool:
            starting = pool.submit(server.start, str(model), "default")
            try:
                with open_policy(ModelConfig(path=str(model), dtype=dtype), temperature=1.0) as learner:
                    url = starting.result(timeout=START_S)
                    report = in_trio(_publish_twice, learner, own, Path(place) / "weights", url)
            finally:
                server.stop()
    return PublishSpeed(report.num_bytes, report.seconds)


async def _publish_twice(
    learner: LocalWorker[Learner], config: WeightsConfig, folder: Path, url: str
) -> PublishReport:
    client = SGLangClient(url)
    publisher = Publisher(learner, config, folder=folder, pause_mode="abort")
    try:
        with trio.fail_after(PUBLISH_S):
            first = await publisher.publish(1, [client], must_verify=True)
            second = await publisher.publish(2, [client])
            for report in (first, second):
                if report.failed:
                    raise ServerError(next(iter(report.failed.values())))
            await publisher.transport.close([client])
    except trio.TooSlowError:
        raise ServerError(f"two publishes were not done within {PUBLISH_S:g} s") from None
    finally:
        await client.aclose()
    return second
