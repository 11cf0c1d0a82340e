"""The sandbox as its callers see it: results, limits, files that stay, cancellation, refusal."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import ConfigError, SandboxError
from agentrl.extras.sandbox import WALLS, Limits, Program, Sandbox, SandboxOptions, open_sandbox, read_options
from agentrl.extras.sandbox.launcher.main import Execution
from agentrl.extras.sandbox.launcher.request import ExecutionRequest
from agentrl.extras.sandbox.launcher.seccomp import AUDIT_ARCH, ONLY_ITSELF, REFUSED, filter_program
from agentrl.extras.sandbox.launcher.tree import MAX_DEPTH, Budget, empty, pack, unpack
from agentrl.extras.sandbox.launcher.watch import ProcessWatch
from agentrl.extras.sandbox.process import LauncherProcess
from agentrl.extras.sandbox.protections import Protections, refuse

SANDBOX = Sandbox(SandboxOptions(Limits(wall_s=30.0, cpu_s=20.0, memory_mib=512)))


def run(source: str, sandbox: Sandbox = SANDBOX, **fields):
    return sandbox.run_sync(Program(source, **fields))


def test_output_and_exit() -> None:
    result = run("import sys; print(input()); print('error', file=sys.stderr); sys.exit(3)", stdin="hello\n")
    assert (result.stdout, result.stderr, result.exit_code, result.signal) == ("hello\n", "error\n", 3, None)
    assert not result.is_ok
    assert result.describe() == "exit code 3"


def test_streams_can_be_merged_in_the_order_they_were_written() -> None:
    result = run("import sys\nprint(1)\nprint(2, file=sys.stderr)\nprint(3)", is_merged=True)
    assert (result.stdout, result.stderr) == ("1\n2\n3\n", "")


@pytest.mark.parametrize(
    ("source", "printed", "shown"),
    [
        ("1 + 1", "", "2\n"),
        ("x = 3\nx * 2", "", "6\n"),
        ("None", "", ""),
        ("x = 1", "", ""),
        ("print('a')\n'b'", "a\n", "'b'\n"),
        ("", "", ""),
        ("# nothing", "", ""),
    ],
)
def test_the_last_value_is_shown_when_asked_for(source: str, printed: str, shown: str) -> None:
    assert run(source, echo=True).stdout == printed + shown
    assert run(source, echo=False).stdout == printed


def test_a_traceback_is_the_programs_own() -> None:
    result = run("def f():\n    return 1 / 0\n\nf()\n")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[0] == "Traceback (most recent call last):"
    assert 'main.py", line 4, in <module>' in result.stderr.splitlines()[1]
    assert result.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert "runner" not in result.stderr


def test_it_is_a_usual_main_module() -> None:
    source = """
import dataclasses, pickle, multiprocessing
@dataclasses.dataclass
class Point:
    x: int
def double(x):
    return 2 * x
if __name__ == "__main__":
    assert pickle.loads(pickle.dumps(Point(3))) == Point(3)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(pool.map(double, [1, 2]))
