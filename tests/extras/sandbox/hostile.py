"""Programs that try to get out, to stay, or to take the machine with them. Each says ESCAPED when it succeeds
at something.

Read as text by the tests, never imported: `programs()` gives name -> source.
"""

PREAMBLE = """
import ctypes, errno, json, mmap, os, signal, socket, sys, threading, time
bait = json.load(sys.stdin)
libc = ctypes.CDLL(None, use_errno=True)

def escaped(what):
    print("ESCAPED", what, flush=True)

def attempt(what, function, *args):
    try:
        function(*args)
    except (OSError, MemoryError, ValueError, LookupError):
        return
    escaped(what)

def attempt_call(what, number, *args):
    if libc.syscall(number, *args) >= 0:
        escaped(what)

def expect_failure(what, result):
    if result == 0:
        escaped(what)

def write(path):
    with open(path, "w") as file:
        file.write("hostile")

def read(path):
    with open(path, "rb") as file:
        return file.read(100)
"""

PROGRAMS = {
    # --------------------------------------------------------------------------- taking the machine with them
    "fork_bomb": """
while True:
    try:
        os.fork()
    except OSError:
        pass
""",
    "fork_bomb_in_new_sessions": """
while True:
    try:
        if os.fork() == 0:
            os.setsid()
    except OSError:
        time.sleep(0.01)
""",
    "thread_bomb": """
def forever():
    while True:
        pass
while True:
    try:
        threading.Thread(target=forever).start()
    except (RuntimeError, MemoryError):
        pass
""",
    "memory_bytearray": """
kept = []
while True:
    kept.append(bytearray(16 << 20))
""",
    "memory_malloc": """
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
taken = 0
while (address := libc.malloc(8 << 20)):
    ctypes.memset(address, 1, 8 << 20)
    taken += 8
    if taken > 2048:
        escaped("two gigabytes")
        break
""",
    "memory_mmap_shared": """
kept = []
try:
    while len(kept) < 128:
        kept.append(mmap.mmap(-1, 16 << 20, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS))
        kept[-1].write(b"x" * (16 << 20))
    escaped("two gigabytes of shared memory")
except (OSError, MemoryError):
    pass
""",
    "memory_of_many_processes": """
for _ in range(8):
    try:
        child = os.fork()
    except OSError:  # without namespaces processes are counted per user of the host, and others have some too
        break
    if child == 0:
        kept = bytearray(b"x" * (100 << 20))
        time.sleep(60)
        escaped("800 megabytes for a minute")
time.sleep(60)
""",
    "memory_without_a_process": """
for _ in range(64):
    descriptor = os.memfd_create("x")
    os.write(descriptor, b"x" * (8 << 20))
escaped("half a gigabyte that no process has")
""",
    "memory_sysv": """
number = libc.shmget(0, 64 << 20, 0o1600)
if number >= 0:
    escaped("a shared segment that stays")
""",
    "infinite_loop": "while True: pass",
    "sleep_forever": "time.sleep(10**6)",
    "ignores_every_signal": """
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True: pass
""",
    "stops_itself": "os.kill(os.getpid(), signal.SIGSTOP)",
    "flood_of_output": "while True: print('x' * 100000)",
    "flood_of_errors": "while True: sys.stderr.write('x' * 100000)",
    "flood_by_children": """
for _ in range(4):
    if os.fork() == 0:
        while True: os.write(1, b"y" * 65536)
time.sleep(60)
""",
    "huge_file": """
total = 0
with open("huge", "wb") as file:
    try:
        for _ in range(1024):
            total += file.write(b"x" * (1 << 20))
    except OSError as error:
        print("stopped", total)
    else:
        escaped("a gigabyte in a file")
""",
    "many_large_files": """
written = 0
try:
    for number in range(1000):
        with open(f"file{number}", "wb") as file:
            file.write(b"x" * (4 << 20))
            written += 4
except OSError:
    pass
if written > 200:
    escaped(f"{written} megabytes")
""",
    "many_files": """
count = 0
try:
    while count < 100000:
        open(f"file{count}", "w").close()
        count += 1
except OSError:
    pass
if count >= 100000:
    escaped("100000 files")
""",
    "sparse_files_and_links": """
for number in range(50):
    with open(f"sparse{number}", "wb") as file:
        try:
            file.truncate(8 << 20)
        except OSError:
            break
try:
    for number in range(1000):
        os.link("sparse0", f"link{number}")
except OSError:
    pass
""",
    "folders_without_end": """
try:
    for _ in range(3000):
        os.mkdir("d")
        os.chdir("d")
except OSError:
    pass
""",
    "names_and_kinds_of_files": """
for name in (b"\\xff\\xfe", b"new\\nline", b"-rf", b" ", "\\u202e".encode(), b"x" * 255):
    try:
        open(name, "w").close()
    except OSError:
        pass
links = (lambda: os.symlink("/etc", "link"), lambda: os.symlink("loop", "loop"))
for make in (lambda: os.mkfifo("fifo"), lambda: os.mkdir("closed", 0), *links):
    try:
        make()
    except OSError:
        pass
os.chmod(".", 0)
""",
    # --------------------------------------------------------------------------------------- reading the host
    "read_shadow": 'attempt("shadow", read, "/etc/shadow")',
    "read_passwd": """
try:
    if b"root" in read("/etc/passwd"):
        escaped("the host's accounts")
except OSError:
    pass
""",
    "read_project": """
for path in (bait["project"], bait["project"] + "/pyproject.toml", bait["project"] + "/agentrl/types.py"):
    attempt(path, os.listdir if path == bait["project"] else read, path)
""",
    "read_home": """
for path in (bait["home"], "/root", "/home", os.path.expanduser("~root")):
    attempt(path, os.listdir, path)
""",
    "read_bait": 'attempt("the bait", read, bait["file"])',
    "read_environment": """
text = repr(dict(os.environ))
for path in ("/proc/self/environ", "/proc/1/environ", f"/proc/{os.getppid()}/environ", f"/proc/{bait['pid']}/environ"):
    try:
        text += repr(open(path, "rb").read())
    except OSError:
        pass
if bait["secret"] in text:
    escaped("the secret")
""",  # noqa: E501
    "read_processes_of_the_host": """
for pid in (bait["pid"], bait["canary"]):
    for name in ("cmdline", "maps", "mem", "root", "cwd", "fd"):
        attempt(name, (os.listdir if name in ("root", "cwd", "fd") else read), f"/proc/{pid}/{name}")
""",
    "read_by_dots_and_links": """
for path in ("../" * 40 + bait["file"].lstrip("/"), "/proc/self/root" + bait["file"], "/proc/1/root" + bait["file"],
             "/proc/self/cwd/" + "../" * 40 + bait["file"].lstrip("/"), "/dev/fd/../../../.." + bait["file"]):
    attempt(path, read, path)
""",  # noqa: E501
    "read_inherited_descriptors": """
for number in range(3, 4096):
    try:
        os.fstat(number)
    except OSError:
        continue
    escaped(f"descriptor {number}")
""",
    "open_by_handle": """
attempt_call("open_by_handle_at", 304, -100, ctypes.create_string_buffer(128), 0)
attempt_call("name_to_handle_at", 303, -100, b"/", ctypes.create_string_buffer(128), ctypes.create_string_buffer(8), 0)
""",  # noqa: E501
    "read_kernel_and_devices": """
for path in ("/dev/mem", "/dev/kmsg", "/dev/vda", "/dev/sda", "/dev/kvm", "/proc/kcore", "/proc/kallsyms", "/sys/kernel/security"):
    attempt(path, open, path, "rb")
""",  # noqa: E501
    # ---------------------------------------------------------------------------------------- writing outside
    "write_everywhere": """
for folder in ("/", "/etc", "/usr/lib", "/bin", "/root", "/home", "/run", "/var", "/sandbox", os.path.dirname(os.__file__), bait["home"],
               bait["project"], bait["project"] + "/agentrl", *sys.path[1:]):
    attempt(folder, write, folder + "/" + bait["nonce"])
""",  # noqa: E501
    "write_shared_folders": """
for folder in (bait["folder"], "/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue"):
    try:
        write(folder + "/" + bait["nonce"])
    except OSError:
        pass
""",
    "write_over_bait": """
attempt("the bait", write, bait["file"])
attempt("its removal", os.unlink, bait["file"])
for call in (lambda: os.chmod(bait["file"], 0o777), lambda: os.utime(bait["file"]), lambda: os.setxattr(bait["file"], "user.x", b"x"),
             lambda: os.chmod(bait["folder"], 0o700), lambda: os.chmod(bait["home"], 0)):
    try:
        call()
    except OSError:
        pass
""",  # noqa: E501
    "write_own_code": """
attempt("main.py", write, __file__)
attempt("runner.py", write, __file__.replace("main", "runner"))
attempt("the interpreter", open, sys.executable, "r+b")
expect_failure("remount", libc.mount(None, b"/", None, 4096 | 32, None))
""",
    "symlink_out": """
os.symlink(bait["file"], "link")
os.symlink(bait["folder"], "folder")
attempt("reading through a link", read, "link")
attempt("writing through a link", write, "link")
attempt("writing through a folder", write, "folder/" + bait["nonce"])
""",
    "hardlink_out": """
attempt("a hard link to the bait", os.link, bait["file"], "hard")
attempt("a hard link to a library", os.link, os.__file__, "hard2")
attempt("a rename over the bait", os.rename, __file__, bait["file"])
""",
    "write_kernel_settings": """
for path in ("/proc/sys/kernel/hostname", "/proc/sys/vm/drop_caches", "/proc/sysrq-trigger", "/proc/self/oom_score_adj",
             "/sys/fs/cgroup/cgroup.procs", "/sys/kernel/uevent_helper", f"/proc/{os.getppid()}/oom_score_adj"):
    attempt(path, open, path, "w")
""",  # noqa: E501
    "make_devices": """
import stat
attempt("a block device", os.mknod, "disk", 0o600 | stat.S_IFBLK, os.makedev(254, 0))
attempt("a character device", os.mknod, "mem", 0o600 | stat.S_IFCHR, os.makedev(1, 1))
""",
    # -------------------------------------------------------------------------------------------- the network
    "tcp_to_the_host": """
for host in ("127.0.0.1", "localhost", "0.0.0.0"):
    attempt(host, lambda: socket.create_connection((host, bait["tcp"]), timeout=1))
""",
    "udp_to_the_host": """
def send():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.sendto(b"hostile", ("127.0.0.1", bait["udp"]))
attempt("udp", send)
""",
    "unix_socket_of_the_host": """
def connect(address):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(address)
attempt("a socket file", connect, bait["unix"])
attempt("an abstract socket", connect, "\\0" + bait["abstract"])
""",
    "other_sockets": """
for family, kind, protocol in ((socket.AF_PACKET, socket.SOCK_RAW, 3), (socket.AF_NETLINK, socket.SOCK_RAW, 0),
                               (socket.AF_INET, socket.SOCK_RAW, 1), (socket.AF_INET6, socket.SOCK_STREAM, 0), (40, socket.SOCK_STREAM, 0)):
    attempt(f"family {family}", lambda: socket.socket(family, kind, protocol).close())
attempt("a name", socket.gethostbyname, "example.org")
""",  # noqa: E501
    "descriptors_by_message": """
left, right = socket.socketpair()
attempt("connect", left.connect, "\\0" + bait["abstract"])
attempt("bind", lambda: socket.socketpair()[0].bind("\\0" + bait["nonce"]))
""",
    # ---------------------------------------------------------------------------------------- other processes
    "kill_the_host": """
for pid in (bait["pid"], bait["canary"]):
    if pid > 8:  # smaller numbers are the program's own
        for number in (0, signal.SIGTERM, signal.SIGKILL):
            attempt(f"signal {number} to {pid}", os.kill, pid, number)
            attempt(f"signal {number} to the group of {pid}", os.killpg, pid, number)
""",
    "kill_everybody": """
os.kill(-1, signal.SIGKILL)
""",
    "kill_the_parent": """
for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGKILL):
    try:
        os.kill(os.getppid(), number)
        os.kill(0, 0)
    except OSError:
        pass
print("still here")
""",
    "kill_by_descriptor": """
attempt("pidfd", os.pidfd_open, bait["canary"])
attempt("pidfd of the parent", os.pidfd_open, os.getppid())
""",
    "ptrace": """
PTRACE_ATTACH, PTRACE_SEIZE = 16, 0x4206
for pid in (1, os.getppid(), bait["pid"], bait["canary"]):
    for request in (PTRACE_ATTACH, PTRACE_SEIZE):
        if libc.ptrace(request, pid, None, None) >= 0:
            escaped(f"traced {pid}")
""",
    "read_memory_of_others": """
class Piece(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
buffer = ctypes.create_string_buffer(8)
piece = Piece(ctypes.addressof(buffer), 8)
for pid in (1, os.getppid(), bait["canary"]):
    if libc.process_vm_readv(pid, ctypes.byref(piece), 1, ctypes.byref(piece), 1, 0) >= 0:
        escaped(f"read {pid}")
""",
    "zombies": """
for _ in range(200):
    try:
        if os.fork() == 0:
            os._exit(0)
    except OSError:
        break
print("left them")
""",
    "daemon": """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        os.close(0), os.close(1), os.close(2)
        time.sleep(3600)
    os._exit(0)
print("left a daemon")
""",
    "generations_of_daemons": """
def generation():
    while True:
        if os.fork():
            os._exit(0)
        os.setsid()
        time.sleep(0.001)
for _ in range(4):
    if os.fork() == 0:
        generation()
time.sleep(0.2)
print("left them")
""",
    # --------------------------------------------------------------------------------------------- privileges
    "become_root": """
for call in (lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.setresuid(0, 0, 0), lambda: os.setgroups([0]), lambda: os.seteuid(0)):
    attempt("root", call)
if os.getuid() == 0 or os.geteuid() == 0:
    escaped("is root")
""",  # noqa: E501
    "setuid_programs": """
for path in ("/bin/su", "/usr/bin/su", "/usr/bin/sudo", "/usr/bin/passwd", "/usr/bin/mount", "/bin/sh", "/usr/bin/python3"):
    child = os.fork()
    if child == 0:
        try:
            os.execv(path, [path, "-c", "id"])
        except OSError:
            os._exit(77)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
        print("ran", path)
""",  # noqa: E501
    "mounts": """
expect_failure("mount", libc.mount(b"none", b"/tmp", b"tmpfs", 0, None))
expect_failure("bind", libc.mount(b"/", b"/tmp", None, 4096, None))
expect_failure("umount", libc.umount2(b"/", 2))
attempt_call("fsopen", 430, b"tmpfs", 0)
attempt_call("open_tree", 428, -100, b"/", 1)
attempt_call("move_mount", 429, -100, b"/", -100, b"/tmp", 0)
""",
    "namespaces": """
for flag in (0x10000000, 0x00020000, 0x20000000, 0x40000000, 0x10000000 | 0x00020000):
    if libc.unshare(flag) == 0:
        escaped(f"namespace {flag:#x}")
attempt_call("clone with a user namespace", 56, 0x10000000 | 17, 0, 0, 0, 0)
arguments = (ctypes.c_uint64 * 11)(0x10000000, 0, 0, 0, 17)
attempt_call("clone3", 435, arguments, 88)
attempt("setns", lambda: os.close(os.open("/proc/1/ns/mnt", os.O_RDONLY)))
""",
    "change_root": """
attempt("chroot", os.chroot, ".")
attempt_call("pivot_root", 155, b".", b".")
""",
    "raise_limits": """
import resource
for kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC, resource.RLIMIT_NOFILE):
    hard = resource.getrlimit(kind)[1]
    if hard == resource.RLIM_INFINITY:
        escaped(f"no limit {kind}")
    attempt(f"limit {kind}", resource.setrlimit, kind, (hard * 2, hard * 2))
    attempt(f"no limit {kind}", resource.setrlimit, kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    attempt(f"limit {kind} of the parent", resource.prlimit, bait["canary"], kind, (1, 1))
attempt("priority", os.setpriority, os.PRIO_PROCESS, 0, -10)
""",  # noqa: E501
    "kernel_interfaces": """
attempt_call("keyctl", 250, 0, -3, 1)
attempt_call("add_key", 248, b"user", b"x", b"y", 1, -3)
attempt_call("bpf", 321, 0, ctypes.create_string_buffer(128), 128)
attempt_call("perf_event_open", 298, ctypes.create_string_buffer(128), 0, -1, -1, 0)
attempt_call("io_uring_setup", 425, 4, ctypes.create_string_buffer(256))
attempt_call("userfaultfd", 323, 1)
attempt_call("kexec", 246, 0, 0, None, 0)
attempt_call("init_module", 175, None, 0, b"")
attempt_call("reboot", 169, 0xFEE1DEAD, 672274793, 0, None)
attempt_call("sethostname", 170, b"x", 1)
attempt_call("settimeofday", 164, ctypes.create_string_buffer(16), None)
attempt_call("swapon", 167, b"/work/x", 0)
attempt_call("quotactl", 179, 0, None, 0, None)
attempt_call("a call of the future", 5000)
""",
    "32_bit_calls": """
child = os.fork()
if child == 0:
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    # mov eax, 20 (getpid of i386); int 0x80; ret
    code.write(bytes([0xB8, 20, 0, 0, 0, 0xCD, 0x80, 0xC3]))
    call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
    if call() > 0:
        escaped("a 32-bit call")
    os._exit(0)
os.waitpid(child, 0)
""",
    "terminal": """
import fcntl
TIOCSTI = 0x5412
for number in (0, 1, 2):
    attempt("typing", fcntl.ioctl, number, TIOCSTI, b"x")
attempt("a terminal", open, "/dev/tty", "r+b", 0)
""",
    "preload": """
write("evil.so")
child = os.fork()
if child == 0:
    environment = {"LD_PRELOAD": "./evil.so", "PYTHONPATH": ".", "PYTHONSTARTUP": "x"}
    os.execve(sys.executable, [sys.executable, "-c", "import os; print(os.getuid()); open('/etc/x', 'w')"], environment)
os.waitpid(child, 0)
""",  # noqa: E501
    # --------------------------------------------------------------------------------------------- the report
    "closes_its_output": """
for number in (0, 1, 2):
    os.close(number)
time.sleep(0.1)
os._exit(7)
""",
    "forges_the_report": """
import marshal
reply = {"error": "", "stdout": b"forged", "stderr": b"", "status": 0, "why": "", "is_truncated": False, "cpu_s": 0.0, "wall_s": 0.0}
for number in (0, 1, 2, 3, 4, 5, 6):
    try:
        os.write(number, marshal.dumps(reply))
        os.write(number, b"0 0.0")
    except OSError:
        pass
os._exit(9)
""",  # noqa: E501
    "crashes": "ctypes.string_at(0)",
    "ends_by_a_signal": "os.kill(os.getpid(), signal.SIGKILL)",
    "exits_with_nonsense": "raise SystemExit(-(10**30))",
    "bytes_that_are_no_text": r"os.write(1, bytes(range(256)) * 10); os.write(2, b'\xed\xa0\x80')",
}


def programs():
    return {name: PREAMBLE + source for name, source in PROGRAMS.items()}
