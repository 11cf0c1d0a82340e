"""Options of environments with a box: which back end, how many boxes, and the limits of each."""

from __future__ import annotations

import functools
import logging
import re
from typing import Literal

from pydantic import Field, model_validator

from agentrl.extras.boxes.audit import Containers
from agentrl.extras.boxes.box import BoxMaker
from agentrl.extras.boxes.bubblewrap import BubblewrapBoxes
from agentrl.extras.boxes.container import ContainerBoxes
from agentrl.extras.boxes.daytona import DaytonaBoxes
from agentrl.extras.boxes.e2b import E2bBoxes
from agentrl.extras.boxes.fusion import FusionBoxes
from agentrl.extras.boxes.leases import Keeper, sweep
from agentrl.extras.boxes.modal import ModalBoxes
from agentrl.extras.boxes.pool import BoxPool
from agentrl.extras.boxes.process_box import ProcessBoxes
from agentrl.extras.sandbox import Limits, Sandbox, SandboxOptions, Wall
from agentrl.plugins.options import Options, secret

log = logging.getLogger(__name__)

FOLDER = re.compile(r"(/(?!\.\.?(/|$))[^/]+)+")
BoxKind = Literal["process", "bubblewrap", "podman", "docker", "fusion", "e2b", "daytona", "modal"]
MODAL_MAX_S = 24 * 3600
"""Modal starts no sandbox for longer."""


class ModalOptions(Options):
    """Options of kind modal that other kinds do not have."""

    app: str = Field(
        "agentrl",
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="App that sandboxes belong to; it is made if it is not there.",
    )
    region: str | None = Field(
        None, description="Where Modal may place sandboxes, such as us-east; None: anywhere."
    )
    cpus: float | None = Field(
        None, gt=0, description="Processor cores of a sandbox, reserved and at most; None: Modal's default."
    )
    internet: bool = Field(False, description="Sandboxes reach the internet.")
    idle_s: float = Field(
        300.0,
        ge=30,
        description="Modal ends a sandbox that gets no sign of life from its rollout process for so long.",
    )


class WorkspaceOptions(Options):
    """Options in `agent.environment_config.workspace` and `agent.environment_config.repository`."""

    kind: BoxKind = Field("process", description="Where boxes run.")
    image: str | None = Field(
        None,
        description="Image of rows that name none: a name that the engine knows, for bubblewrap a folder "
        "with an unpacked root file system, for e2b a template, for daytona a snapshot, for modal an image "
        "of a registry, or its id at Modal.",
    )
    folder: str | None = Field(
        None,
        description="Working folder as the image has it, such as /testbed; None: an empty one.",
    )
    command: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        description="Command of podman or docker, with options for all its calls; None: the kind's name.",
    )
    url: str | None = Field(None, description="Server of kind fusion, such as http://127.0.0.1:8080.")
    api_key_env: str | None = Field(
        None,
        description="Environment variable with the key of kind fusion, e2b or daytona; None: none for "
        "fusion, that of the client for the others: E2B_API_KEY, DAYTONA_API_KEY.",
    )
    warm: int = Field(
        0,
        ge=0,
        description="Empty boxes that each rollout process keeps ready besides, of the configured image.",
    )
    scratch: tuple[str, ...] = Field(
        (),
        description="Further writable folders of a box, empty at first, such as /data; not of kind process.",
    )
    max_boxes: int = Field(
        16, ge=1, description="Boxes at a time in each rollout process; further attempts wait in their start."
    )
    command_timeout_s: float = Field(
        20.0, gt=0, description="Deadline of a command; keep it below agent.tool_timeout_s."
    )
    output_kib: int = Field(32, ge=1, description="Output of a command that is kept; the middle is left out.")
    lifetime_s: float = Field(3600.0, gt=0, description="A box that is older is ended.")
    cpu_s: float = Field(
        600.0,
        gt=0,
        description="CPU seconds of a box, over all of its processes; of each, if not of kind process.",
    )
    memory_mib: int = Field(2048, ge=256, description="Memory of a box, its files included.")
    max_processes: int = Field(64, ge=4, description="Processes and threads of a box.")
    disk_mib: int = Field(256, ge=1, description="Files of a box.")
    max_files: int = Field(20_000, ge=16, description="Files and folders of a box; of kind process.")
    modal: ModalOptions = Field(ModalOptions(), description="What only kind modal has.")
    allow_unprotected: tuple[Wall, ...] = Field(
        (), description="Walls of the sandbox that may be missing on this machine (agentrl docs sandbox)."
    )

    @model_validator(mode="after")
    def _has_what_its_kind_knows(self) -> WorkspaceOptions:
        if self.kind in ("process", "fusion") and (self.image is not None or self.folder is not None):
            raise ValueError(
                f"kind {self.kind!r} has no images: leave out image and folder, or use another kind"
            )
        if self.kind in ("process", "fusion", "e2b", "daytona", "modal") and self.scratch:
            raise ValueError(f"kind {self.kind!r} has no further writable folders: leave out scratch")
        if (self.kind == "fusion") != (self.url is not None):
            raise ValueError("url: kind fusion needs the URL of its server, and no other kind has one")
        if self.api_key_env is not None and self.kind not in ("fusion", "e2b", "daytona"):
            raise ValueError(f"kind {self.kind!r} has no api_key_env; it is for fusion, e2b and daytona")
        if "modal" in self.model_fields_set and self.kind != "modal":
            raise ValueError(f"kind {self.kind!r} has no options modal; they are for kind modal")
        if self.kind == "modal" and self.lifetime_s > MODAL_MAX_S:
            raise ValueError(
                f"lifetime_s={self.lifetime_s:g}: Modal ends a sandbox after a day: at most {MODAL_MAX_S}"
            )
        if self.command is not None and self.kind not in ("podman", "docker"):
            raise ValueError(f"kind {self.kind!r} has no command; it is for podman and docker")
        if self.folder is not None and not FOLDER.fullmatch(self.folder):
            raise ValueError(f"folder={self.folder!r}: give an absolute path below /")
        return self