"""
    result = run(source)
    assert result.stdout == "[2, 4]\n", result.stderr


def test_installed_packages_are_there_unless_told_otherwise() -> None:
    source = "import numpy; print(int(numpy.arange(4).sum()))"
    assert run(source).stdout == "6\n"
    bare = Sandbox(SandboxOptions(packages=False))
    assert "ModuleNotFoundError" in run(source, bare).stderr


def test_files_are_given_and_stay_in_a_workspace(tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    workspace.touch()
    first = run(
        "import os; os.mkdir('d'); open('d/y', 'w').write(open('in/x').read() * 2)",
        files={"in/x": b"ab"},
        workspace=workspace,
    )
    assert first.is_ok, first.stderr
    assert run("print(open('d/y').read(), open('in/x').read())", workspace=workspace).stdout == "abab ab\n"
    assert run("import os; print(os.listdir('.'))").stdout == "[]\n"


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", "", "a//b"])
def test_files_are_given_only_below_the_working_folder(path: str) -> None:
    with pytest.raises(ValueError, match="relative path"):
        run("", files={path: b""})


@pytest.mark.parametrize(
    ("limits", "source", "ended_by"),
    [
        ({"wall_s": 1.0}, "import time; time.sleep(60)", "wall"),
        ({"cpu_s": 1.0}, "while True: pass", "cpu"),
        ({"output_kib": 4}, "print('x' * 5000); import time; time.sleep(60)", "output"),
        (
            {"memory_mib": 200},
            "import os, time\nfor _ in range(3):\n    os.fork()\nx = b'x' * (60 << 20)\ntime.sleep(60)",
            "memory",
        ),
    ],
)
def test_limits_end_a_program_and_say_so(limits: dict, source: str, ended_by: str) -> None:
    result = run(source, Sandbox(SandboxOptions(Limits(**{"wall_s": 60.0, "cpu_s": 30.0, **limits}))))
    assert result.ended_by == ended_by
    assert result.exit_code is None
    assert result.wall_s < 40
    assert result.describe()
    assert result.is_timed_out == (ended_by in ("wall", "cpu"))
    assert len(result.stdout) <= 256 * 1024


def test_output_up_to_the_limit_is_whole() -> None:
    sandbox = Sandbox(SandboxOptions(Limits(output_kib=4)))
    result = run("print('x' * 4095)", sandbox)
    assert (len(result.stdout), result.is_output_truncated, result.is_ok) == (4096, False, True)


def test_one_process_that_wants_too_much_memory_may_handle_it() -> None:
    assert run("try:\n    bytearray(10**10)\nexcept MemoryError:\n    print('no')").stdout == "no\n"
    result = run("bytearray(10**10)")
    assert result.stderr.rstrip().rpartition("\n")[2].startswith("MemoryError")
    assert result.exit_code == 1


def test_cancelling_ends_the_program_before_it_returns(tmp_path: Path) -> None:
    async def main() -> float:
        await SANDBOX.run(Program(""))  # tested and warm
        with trio.move_on_after(1.0) as scope:
            await SANDBOX.run(Program("import time; time.sleep(600)"))
        assert scope.cancelled_caught
        return trio.current_time()

    before = time.monotonic()
    trio.run(main)
    assert time.monotonic() - before < 20


def test_many_at_once_are_answered_by_their_own_output() -> None:
    async def main() -> list[str]:
        outputs = [""] * 12

        async def one(index: int) -> None:
            outputs[index] = (await SANDBOX.run(Program(f"print({index})"))).stdout

        async with trio.open_nursery() as nursery:
            for index in range(12):
                nursery.start_soon(one, index)
        return outputs

    assert trio.run(main) == [f"{index}\n" for index in range(12)]


async def test_errors_of_the_sandbox_come_out_as_themselves(monkeypatch) -> None:
    def broken(self) -> dict:
        raise SandboxError("no more processes")

    SANDBOX.check()
    monkeypatch.setattr(LauncherProcess, "run", broken)
    with pytest.raises(SandboxError, match="no more processes"):
        await SANDBOX.run(Program("1"))


def test_two_programs_talk_and_end_with_the_judge() -> None:
    echo = "import os\nwhile data := os.read(3, 100): os.write(4, data.upper())\nprint('end')"
    # It stays for the other's report: what has not reported when the judge ends is killed.
    judge = (
        "import os, time\nos.write(4, b'hello')\nprint(os.read(3, 100))\n"
        "os.close(4)\nassert not os.read(3, 1)\ntime.sleep(2)"
    )
    ended, judged = trio.run(SANDBOX.run_pair, Program(echo), Program(judge))
    assert judged.stdout == "b'HELLO'\n"
    assert ended is not None
    assert ended.stdout == "end\n"
    left, judged = trio.run(SANDBOX.run_pair, Program("import time\ntime.sleep(1000)"), Program("print(1)"))
    assert (left, judged.stdout) == (None, "1\n")


def test_the_judge_sees_the_end_of_a_program_that_left_others_behind() -> None:
    source = "import os, time\nif os.fork() == 0:\n    time.sleep(1000)\nos._exit(0)"
    ended, judged = trio.run(SANDBOX.run_pair, Program(source), Program("import os\nprint(os.read(3, 100))"))
    assert (ended.exit_code, judged.stdout) == (0, "b''\n")


def test_neither_of_two_programs_has_more_than_its_ends_of_the_pipes() -> None:
    source = "import os\nprint(sorted(n for n in range(256) if _is_open(n)))"
    source = (
        "import os\ndef _is_open(n):\n    try: return bool(os.fstat(n))\n    except OSError: return "
        f"False\n{source}"
    )
    results = trio.run(SANDBOX.run_pair, Program(source), Program(f"import os\nos.read(3, 1)\n{source}"))
    assert [result.stdout for result in results] == ["[0, 1, 2, 3, 4]\n"] * 2
    assert run(source).stdout == "[0, 1, 2]\n"


def test_a_pair_is_cancelled_as_a_whole() -> None:
    async def run_for_a_moment() -> bool:
        with trio.move_on_after(0.5) as scope:
            await SANDBOX.run_pair(
                Program("import time\ntime.sleep(1000)"), Program("import time\ntime.sleep(1000)")
            )
        return scope.cancelled_caught

    assert trio.run(run_for_a_moment)


@pytest.mark.parametrize(
    ("report", "status", "error"), [(b"started\n", signal.SIGKILL, ""), (b"", -1, "ended without a report")]
)
def test_who_ends_the_process_that_waits_for_it_has_failed_itself(
    report: bytes, status: int, error: str
) -> None:
    request = ExecutionRequest({**SANDBOX._request(Program(""), Limits()), "channel": []})
    watch = ProcessWatch(request, outputs=(1, 2), status=3, host=0, num_oom_kills=lambda: 0)
    watch.report = report
    reply = Execution(request, 0)._reply(watch)
    assert reply["status"] == status
    assert error in reply["error"]
    assert bool(error) == bool(reply["error"])


def test_a_program_dies_with_its_host() -> None:
    source = """
