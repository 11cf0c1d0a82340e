"""What boxes ask of Modal beside their sandboxes, by Modal's own client, and how they ask it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from agentrl.errors import ConfigError, DataError, SandboxError

log = logging.getLogger(__name__)

T = TypeVar("T")

TOKEN_ENV = ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET")
REMOVAL_S = 30.0
WAITS_S = (1.0, 2.0, 4.0, 8.0)
"""Before another try, if Modal does not say how long to wait. If it does, the client waits."""
BUSY = ("ResourceExhaustedError",)
"""Nothing was done: asked again, whatever it was."""
BROKEN = (*BUSY, "ServiceError", "InternalError", "ConnectionError", "AlreadyExistsError")
"""Perhaps something was done: asked again if twice is as good as once."""


class TooLong(SandboxError):
    """A command did not end in time."""


class NoFile(SandboxError):
    """A sandbox has no such file."""


class NotThere(SandboxError):
    """Modal does not know this."""


class ModalCloud:
    """An app of a workspace, with its images and sandboxes. The methods run in any event loop."""

    def __init__(self, app: str) -> None:
        self._app_name = app
        self._client: Any = None
        self._app: Any = None
        self._images: dict[str | None, Any] = {}

    async def client(self) -> Any:
        if self._client is None:
            logging.getLogger("hpack").setLevel(logging.INFO)  # its DEBUG has all headers: the token
            token = [os.environ[name] for name in TOKEN_ENV]
            self._client = await client_module().Client.from_credentials.aio(*token)
        return self._client

    async def app(self) -> Any:
        """Return the app. It is made if it is not there."""
        if self._app is None:
            self._app = await client_module().App.lookup.aio(
                self._app_name, client=await self.client(), create_if_missing=True
            )
        return self._app

    async def image(self, name: str | None) -> Any:
        """Return an image that Modal has, or fetches from a registry; None: Modal's own.

        Raises:
            DataError: there is no such image, or it cannot be used.
        """
        if name not in self._images:
            modal = client_module()
            if name is None:
                asked = modal.Image.debian_slim()
            else:
                by_name = modal.Image.from_id if name.startswith("im-") else modal.Image.from_registry
                asked = by_name(name)
            refusals = (
                modal.exception.NotFoundError,
                modal.exception.InvalidError,
                modal.exception.ImageBuildError,
            )
            app = await self.app()
            try:
                self._images[name] = await asked.build.aio(app)
            except refusals as error:
                if name is None:
                    raise
                raise DataError(f"image {name!r}: {line(error)}") from error
        return self._images[name]

    async def tags(self, wanted: Mapping[str, str]) -> dict[str, Mapping[str, str]]:
        """Return the tags of each sandbox of the app that has those which are wanted."""
        modal, client = client_module(), await self.client()
        try:
            app = await modal.App.lookup.aio(self._app_name, client=client)
        except modal.exception.NotFoundError:
            return {}
        listed = modal.Sandbox.list.aio(app_id=app.app_id, tags=dict(wanted), client=client)
        sandboxes = [one async for one in listed]
        tags = await asyncio.gather(*(one.get_tags.aio() for one in sandboxes), return_exceptions=True)
        told: dict[str, Mapping[str, str]] = {}
        for sandbox, found in zip(sandboxes, tags, strict=True):
            if isinstance(found, modal.exception.NotFoundError):  # it has ended meanwhile
                continue
            if isinstance(found, BaseException):
                raise found
            told[sandbox.object_id] = found
        return told

    async def end(self, sandbox_id: str) -> None:
        sandbox = await client_module().Sandbox.from_id.aio(sandbox_id, client=await self.client())
        await sandbox.terminate.aio()

    async def remove(self, name: str) -> None:
        """End a sandbox that perhaps was made. If this fails, Modal ends it when it counts as idle."""
        modal = client_module()
        try:
            async with asyncio.timeout(REMOVAL_S):
                found = await modal.Sandbox.from_name.aio(self._app_name, name, client=await self.client())
                await found.terminate.aio()
        except modal.exception.NotFoundError:
            return
        except (modal.exception.Error, OSError) as error:
            log.warning("sandbox %s may be left until it counts as idle: %s", name, line(error))


def asked(method: Callable[[], Awaitable[T]], *, within_s: float, again: tuple[str, ...] = BROKEN) -> T:
    """Await what a method of the client returns, in an event loop of this thread.

    Raises:
        SandboxError: Modal broke, does not answer, or is busy for too long; its subclasses say more.
    """
    exception = client_module().exception
    try:
        return asyncio.run(asyncio.wait_for(patiently(method, again=again), within_s))
    except TimeoutError as error:
        raise SandboxError(f"Modal: no answer within {within_s:g} s") from error
    except exception.SandboxFilesystemNotFoundError as error:
        raise NoFile(line(error)) from error
    except exception.NotFoundError as error:
        raise NotThere(line(error)) from error
    except exception.ExecTimeoutError as error:
        raise TooLong(line(error)) from error
    except (exception.Error, OSError) as error:
        raise SandboxError(line(error)) from error


async def patiently(method: Callable[[], Awaitable[T]], *, again: tuple[str, ...]) -> T:
    """Await what a method returns, and ask again after the errors in `again`."""
    errors = tuple(getattr(client_module().exception, name) for name in again)
    for wait_s in WAITS_S:
        try:
            return await method()
        except errors:
            await asyncio.sleep(wait_s)
    return await method()


def client_module() -> Any:
    """Return the client's module.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import modal
    except ImportError as error:
        raise ConfigError("kind: modal needs Modal's client: pip install 'agentrl[modal]'") from error
    return modal


def line(error: Exception) -> str:
    return f"Modal: {' '.join(str(error).split())[:300] or type(error).__name__}"
