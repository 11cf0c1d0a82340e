"""Boxes on a server of SandboxFusion, which keeps nothing between two programs: the host keeps the files.

POST /run_code runs one program with some files, and returns others. Each request of a box is such a program:
it unpacks the working folder, answers like the servant of any other box, and packs the folder again.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import trio

from agentrl.errors import ConfigError, DataError, SandboxError, ServerError
from agentrl.extras.boxes.box import BoxEnded, BoxFileMissing, BoxMaker, BoxRefused, OpenBox, Start
from agentrl.extras.boxes.served_box import SERVANT, AskedBox, filled, framed, read_frame
from agentrl.http.client import HttpClient

PROGRAM = "import sys\nsys.argv = ['servant', 'once']\nexec(open('servant.py', encoding='utf-8').read())"
ROOM_S = 30.0
"""Seconds that a program may take beyond its command's own time: to unpack and to pack."""
CHECK_S = 30.0
MIB = 2**20


class FusionBoxes(BoxMaker):
    """Starts boxes whose commands run on the server at `url`. disk_mib: of a working folder.

    api_key: a bearer token; None: the server needs none.
    """

    def __init__(self, url: str, *, disk_mib: int, api_key: str | None = None) -> None:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        try:
            self._http = HttpClient(url, headers=headers, max_reply_bytes=4 * disk_mib * MIB + 64 * MIB)
        except ValueError as error:
            raise ConfigError(f"kind: fusion: url: {error}") from error
        self._url = url
        self._max_bytes = 2 * disk_mib * MIB

    def check(self) -> None:
        """Nothing is asked before the first box: the server may start together with the run."""

    async def start(self, start: Start) -> OpenBox:
        if start.image is not None:
            raise DataError(f"image {start.image!r}: a server of SandboxFusion has one image for all boxes")
        return await filled(FusionBox(self._http, max_bytes=self._max_bytes), start)


class FusionBox(AskedBox):
    """The files of a working folder, in this process; a command runs on the server. No process outlives its
    command.
    """

    def __init__(self, http: HttpClient, *, max_bytes: int) -> None:
        self._http = http
        self._max_bytes = max_bytes
        self._folder: bytes | None = None  # None: empty
        self._turn = trio.Lock()
        self._is_over = False

    async def stop(self) -> None:
        self._is_over, self._folder = True, None

    async def _ask(
        self, verb: str, body: bytes = b"", *, within_s: float = 0.0, **fields: Any
    ) -> tuple[Mapping[str, Any], bytes]:
        """Send a request and return its answer. A request that is cancelled changes nothing.

        Raises:
            BoxRefused: what was asked cannot be done. BoxEnded: the box is over.
            SandboxError: the server broke.
        """
        async with self._turn:
            if self._is_over:
                raise BoxEnded("the box was stopped")
            head = {"id": 0, "verb": verb, "max_folder_bytes": self._max_bytes, **fields}
            files = {"servant.py": SERVANT.encode(), "request": framed(json.dumps(head).encode(), body)}
            if self._folder is not None:
                files["folder.tar"] = self._folder
            found = await self._play(files, within_s=within_s)
            try:
                answer, content = read_frame(found["answer"])
            except (KeyError, ValueError) as error:
                raise BoxEnded("the box is over: a command destroyed its answer") from error
            if "refused" in answer:
                raise (BoxFileMissing if answer.get("is_missing") else BoxRefused)(str(answer["refused"]))
            self._folder = found.get("folder.tar", self._folder)
            return answer, content

    async def _play(self, files: Mapping[str, bytes], *, within_s: float) -> dict[str, bytes]:
        """Run the program with `files`, and return the files that it left.

        Raises:
            BoxRefused: the server ended it. SandboxError: the server broke, or answers with something else.
        """
        body = {
            "code": PROGRAM,
            "language": "python",
            "run_timeout": within_s + ROOM_S,
            "files": {path: base64.b64encode(content).decode() for path, content in files.items()},
            "fetch_files": ["answer", "folder.tar"],
        }
        try:
            with trio.fail_after(within_s + 2 * ROOM_S):
                reply = await self._http.request("POST", "/run_code", json=body)
            if reply.status != 200:
                raise SandboxError(f"{reply.origin}/run_code answered with status {reply.status}")
            answer = reply.json()
            result = answer["run_result"] or {}
            if answer["status"] == "SandboxError":
                raise SandboxError(f"{reply.origin}/run_code: {str(answer.get('message'))[:300]}")
            if result.get("status") == "TimeLimitExceeded":
                raise BoxRefused("the server ended the command, and its changes of files are lost")
            return {path: base64.b64decode(text) for path, text in answer["files"].items()}
        except trio.TooSlowError as error:
            raise SandboxError("the server of SandboxFusion did not answer in time") from error
        except ServerError as error:
            raise SandboxError(f"the server of SandboxFusion: {error}") from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SandboxError(f"/run_code answered with something else: {error!r}") from error
