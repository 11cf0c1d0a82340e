"""Check `trackers`: those that the config asks for, and whether they can be reached."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from importlib.util import find_spec
from urllib.parse import urlsplit

from agentrl.config.storage_urls import shown
from agentrl.errors import ConfigError
from agentrl.extras.doctor.diagnosis import Diagnosis
from agentrl.extras.doctor.subject import Subject
from agentrl.extras.tracing.span_export import check_opentelemetry

PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboard", "mlflow": "'agentrl[mlflow]'"}
"""What pip is asked for, by the name of the tracker, which is also that of its module."""
CONNECT_S = 5.0
OFFLINE = "tracking.wandb_mode=offline"


def diagnose(subject: Subject) -> Iterator[Diagnosis]:
    """Look for the package of each tracker, log in to wandb if its mode is online, and connect to MLflow's
    server and the collector of spans.
    """
    if not subject.is_given:
        return
    for name in subject.config.trainer.logger:
        package = PACKAGES.get(name)
        if package is None:
            continue
        tracking = subject.config.tracking
        uri = tracking.mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI")
        if find_spec(name) is None:
            yield Diagnosis(name, "wrong", f"{name} is not installed", f"pip install {package}")
        elif name == "wandb" and tracking.wandb_mode == "online":
            yield _judge_login()
        elif name == "mlflow" and uri:
            yield _judge_mlflow(uri)
        else:
            yield Diagnosis(name, "ok", "installed; writes to the run folder")
    if (endpoint := subject.config.tracking.spans.endpoint) is not None:
        yield _judge_collector(endpoint)


def _judge_login() -> Diagnosis:
    import wandb

    url = str(wandb.Settings().base_url)
    if not wandb.api.api_key:
        return Diagnosis("wandb", "wrong", f"no key for {url}", f"`wandb login`, or {OFFLINE}")
    try:
        _connect(url)
    except OSError as error:
        return Diagnosis("wandb", "wrong", f"{url} cannot be reached: {error}", f"the network, or {OFFLINE}")
    try:
        wandb.login(prompt=False, verify=True, timeout=int(CONNECT_S))
    except (wandb.Error, ValueError) as error:
        first = str(error).splitlines()[0]
        return Diagnosis("wandb", "wrong", f"{url} refuses the key: {first}", "`wandb login --relogin`")
    return Diagnosis("wandb", "ok", f"logged in at {url}")


def _judge_mlflow(uri: str) -> Diagnosis:
    if not uri.startswith(("http://", "https://")):
        return Diagnosis("mlflow", "ok", f"installed; writes to {shown(uri)}")
    try:
        _connect(uri)
    except (OSError, ValueError) as error:
        text = f"{shown(uri)} cannot be reached: {error}"
        return Diagnosis("mlflow", "wrong", text, "tracking.mlflow_uri, or the server and the network")
    return Diagnosis("mlflow", "ok", f"installed; {shown(uri)} is reached")


def _judge_collector(endpoint: str) -> Diagnosis:
    try:
        check_opentelemetry()
    except ConfigError:
        return Diagnosis("spans", "wrong", "OpenTelemetry is not installed", "pip install 'agentrl[otel]'")
    try:
        _connect(endpoint)
    except (OSError, ValueError) as error:
        text = f"{shown(endpoint)} cannot be reached: {error}"
        cure = "tracking.spans.endpoint, or the collector and the network"
        return Diagnosis("spans", "slow", f"{text}; a run loses its spans, and nothing else", cure)
    return Diagnosis("spans", "ok", f"{shown(endpoint)} is reached")


def _connect(url: str) -> None:
    """Connect to the host of a URL; raise OSError if it cannot be reached."""
    place = urlsplit(url)
    port = place.port or (443 if place.scheme == "https" else 80)
    socket.create_connection((place.hostname or "", port), CONNECT_S).close()
