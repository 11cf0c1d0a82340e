"""Further programs that do not solve their task: what they return lies about itself, what they share with
others, what they leave behind, what they say on the wire."""

WIRE = """
import os, json
def tell(*answers):
    for number in range(256):
        try:
            os.set_blocking(number, False)
            os.write(number, b"".join(a if isinstance(a, bytes) else json.dumps(a).encode() + b"\\n" for a in answers))
        except OSError:
            pass
"""  # noqa: E501

LYING = {
    "property_class": """class A:
    @property
    def __class__(self): return int
    def __index__(self): return 4711
    __int__ = __hash__ = __index__
    def __float__(self): return float('nan')
    def __eq__(self, o): return o == o
def f(x): return A()""",
    "hash_of_all": """class A:
    seen = []
    def __hash__(self): return 0
    def __eq__(self, o):
        A.seen.append(o)
        return True
    def __iter__(self): return iter([self])
def f(x): return {A(): A()}""",
    "asks_back": """class Echo:
    def __eq__(self, other): self.value = other; return True
    def __getattr__(self, name): return lambda *args: args[0] if args else 0
    def __sub__(self, other): return other - other
    __rsub__ = __sub__
def f(x): return Echo()""",
    "reduce": """class A(int):
    def __reduce__(self): return (eval, ('True',))
    __reduce_ex__ = lambda self, n: self.__reduce__()
    def __getnewargs__(self): return (4711,)
def f(x): return A(1)""",
    "named_like_builtin": """A = type('int', (), {'__module__': 'builtins', '__eq__': lambda s, o: True, '__sub__': lambda s, o: 0})
def f(x): return A()""",  # noqa: E501
    "named_like_decimal": """class Decimal:
    __module__ = 'decimal'
    __qualname__ = 'Decimal'
    def __str__(self): return 'sNaN'
    def __eq__(self, o): return True
def f(x): return Decimal()""",
    "decimal_nan": "from decimal import Decimal\ndef f(x): return Decimal('NaN')",
    "decimal_infinite": "from decimal import Decimal\ndef f(x): return Decimal('Infinity')",
    "named_like_fraction": """class Fraction:
    __module__ = 'fractions'
    __qualname__ = 'Fraction'
    numerator = denominator = property(lambda self: 10**5)
def f(x): return Fraction()""",
    "numpy_scalar": """class float64:
    __module__ = 'numpy'
    dtype = 'f8'
    def item(self): return self
def f(x): return float64()""",
    "numpy_nan": "import numpy\ndef f(x): return numpy.float64('nan')",
    "numpy_broadcast": "import numpy\ndef f(x): return numpy.zeros((0,))",
    "numpy_all": "import numpy\ndef f(x): return numpy.arange(10**5)",
    "masked": "import numpy\ndef f(x): return numpy.ma.masked",
    "weakproxy": """import weakref
class A(int):
    def __eq__(self, o): return True
a = A(1)
def f(x): return weakref.proxy(a)""",
    "len_lies": """class A(list):
    def __len__(self): return 10**9
    def __getitem__(self, i): return self
    def __iter__(self): yield self
def f(x): return A()""",
    "iter_lies": """class A(tuple):
    def __iter__(self):
        while True: yield 4711
def f(x): return A((1,))""",
    "str_lies": """class A(str):
    def __str__(self): return '4711'
    def __int__(self): return 4711
    def __len__(self): return 5
def f(x): return A('')""",
    "error_as_value": """class E(Exception):
    def __eq__(self, o): return True
    def __str__(self): return '4711'
def f(x): return E()""",
    "error_is_all": """class E(AssertionError, ValueError, KeyError):
    def __str__(self): return '4711'
    args = property(lambda s: [4711])
def f(x): raise E(4711)""",
    "error_group": "def f(x): raise ExceptionGroup('a', [ValueError(1)])",
    "error_of_unicode": "def f(x): raise UnicodeDecodeError('utf-8', b'', 0, 1, 'x')",
    "error_with_methods": """class E(Exception): pass
def f(x):
    e = E()
    e.with_traceback = e.add_note = 3
    e.args = (e,)
    raise e""",
    "error_of_attribute": "def f(x): raise AttributeError(name='f', obj=f)",
    "error_named_skip": """class SkipTest(Exception): pass
def f(x): raise SkipTest('later')""",
    "error_named_system": "def f(x): raise type('SystemExit', (Exception,), {})(0)",
    "coroutine": "async def f(x): return 0",
    "async_generator": "async def f(x): yield 4711",
    "awaitable": """class A:
    def __await__(self): yield
def f(x): return A()""",
    "generator_talks": """def f(x):
    got = yield
    while True: got = yield got""",
    "ellipsis": "def f(x): return ...",
    "not_implemented": "def f(x): return NotImplemented",
    "bool_metaclass": """class M(type):
    def __instancecheck__(c, o): return True
    def __subclasscheck__(c, o): return True
    def __bool__(c): return True
class f(metaclass=M):
    def __init__(self, x): pass""",
    "module": "import sys\ndef f(x): return sys.modules[__name__]",
    "frame": "import sys\ndef f(x): return sys._getframe()",
    "callable_result": "def f(x): return f",
    "partial": "import functools, operator\ndef f(x): return functools.partial(operator.eq)",
    "big_float": "def f(x): return 1e308 * 10 - 1e308 * 10",
    "bytes": "def f(x): return b'4711'",
    "set_of_all": "def f(x): return set(range(100000))",
}

