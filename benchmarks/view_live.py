"""What an open page costs a run: CPU seconds of `agentrl view` beside those of the quickstart that it shows.

One client does what the page of a run does in a browser: it follows the events, and after each change it asks
for the state and for the curves (all of them, which is more than the page draws). CPU seconds of the run are
those of all processes that it started, seen twice a second: what lived shorter is missing, so the share is
told too high rather than too low.
"""

from __future__ import annotations

import argparse
import http.client
import json
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import psutil
from machine import write_result
from quickstart_runs import AGENTRL, ROOT, prepare

POLL_S = 0.5
WANTED_SHARE = 0.01


class CpuSeconds:
    """CPU seconds of a process and of all that it started, the ended ones included."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._seconds: dict[tuple[int, float], float] = {}

    def look(self) -> float:
        """Look at all processes, and return the sum so far."""
        try:
            found = [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            found = []
        for process in found:
            try:
                times = process.cpu_times()
                self._seconds[process.pid, process.create_time()] = times.user + times.system
            except psutil.NoSuchProcess:
                continue
        return sum(self._seconds.values())


class OpenPage:
    """A client that follows a page until the server ends. num_updates: changes that it asked about."""

    def __init__(self, address: str) -> None:
        found = urllib.parse.urlsplit(address)
        assert found.hostname is not None
        self._host, self._port, self._path = found.hostname, found.port, found.path
        self.num_updates = 0
        self.num_bytes = 0
        self.thread = threading.Thread(target=self._follow)
        self.thread.start()

    def _follow(self) -> None:
        stream = http.client.HTTPConnection(self._host, self._port)
        try:
            stream.request("GET", f"{self._path}api/events")
            for line in self._lines(stream.getresponse()):
                if line.startswith(("event: hello", "event: changed")):
                    self._draw()
                    self.num_updates += 1
        except (OSError, http.client.HTTPException):
            pass  # the server ended
        finally:
            stream.close()

    @staticmethod
    def _lines(reply: http.client.HTTPResponse) -> Iterator[str]:
        while line := reply.readline():
            yield line.decode()

    def _draw(self) -> None:
        overview = self._ask("overview?source=0")
        for kind, names in (("train", overview["names"]), ("validation", overview["validation_names"])):
            self._ask(f"series?source=0&kind={kind}&names={urllib.parse.quote(','.join(names))}")

    def _ask(self, question: str) -> dict[str, list[str]]:
        connection = http.client.HTTPConnection(self._host, self._port)
        try:
            connection.request("GET", f"{self._path}api/{question}")
            body = connection.getresponse().read()
            self.num_bytes += len(body)
            return dict(json.loads(body))
        finally:
            connection.close()


def measure(run_dir: Path, overrides: list[str]) -> dict[str, float]:
    """Make a run with a page open, and return what both cost."""
    began = time.monotonic()
    command = [*AGENTRL, "train", "configs/quickstart.yaml", f"trainer.run_dir={run_dir}", *overrides]
    with (run_dir.parent / "output.txt").open("w") as output:
        run = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    of_run = CpuSeconds(run.pid)
    while not (run_dir / "config.yaml").exists():
        assert run.poll() is None, (run_dir.parent / "output.txt").read_text()[-2000:]
        of_run.look()
        time.sleep(POLL_S)
    view = subprocess.Popen([*AGENTRL, "view", str(run_dir)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert view.stdout is not None
    try:
        page = OpenPage(view.stdout.readline().strip())
        of_view = CpuSeconds(view.pid)
        at_start = of_view.look()
        peak = 0
        while run.poll() is None:
            of_run.look()
            peak = max(peak, psutil.Process(view.pid).memory_info().rss)
            time.sleep(POLL_S)
        seconds = of_view.look()
    finally:
        view.terminate()
        view.wait()
    page.thread.join()
    assert page.num_updates, "the page saw no change of the run"
    assert run.returncode == 0, (run_dir.parent / "output.txt").read_text()[-2000:]
    return {
        "wall_s": time.monotonic() - began,
        "run_cpu_s": of_run.look(),
        "page_start_cpu_s": at_start,
        "page_cpu_s": seconds,
        "share_with_start": seconds / of_run.look(),
        "share": (seconds - at_start) / of_run.look(),
        "updates": page.num_updates,
        "bytes_sent": page.num_bytes,
        "page_peak_rss_bytes": peak,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "bench" / "view_live")
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for the run")
    options = parser.parse_args()
    prepare()
    folder = options.runs.resolve() / time.strftime("%Y%m%d_%H%M%S")
    folder.mkdir(parents=True)
    found = measure(folder / "run", [f"trainer.steps={options.steps}", *options.overrides])
    print({name: round(value, 4) for name, value in found.items()})
    write_result(options.out, found)
    return 0 if found["share_with_start"] <= WANTED_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
