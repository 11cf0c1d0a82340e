"""Check `trackers`: those that the config asks for, and whether they can be reached."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from importlib.util import find_spec
from urllib.parse import urlsplit

from agentrl.doctor.diagnosis import Diagnosis
from agentrl.doctor.subject import Subject

PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboard"}
CONNECT_S = 5.0
OFFLINE = "tracking.wandb_mode=offline"


def diagnose(subject: Subject) -> Iterator[Diagnosis]:
    """Look for the package of each tracker, and log in to wandb if its mode is online."""
    if not subject.is_given:
        return
    for name in subject.config.trainer.logger:
        package = PACKAGES.get(name)
        if package is None:
            continue
        if find_spec(package) is None:
            yield Diagnosis(name, "wrong", f"{package} is not installed", f"pip install {package}")
        elif name == "wandb" and subject.config.tracking.wandb_mode == "online":
            yield _judge_login()
        else:
            yield Diagnosis(name, "ok", "installed; writes to the run folder")


def _judge_login() -> Diagnosis:
    import wandb

    url = str(wandb.Settings().base_url)
    if not wandb.api.api_key:
        return Diagnosis("wandb", "wrong", f"no key for {url}", f"`wandb login`, or {OFFLINE}")
    place = urlsplit(url)
    port = place.port or (443 if place.scheme == "https" else 80)
    try:
        socket.create_connection((place.hostname or "", port), CONNECT_S).close()
    except OSError as error:
        return Diagnosis("wandb", "wrong", f"{url} cannot be reached: {error}", f"the network, or {OFFLINE}")
    try:
        wandb.login(prompt=False, verify=True, timeout=int(CONNECT_S))
    except (wandb.Error, ValueError) as error:
        first = str(error).splitlines()[0]
        return Diagnosis("wandb", "wrong", f"{url} refuses the key: {first}", "`wandb login --relogin`")
    return Diagnosis("wandb", "ok", f"logged in at {url}")