import sys
from agentrl.extras.sandbox import Program, Sandbox, SandboxOptions, Limits
sandbox = Sandbox(SandboxOptions(Limits(wall_s=300.0)))
sandbox.check()
print("ready", flush=True)
sandbox.run_sync(Program("import os, time; os.fork(); time.sleep(300)"))
"""
    host = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE)
    assert host.stdout.readline() == b"ready\n"
    launchers = []
    while not launchers:  # it is started right after
        launchers = Path(f"/proc/{host.pid}/task/{host.pid}/children").read_text().split()
    host.kill()
    host.wait()
    host.stdout.close()
    deadline = time.monotonic() + 20
    while any(_is_running(pid) for pid in launchers):
        assert time.monotonic() < deadline, "the launcher outlived its host"
        time.sleep(0.05)


def _is_running(pid: str) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


# ------------------------------------------------------------------------------------------------------ walls


def test_all_walls_stand_here_and_the_report_says_so(caplog) -> None:
    with caplog.at_level(logging.INFO, logger="agentrl.extras.sandbox"):
        sandbox = Sandbox(SandboxOptions(Limits(memory_mib=256)))
        protections = sandbox.check()
        sandbox.check()
    assert protections.active == WALLS
    assert [record.getMessage() for record in caplog.records] == [str(protections)]
    assert "NOT PROTECTED" not in str(protections)


def test_a_missing_wall_is_found_and_refused_until_allowed() -> None:
    sandbox = Sandbox(SandboxOptions(), avoid=("seccomp",))
    with pytest.raises(
        ConfigError, match=r"privileges \(system calls are not filtered.*allow_unprotected: \[privileges\]"
    ):
        run("1", sandbox)
    allowed = Sandbox(SandboxOptions(allow_unprotected=("privileges",)), avoid=("seccomp",))
    assert run("print(1)", allowed).stdout == "1\n"
    assert "NOT PROTECTED: privileges" in str(allowed.check())


def test_refusal_names_every_gap() -> None:
    protections = Protections(("memory",), {"network": "a server was reached", "disk": "not limited"}, ())
    with pytest.raises(
        ConfigError, match=r"network \(a server was reached\); disk \(not limited\)"
    ) as refused:
        refuse(protections, ())
    assert "allow_unprotected: [network, disk]" in str(refused.value)
    with pytest.raises(ConfigError, match=r"is not protected from the model's programs: disk"):
        refuse(protections, ("network",))
    refuse(protections, ("network", "disk"))


def evaluate(program, number: int, *arguments: int, arch: int) -> int:
    """Run a BPF program as the kernel does: an independent reading of its five instructions."""
    data = {0: number, 4: arch} | {16 + 8 * index: value for index, value in enumerate(arguments)}
    accumulator, at = 0, 0
    while True:
        code, if_true, if_false, constant = program[at]
        at += 1
        match code:
            case 0x20:
                accumulator = data.get(constant, 0)
            case 0x15:
                at += if_true if accumulator == constant else if_false
            case 0x35:
                at += if_true if accumulator >= constant else if_false
            case 0x45:
                at += if_true if accumulator & constant else if_false
            case 0x06:
                return constant
            case _:
                raise AssertionError(hex(code))


@pytest.mark.parametrize("arch", AUDIT_ARCH)
def test_the_filter_refuses_what_it_lists_and_nothing_else(arch: str) -> None:
    program = filter_program(arch, keeps_metadata=False)
    column = 0 if arch == "x86_64" else 1
    clone, ioctl = (56, 16) if arch == "x86_64" else (220, 29)
    refused = {numbers[column] for numbers in REFUSED.values()}
    others = {numbers[column] for numbers in ONLY_ITSELF.values()} | {clone, ioctl}
    ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x50001, 0x50026, 0x80000000
    for number in range(463):
        expected = EPERM if number in refused else ENOSYS if number == 435 else ALLOW
        assert evaluate(program, number, arch=AUDIT_ARCH[arch]) == expected, number
        assert evaluate(program, number, arch=0x40000003) == KILL
    assert evaluate(program, 463, arch=AUDIT_ARCH[arch]) == ENOSYS
    assert evaluate(program, 0x40000000 | 41, arch=AUDIT_ARCH[arch]) == KILL
    for number in others - {clone, ioctl}:
        assert evaluate(program, number, 77, arch=AUDIT_ARCH[arch]) == EPERM
    assert evaluate(program, clone, 0x10000011, arch=AUDIT_ARCH[arch]) == EPERM
    assert evaluate(program, clone, 0x003D0F00, arch=AUDIT_ARCH[arch]) == ALLOW  # a thread
    assert evaluate(program, ioctl, 1, 0x5412, arch=AUDIT_ARCH[arch]) == EPERM
    assert evaluate(program, ioctl, 1, 0x541C, arch=AUDIT_ARCH[arch]) == EPERM
    assert evaluate(program, ioctl, 1, 0x5401, arch=AUDIT_ARCH[arch]) == ALLOW


# ------------------------------------------------------------------------------------------------------ files


def names() -> st.SearchStrategy[str]:
    return st.text(alphabet="ab.-é \n", min_size=1, max_size=4).filter(lambda name: name not in (".", ".."))


def trees() -> st.SearchStrategy[dict]:
    leaves = st.binary(max_size=20) | st.sampled_from(["/etc/passwd", "..", "x"])
    return st.dictionaries(
        names(),
        st.recursive(leaves, lambda inner: st.dictionaries(names(), inner, max_size=3), max_leaves=6),
        max_size=4,
    )


def write_tree(folder: Path, tree: dict) -> None:
    for name, content in tree.items():
        if isinstance(content, dict):
            (folder / name).mkdir()
            write_tree(folder / name, content)
        elif isinstance(content, str):
            (folder / name).symlink_to(content)
        else:
            (folder / name).write_bytes(content)


def read_tree(folder: Path) -> dict:
    return {
        path.name: os.readlink(path)
        if path.is_symlink()
        else read_tree(path)
        if path.is_dir()
        else path.read_bytes()
        for path in folder.iterdir()
    }


@settings(max_examples=60)
@given(trees())
def test_a_tree_is_packed_and_unpacked_as_it_was(tmp_path_factory, tree: dict) -> None:
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("target")
    write_tree(source, tree)
    with _opened(source) as descriptor:
        data = pack(descriptor, Budget(10**6, 1000))
        empty(descriptor)
    with _opened(target) as descriptor:
        unpack(data, descriptor, owner=None)
    assert read_tree(target) == tree
    assert list(source.iterdir()) == []


def test_what_is_kept_is_bounded_by_size_number_and_depth(tmp_path: Path) -> None:
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(10**12)
    deep = tmp_path
    for _ in range(MAX_DEPTH + 5):
        deep = deep / "d"
        deep.mkdir()
    budget = Budget(1000, 1000)
    with _opened(tmp_path) as descriptor:
        data = pack(descriptor, budget)
        assert budget.is_exceeded
        assert len(data) < 10_000
        empty(descriptor)
    assert list(tmp_path.iterdir()) == []


class _opened:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> int:
        self._descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        return self._descriptor

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


# ---------------------------------------------------------------------------------------------------- options


def test_options_are_read_from_a_plugins_config() -> None:
    options = read_options(
        {"cpu_s": 2, "allow_unprotected": ["disk"], "packages": False, "mine": 1}, key="k", others=("mine",)
    )
    assert options == SandboxOptions(Limits(cpu_s=2), ("disk",), packages=False)
    assert open_sandbox(options) is open_sandbox(options)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"cpu": 1}, "k: unknown cpu; available: cpu_s"),
        ({"cpu_s": 0}, "cpu_s=0; give a finite number above 0"),
        ({"wall_s": float("inf")}, "wall_s=inf; give a finite number"),
        ({"max_processes": 1.5}, "max_processes=1.5; give a finite whole number"),
        ({"memory_mib": True}, "memory_mib=True"),
        ({"allow_unprotected": "disk"}, "k.allow_unprotected='disk': must be a list of filesystem"),
        ({"allow_unprotected": ["disc"]}, r"k.allow_unprotected=\['disc'\]: must be a list of filesystem"),
        ({"packages": "no"}, "k.packages='no': true or false"),
        ({"max_concurrent": 0}, "k.max_concurrent=0"),
    ],
)
def test_wrong_options_are_answered_with_what_would_be_right(config: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_options(config, key="k")