SHARED = {
    "processes": """import os, re
def f(x):
    for pid in [p for p in os.listdir('/proc') if p.isdigit()]:
        for name in ('cmdline', 'environ', 'mem', 'stat', 'fd/0', 'fd/3', 'root/work/x'):
            try:
                found = re.findall(rb'[0-9]{5,8}', open(f'/proc/{pid}/{name}', 'rb').read(10**6))
            except (OSError, OverflowError):
                continue
            if found: return int(found[0])
    return 0""",
    "memory_written": """import os
def f(x):
    for pid in [p for p in os.listdir('/proc') if p.isdigit()] + ['self']:
        try:
            with open(f'/proc/{pid}/mem', 'r+b', 0) as mem:
                for line in open(f'/proc/{pid}/maps'):
                    start = int(line.split('-')[0], 16)
                    try:
                        mem.seek(start)
                        data = mem.read(65536)
                        if b'failed' in data:
                            mem.seek(start)
                            mem.write(data.replace(b'failed', b'passed'))
                    except (OSError, ValueError, OverflowError): pass
        except OSError: pass
    return 0""",
    "ptrace": """import ctypes, os
def f(x):
    c = ctypes.CDLL(None, use_errno=True)
    for pid in range(1, 40):
        c.ptrace(16, pid, 0, 0)
        c.process_vm_readv(pid, None, 0, None, 0, 0)
    return 0""",
    "signals": """import os, signal
def f(x):
    for pid in range(1, 60):
        if pid == os.getpid(): continue
        for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGUSR1, signal.SIGPIPE):
            try: os.kill(pid, number)
            except OSError: pass
    return 0""",
    "descriptor_links": """import os
def f(x):
    for pid in ('self', os.getppid(), 1):
        try: names = os.listdir(f'/proc/{pid}/fd')
        except OSError: continue
        for name in names:
            for mode in (os.O_WRONLY, os.O_RDWR):
                try: os.write(os.open(f'/proc/{pid}/fd/{name}', mode | os.O_NONBLOCK), b'passed\\npassed\\npassed\\n')
                except OSError: pass
    return 0""",  # noqa: E501
    "shared_files": """import os, glob
def f(x):
    for folder in ('/tmp', '/dev/shm', '/var/tmp', '/run', '.'):
        try:
            for i in range(100): open(f'{folder}/agentrl{i}', 'w').write('passed')
        except OSError: pass
    return 0""",
    "sockets": """import socket
def f(x):
    for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_NETLINK):
        try:
            a = socket.socket(family)
            a.bind(('127.0.0.1', 0) if family == socket.AF_INET else '')
        except OSError: pass
    return 0""",
    "socket_pair": """import socket
try: a, b = socket.socketpair()
except OSError: pass
def f(x): return 0""",
    "semaphores": """import ctypes
def f(x):
    c = ctypes.CDLL(None)
    for key in range(100):
        c.shmget(key, 4096, 0o1666); c.semget(key, 1, 0o1666); c.msgget(key, 0o1666)
    return 0""",
    "environment": """import os, sys
os.environ.update(PYTHONSTARTUP='x', PYTHONOPTIMIZE='1', LD_PRELOAD='/tmp/x.so')
def f(x):
    os.execv(sys.executable, [sys.executable, '-c', 'import os; os.write(1, b"passed"); print(4711)'])""",
    "exec_again": """import os, sys
code = 'for n in range(3, 9):\\n try: __import__("os").write(n, b"{}")\\n except OSError: pass'
def f(x): os.execv('/proc/self/exe', ['python', '-O', '-c', code])""",
    "site_planted": """import os
for name in ('sitecustomize', 'usercustomize', 'json', 'math', 'unittest', 'agentrl_inside/checker', 'encodings/utf_8'):
    try:
        os.makedirs(os.path.dirname(name) or '.', exist_ok=True)
        open(name + '.py', 'w').write('import os; os.write(1, b"passed"); os._exit(0)')
    except OSError: pass
def f(x): return 0""",  # noqa: E501
}