@functools.lru_cache(maxsize=64)
def open_pool(options: WorkspaceOptions) -> BoxPool:
    """Return this process's one pool with these options, after its back end was checked.

    Raises:
        ConfigError: the back end is not installed, or does not isolate.
    """
    maker = _maker(options)
    maker.check()
    for box in [] if (keeper := _keeper(maker)) is None else sweep(keeper):
        log.warning("removed box %s: its owner %s has ended", box.name, box.lease)
    return BoxPool(
        maker, max_boxes=options.max_boxes, num_warm=options.warm, max_warm_s=options.lifetime_s / 4
    )


def _keeper(maker: BoxMaker) -> Keeper | None:
    """Return what keeps boxes beyond the life of this process; None for kinds whose boxes end with it."""
    match maker:
        case ContainerBoxes():
            return Containers(maker.command)
        case E2bBoxes() | DaytonaBoxes() | ModalBoxes():
            return maker
    return None


def _maker(options: WorkspaceOptions) -> BoxMaker:
    limits = Limits(
        cpu_s=options.cpu_s,
        wall_s=options.lifetime_s,
        memory_mib=options.memory_mib,
        max_processes=options.max_processes,
        file_mib=options.disk_mib,
        disk_mib=options.disk_mib,
        max_files=options.max_files,
        max_open_files=1024,
    )
    image, folder, allowed = options.image, options.folder, options.allow_unprotected
    match options.kind:
        case "process":
            return ProcessBoxes(Sandbox(SandboxOptions(limits, allow_unprotected=allowed)))
        case "bubblewrap":
            return BubblewrapBoxes(
                limits, image=image, folder=folder, scratch=options.scratch, allow_unprotected=allowed
            )
        case "podman" | "docker":
            command = options.command or (options.kind,)
            return ContainerBoxes(
                limits, command=command, image=image, folder=folder, scratch=options.scratch
            )
        case "fusion":
            assert options.url is not None
            key = secret(options.api_key_env, plugin="boxes of kind 'fusion'")
            return FusionBoxes(options.url, disk_mib=options.disk_mib, api_key=key)
        case "e2b":
            key = secret(options.api_key_env, plugin="boxes of kind 'e2b'")
            return E2bBoxes(lifetime_s=options.lifetime_s, image=image, folder=folder, api_key=key)
        case "daytona":
            key = secret(options.api_key_env, plugin="boxes of kind 'daytona'")
            return DaytonaBoxes(lifetime_s=options.lifetime_s, image=image, folder=folder, api_key=key)
        case "modal":
            return ModalBoxes(
                app=options.modal.app,
                lifetime_s=options.lifetime_s,
                idle_s=options.modal.idle_s,
                memory_mib=options.memory_mib,
                cpus=options.modal.cpus,
                image=image,
                folder=folder,
                region=options.modal.region,
                has_internet=options.modal.internet,
            )