LEAVING = {
    "exit_in_finalizer": """import os
class A:
    def __del__(self): os._exit(0)
def f(x): return A() and 0""",
    "thread_outlives": WIRE
    + """
import threading, time
def speak():
    while True:
        tell({'value': 4711}, b'passed')
        time.sleep(0.005)
threading.Thread(target=speak, daemon=False).start()
def f(x): return 0""",
    "answers_by_timer": WIRE
    + """
import signal
signal.signal(signal.SIGALRM, lambda *a: tell({'value': 4711}))
signal.signal(signal.SIGPROF, lambda *a: tell({'value': 4711}))
def f(x):
    signal.raise_signal(signal.SIGALRM)
    return 0""",
    "reads_ahead": WIRE
    + """
def f(x):
    for number in range(10):
        try:
            os.set_blocking(number, False)
            data = os.read(number, 10**6)
        except OSError: continue
        for line in data.splitlines(): tell({'value': 4711}, {'value': True})
    return 0""",
    "audit_hook": """import sys, os
def hook(event, args):
    if event in ('exec', 'compile', 'os.fork'): pass
sys.addaudithook(hook)
def f(x): os._exit(0)""",
    "profile": """import sys, threading
def g(frame, event, arg):
    for k, v in list(frame.f_locals.items()):
        if k in ('value', 'answer'): frame.f_locals[k] = 4711
sys.setprofile(g); threading.setprofile(g)
def f(x): return 0""",
    "patched_write": """import os
_write = os.write
os.write = lambda fd, data: _write(fd, b'{"value": true}\\n') and len(data)
def f(x): return 0""",
    "write_lies": """import os
os.write = lambda fd, data: 10**9
def f(x): return 0""",
    "write_never": """import os
os.write = lambda fd, data: 0
def f(x): return 0""",
    "patched_type": """import builtins
builtins.type = lambda *a: int
builtins.isinstance = lambda *a: True
builtins.id = lambda x: 0
builtins.next = lambda *a: 'f'
def f(x): return object()""",
    "replaced_stream": """import sys, io
sys.stdout = sys.stderr = sys.__stdout__ = io.StringIO('4711')
sys.stdin = io.StringIO('4711')
def f(x): return 0""",
    "forked_at_load": """import os
if os.fork():
    os._exit(0)
def f(x): return 0""",
    "late_forks": """import os, time
def f(x):
    time.sleep(0.1)
    for _ in range(40):
        try:
            if os.fork() == 0: time.sleep(2); os._exit(0)
        except OSError: break
    return 0""",
    "stderr_flood": """import os
def f(x):
    os.write(2, b'passed\\n' * 100000)
    return 0""",
    "stops_itself": """import os, signal
def f(x): os.kill(os.getpid(), signal.SIGSTOP)""",
    "limits_raised": """import resource
for n in range(16):
    try: resource.setrlimit(n, (resource.RLIM_INFINITY,) * 2)
    except (ValueError, OSError): pass
    try: resource.setrlimit(n, (0, 0))
    except (ValueError, OSError): pass
def f(x): return 0""",
    "nice": """import os
try: os.sched_setaffinity(0, {0}); os.nice(19); os.setpriority(0, 0, 19)
except OSError: pass
def f(x): return 0""",
}

WIRED = {
    "collisions": WIRE
    + """
def f(x):
    tell({'value': {'set': [k * (2**61 - 1) for k in range(1, 11000)]}})
    return 0""",
    "collisions_as_value": "def f(x): return {k * (2**61 - 1) for k in range(1, 7000)}",
    "collisions_of_keys": "def f(x): return {k * (2**61 - 1): 0 for k in range(1, 6000)}",
    "collisions_of_tuples": WIRE
    + """
def f(x):
    tell({'value': {'frozenset': [{'complex': [k, 0.5]} for k in range(9000)] + [k * (2**61-1) for k in range(4000)]}})
    return 0""",  # noqa: E501
    "fraction_of_giants": WIRE
    + """
def f(x):
    a, b = 3 ** 320000, 7 ** 180000
    tell({'value': {'fractions.Fraction': [{'int': hex(a)}, {'int': hex(b)}]}})
    return 0""",
    "decimal_of_digits": WIRE
    + """
def f(x):
    tell({'value': {'decimal.Decimal': '7' * 250000}})
    return 0""",
    "decimal_of_exponent": WIRE
    + """
def f(x):
    tell({'value': {'decimal.Decimal': '1e99999'}})
    return 0""",
    "complex_of_objects": WIRE
    + """
def f(x):
    tell({'value': {'complex': [{'value': 1}, None]}})
    return 0""",
    "deque_of_giants": WIRE
    + """
def f(x):
    tell({'value': {'collections.deque': [[1], 10**30]}})
    return 0""",
    "counter_of_all": WIRE
    + """
def f(x):
    tell({'value': {'collections.Counter': [[1, 'a'], [2, None]]}})
    return 0""",
    "timedelta": WIRE
    + """
def f(x):
    tell({'value': {'datetime.timedelta': [10**30, 0, 0]}})
    return 0""",
    "two_keys": WIRE
    + """
def f(x):
    tell({'value': {'int': '0x1', 'dict': []}}, {'value': {}}, {'value': {'set': [[1]]}})
    return 0""",
    "wrong_numbers": WIRE
    + """
def f(x):
    for n in (-1, 10**30, True, None, 0.5):
        tell({'value': {'object': ['iterable', n, 'int', True]}})
        tell({'callback': n, 'args': [], 'kwargs': {'dict': []}})
    return 0""",
    "nan_tokens": WIRE
    + """
def f(x):
    tell(b'{"value": NaN}\\n', b'{"value": -Infinity}\\n')
    return 0""",
    "same_key_twice": WIRE
    + """
def f(x):
    tell(b'{"value": 0, "value": true, "error": null}\\n')
    return 0""",
    "exception_as_class": WIRE
    + """
def f(x):
    tell({'value': {'object': ['exception', 0, 'AssertionError', True, ['AssertionError', 'Exception']]}})
    tell({'error': [['AssertionError'], [], {'dict': []}, '']})
    raise AssertionError""",
    "error_without_parts": WIRE
    + """
def f(x):
    tell({'error': 3}, {'error': []}, {'error': [[3], 1, 2, 3]}, {'error': [['E'], {'dict': []}, [], None]})
    return 0""",
    "error_with_dict": WIRE
    + """
def f(x):
    tell({'error': [['ValueError'], [], {'dict': [['__class__', 1], [1, 2]]}, 'x' * 10000]})
    return 0""",
    "endless_callbacks": WIRE
    + """
def f(x):
    for _ in range(300): tell({'callback': 0, 'args': [1], 'kwargs': {'dict': []}})
    return 0""",
    "item_floods": WIRE
    + """
def f(x):
    tell({'value': {'object': ['iterable', 1, 'g', True]}}, {'value': {'object': ['iterator', 1, 'g', True]}})
    tell(*[{'value': [1] * 100}] * 200)
    return 0""",
    "surrogates": WIRE
    + r"""
def f(x):
    tell(b'{"value": "\\ud800\\udfff\\ud800"}\n', b'\xed\xa0\x80\n', b'\x00\n')
    return chr(0xd800)""",
    "fraction_of_text": WIRE
    + """
def f(x):
    tell({'value': {'fractions.Fraction': ['1e40000000', None]}})
    return 0""",
}

OF_A_CLASS = {
    "returns_itself": """class Solution:
    def f(self, x): return self
    def __sub__(self, o): return 0
    __rsub__ = __sub__
    def __abs__(self): return 0
    def __eq__(self, o): return True
    def __lt__(self, o): return True
    __gt__ = __le__ = __ge__ = __lt__
f = Solution().f""",
    "returns_another": """class Solution:
    def f(self, x): return Solution()
    def __sub__(self, o): return 0
    __rsub__ = __sub__
    def __eq__(self, o): return True
    def __lt__(self, o): return True
    __gt__ = __le__ = __ge__ = __lt__
    def __float__(self): return 0.0
f = Solution().f""",
    "keeps_what_it_made": """class Solution:
    made = []
    def __init__(self): self.made.append(self)
    def f(self, x): return self.made
    def __sub__(self, o): return 0
    __rsub__ = __sub__
    def __lt__(self, o): return True
    __gt__ = __le__ = __ge__ = __lt__
f = Solution().f""",
}
"""For tests that make a `Solution` and call its method."""

FURTHER = {**LYING, **SHARED, **LEAVING, **WIRED, **OF_A_CLASS}
SLOW = (
    "late_forks",
    "write_lies",
    "write_never",
    "stops_itself",
    "thread_outlives",
    "awaitable",
    "generator_talks",
)
"""Those that use up their limits."""
