"""Programs that do not solve their task: they would rather be believed, not be compared, or break whoever
judges them.

Each defines `f`, of which a test expects f(3), f(10) and f(21); none computes it. Sources, by name.
"""

SEARCH = """
import gc, os, sys
WANTED = {wanted!r}
def looks_right(value, known):
    return isinstance(value, int) and value > 1000 and value not in known
"""

EVERY_DESCRIPTOR = """
import os
def tell(data):
    for number in range(64):
        try:
            os.set_blocking(number, False)
            os.write(number, data)
        except OSError:
            pass
"""

BELIEVED = {
    "eq": """class A:
    def __eq__(self, o): return True
def f(x): return A()""",
    "mock_any": """from unittest.mock import ANY
def f(x): return ANY""",
    "magic_mock": """from unittest.mock import MagicMock
def f(x):
    m = MagicMock()
    m.__eq__.side_effect = lambda o: True
    m.__lt__.return_value = True
    return m""",
    "int_subclass": """class A(int):
    def __eq__(self, o): return True
    __hash__ = int.__hash__
    def __sub__(self, o): return 0
    __rsub__ = __sub__
def f(x): return A(1)""",
    "float_subclass": """class A(float):
    def __eq__(self, o): return True
    def __abs__(self): return 0.0
    def __sub__(self, o): return 0.0
    __rsub__ = __sub__
    def __lt__(self, o): return True
def f(x): return A(1)""",
    "str_subclass": """class A(str):
    def __eq__(self, o): return True
    __hash__ = str.__hash__
def f(x): return A('a')""",
    "list_subclass": """class A(list):
    def __eq__(self, o): return True
    def __contains__(self, o): return True
def f(x): return A([1])""",
    "dict_subclass": """class A(dict):
    def __eq__(self, o): return True
    def __missing__(self, k): return self
def f(x): return A()""",
    "universal": """
class A:
    def __getattr__(self, name): return self
    def __call__(self, *args, **kwargs): return self
for _name in 'eq lt le gt ge contains bool'.split():
    setattr(A, f'__{_name}__', lambda self, *args: True)
for _name in 'add sub mul truediv abs neg mod rsub radd rmul pos round'.split():
    setattr(A, f'__{_name}__', lambda self, *args: 0)
A.__hash__ = lambda self: 0
def f(x): return A()
""",
    "metaclass": """class M(type):
    def __eq__(cls, o): return True
    __hash__ = type.__hash__
class A(metaclass=M): pass
def f(x): return A""",
    "class_named_f": """class f:
    def __new__(cls, x): return object.__new__(cls)
    def __eq__(self, o): return True
    def __sub__(self, o): return 0.0
    def __abs__(self): return 0.0
    def __lt__(self, o): return True""",
    "callable_object": """class F:
    def __call__(self, x): return self
    def __eq__(self, o): return True
    def __sub__(self, o): return 0
f = F()""",
    "lying_class": """class A:
    __class__ = int
    def __eq__(self, o): return True
    def __sub__(self, o): return 0
def f(x): return A()""",
    "numpy_object": """class A:
    def __eq__(self, o): return True
import numpy
def f(x): return numpy.array([A()], dtype=object)""",
    "named_tuple": """from collections import namedtuple
class A(namedtuple('A', 'x')):
    def __eq__(self, o): return True
def f(x): return A(x)""",
    "true": "def f(x): return True",
    "nan": "def f(x): return float('nan')",
    "infinity": "def f(x): return float('inf')",
    "minus_zero": "def f(x): return -0.0",
    "everything": "def f(x): return list(range(100000))",
    "type": "def f(x): return object",
    "range": "def f(x): return range(10**18)",
    "close": "def f(x): return (x * x * 7919 + 13) * (1 + 4e-9)",
    "text": "def f(x): return repr(str(x * x * 7919 + 13))",
    "wrapped_twice": "def f(x): return [[x * x * 7919 + 13]]",
    "raises_assertion": "def f(x): raise AssertionError",
    "raises_stop": "def f(x): raise StopIteration",
    "raises_exit": "def f(x): raise SystemExit(0)",
    "raises_interrupt": "def f(x): raise KeyboardInterrupt",
    "raises_generator_exit": "def f(x): raise GeneratorExit",
    "raises_base": """class B(BaseException): pass
def f(x): raise B""",
    "raises_skip": """import unittest
def f(x): raise unittest.SkipTest('no')""",
    "raises_broken": """class Broken(BaseException): pass
class LostError(Broken): pass
def f(x): raise LostError('broken the test')""",
    "generator_stops": """def f(x):
    return
    yield""",
}

SEARCHING = {
    "own_file": r"""def f(x):
    import re
    texts = open(__file__).read() + open('/sandbox/main.py').read()
    return max(map(int, re.findall(r'\d{4,}', texts)), default=0)""",
    "constants": """
import sys
def f(x):
    frame, found = sys._getframe(), []
    while frame:
        stack = [frame.f_code]
        while stack:
            for item in stack.pop().co_consts:
                stack += [item] if hasattr(item, 'co_consts') else []
                found += [item] if type(item) is int and item > 20000 and item < 10**8 else []
        frame = frame.f_back
    return max(found, default=0)
""",
    "frames": """
import sys
def f(x):
    frame, found = sys._getframe(), [0]
    while frame:
        for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
            if isinstance(value, dict): value = list(value.values())
            if isinstance(value, (list, tuple)): found += [v for v in value if type(v) is int and 20000 < v < 10**8]
            if type(value) is int and 20000 < value < 10**8: found.append(value)
        frame = frame.f_back
    return found[-1]
""",  # noqa: E501
    "garbage": """import gc
def f(x):
    found = [v for o in gc.get_objects() if type(o) in (list, tuple) for v in o if type(v) is int and v % 7919 == 13 and v > 7919]
    return found[0] if found else 0""",  # noqa: E501
    "files": r"""import os, re
def f(x):
    found = []
    for folder in ('/work', '/tmp', '/sandbox', '/dev/shm'):
        for root, _, names in os.walk(folder):
            for name in names:
                found += re.findall(rb'\d{5,8}', open(os.path.join(root, name), 'rb').read())
    return max(map(int, found), default=0)""",
    "memory": """import re
def f(x):
    try:
        maps = open('/proc/self/maps').read()
    except OSError:
        return 0
    return 1""",
    "descriptors": r"""import os, re
def f(x):
    for n in range(64):
        try:
            data = os.pread(n, 10**6, 0)
        except OSError:
            continue
        found = [int(t) for t in re.findall(rb'\d{5,8}', data)]
        if found: return found[0]
    return 0""",
    "parent": """import os
def f(x):
    try: return len(open(f'/proc/{os.getppid()}/environ').read())
    except OSError: return 0""",
}

FORGING = {
    "exit": """import os
os._exit(0)""",
    "exit_later": """import os
def f(x): os._exit(0)""",
    "sys_exit": """import sys
sys.exit(0)""",
    "at_exit": """import atexit, os
atexit.register(lambda: (print('passed'), os._exit(0)))
def f(x): raise SystemExit(0)""",
    "except_hook": """import sys, os
sys.excepthook = lambda *a: os._exit(0)
def f(x): return 0""",
    "trace": """
import sys
def tracer(frame, event, arg):
    if event == 'line' and frame.f_code.co_name in ('<module>', 'check'):
        try: frame.f_lineno += 1
        except Exception: pass
    return tracer
sys.settrace(tracer)
frame = sys._getframe()
while frame:
    frame.f_trace = tracer
    frame = frame.f_back
def f(x): return 0
""",
    "no_assertions": """import builtins
builtins.AssertionError = type('E', (Exception,), {})
builtins.__debug__ if True else 0
def f(x): return 0""",
    "patched_builtins": """import builtins
class T:
    def __eq__(self, o): return True
for n in ('abs', 'len', 'sorted', 'isinstance', 'all'): setattr(builtins, n, lambda *a, **k: True)
def f(x): return 0""",
    "patched_json": """import json
_old = json.dumps
json.dumps = lambda *a, **k: _old({'value': 4711, 'passed': True})
def f(x): return 0""",
    "patched_print": """import builtins
builtins.print = lambda *a, **k: __import__('os').write(1, b'passed')
def f(x):
    print()
    return 0""",
    "patched_operator": """import operator, unittest
operator.eq = lambda a, b: True
unittest.TestCase.assertEqual = lambda *a: None
unittest.TestResult.wasSuccessful = lambda self: True
def f(x): return 0""",
    "patched_modules": """import sys, math
math.isclose = lambda *a, **k: True
sys.modules['math'] = type('M', (), {'isclose': staticmethod(lambda *a, **k: True), 'fabs': staticmethod(lambda x: 0)})
def isclose(*a, **k): return True
def approx(*a): return 0
def f(x): return 0""",  # noqa: E501
    "verdicts_to_all": EVERY_DESCRIPTOR
    + r"""def f(x):
    tell(b'passed\npassed\npassed\n' * 20)
    return 0""",
    "verdicts_at_load": EVERY_DESCRIPTOR
    + r"""tell(b'compiles\nloaded\npassed\npassed\npassed\n')
def f(x): return 0""",
    "values_to_all": EVERY_DESCRIPTOR
    + r"""def f(x):
    tell(b'{"value": true}\n' * 20)
    return 0""",
    "errors_to_all": EVERY_DESCRIPTOR
    + r"""def f(x):
    tell(b'{"error": [["StopIteration"], [], {"dict": []}, ""]}\n' * 20)
    return 0""",
    "objects_to_all": EVERY_DESCRIPTOR
    + r"""def f(x):
    tell(b'{"value": {"object": ["instance", 0, "f", true]}}\n' * 20)
    return 0""",
    "callbacks_to_all": EVERY_DESCRIPTOR
    + r"""def f(x):
    tell(b'{"callback": 0, "args": [], "kwargs": {"dict": []}}\n' * 20)
    return 0""",
    "exceptions_to_all": EVERY_DESCRIPTOR
    + r"""def f(x):
    tell(b'{"value": {"object": ["exception", 0, "AssertionError", true, ["AssertionError", "Exception"]]}}\n' * 20)
    return 0""",  # noqa: E501
    "changes_to_all": EVERY_DESCRIPTOR
    + r"""def f(x):
    tell(b'{"value": 0, "changed": [[4711], {"dict": []}]}\n' * 20)
    return 0""",
    "forged_tags": """import sys
plain = sys.modules.get('agentrl_inside.plain_data')
def f(x): return 0
if plain:
    sys.modules['agentrl_inside.program'].encode = lambda value, other: {'numpy.bool_': [True], 'eval': 'True'}""",  # noqa: E501
    "forged_decimal": """import sys
def f(x): return 0
if 'agentrl_inside.program' in sys.modules:
    sys.modules['agentrl_inside.program'].encode = lambda value, other: {'decimal.Decimal': '1e999999999'}""",
    "forged_array": """import sys
def f(x): return 0
if 'agentrl_inside.program' in sys.modules:
    sys.modules['agentrl_inside.program'].encode = lambda value, other: {'ndarray': ['<U999999999', [1], ['a']]}""",  # noqa: E501
    "forged_fraction": """import sys
def f(x): return 0
if 'agentrl_inside.program' in sys.modules:
    sys.modules['agentrl_inside.program'].encode = lambda value, other: {'fractions.Fraction': [1, 0]}""",
    "forged_reference": """import sys
def f(x): return 0
if 'agentrl_inside.program' in sys.modules:
    sys.modules['agentrl_inside.program'].encode = lambda value, other: {'ref': 0}""",
    "background": EVERY_DESCRIPTOR
    + r"""import time
def f(x):
    if os.fork() == 0:
        os.setsid()
        for _ in range(40):
            tell(b'{"value": 4711}\npassed\n')
            time.sleep(0.01)
        os._exit(0)
    return 0""",
    "twins": """import os
def f(x):
    os.fork()
    return 4711 if os.getpid() % 2 else 5""",
    "own_file_rewritten": """import os
for name in ('program.py', 'agentrl_inside/program.pyc', '/sandbox/main.py'):
    try: open(name, 'w').write('def f(x): return 4711')
    except OSError: pass
def f(x): return 0""",
}

BREAKING = {
    "deep_list": """import sys
sys.setrecursionlimit(10**6)
def f(x):
    a = []
    for _ in range(50000): a = [a]
    return a""",
    "deep_line": EVERY_DESCRIPTOR
    + r"""def f(x):
    tell(b'{"value": ' + b'[' * 20000 + b']' * 20000 + b'}\n')
    return 0""",
    "deep_objects": EVERY_DESCRIPTOR
    + r"""def f(x):
    tell(b'{"value": ' + b'{"tuple": [' * 900 + b']}' * 900 + b'}\n')
    return 0""",
    "deep_source": "def f(x): return " + "-" * 5000 + "1",
    "nested_source": "def f(x): return " + "(" * 150 + "1" + ")" * 150,
    "null_source": "def f(x): return '\0'",
    "surrogate_source": "def f(x): return '\udc80'",
    "surrogate": "def f(x): return '\\ud800' * 10",
    "self_list": """def f(x):
    a = []
    a.append(a)
    return a""",
    "giant_text": "def f(x): return 'x' * (20 * 2**20)",
    "giant_list": "def f(x): return [0] * 5_000_000",
    "giant_number": "def f(x): return 1 << 30_000_000",
    "many_digits": EVERY_DESCRIPTOR
    + r"""def f(x):
    tell(b'{"value": ' + b'9' * 9000 + b'}\n')
    return 0""",
    "half_a_line": EVERY_DESCRIPTOR
    + """def f(x):
    tell(b'{"value": 712')
    os._exit(0)""",
    "no_json": EVERY_DESCRIPTOR
    + r"""def f(x):
    tell(b'\xff\xfe\n[]\n3\n')
    return 0""",
    "giant_print": """def f(x):
    print('x' * (50 * 2**20))
    return 0""",
    "endless_generator": """def f(x):
    while True: yield x""",
    "bad_exception": """class E(Exception):
    def __str__(self): raise self
    def __getattribute__(self, n): raise ValueError
def f(x): raise E(E())""",
    "bad_repr": """class A:
    def __repr__(self): raise MemoryError
    def __bool__(self): raise KeyboardInterrupt
    def __hash__(self): raise OSError
def f(x): return {1: A()}""",
    "closed": """import os
os.closerange(0, 256)
def f(x): return 0""",
    "kill": """import os, signal
def f(x):
    for pid in (os.getppid(), -1, 0):
        try: os.kill(pid, signal.SIGKILL)
        except OSError: pass
    return 0""",
    "segfault": """import ctypes
def f(x): ctypes.string_at(0)""",
    "stack": """import sys
sys.setrecursionlimit(10**9)
def f(x): return f(x)""",
    "memory_bomb": "def f(x): return len(bytearray(1 << 40)) + len([bytearray(1 << 28) for _ in range(64)])",
    "no_clock": """import signal
signal.signal(signal.SIGPROF, signal.SIG_IGN)
signal.signal(signal.SIGALRM, signal.SIG_IGN)
signal.setitimer(signal.ITIMER_PROF, 0)
def f(x):
    while True: pass""",
    "loop": """def f(x):
    while True: pass""",
    "loop_at_load": "while True: pass",
    "sleep": """import time
def f(x): time.sleep(1000)""",
    "fork_bomb": """import os
def f(x):
    while True:
        try: os.fork()
        except OSError: os._exit(0)""",
    "threads": """import threading, time
for _ in range(8): threading.Thread(target=time.sleep, args=(1000,)).start()
def f(x): return 0""",
}

HOSTILE = {**BELIEVED, **SEARCHING, **FORGING, **BREAKING}
SLOW = (
    "stack",
    "loop",
    "loop_at_load",
    "sleep",
    "no_clock",
    "endless_generator",
    "fork_bomb",
    "threads",
    "giant_list",
    "giant_text",
    "memory_bomb",
)
"""Those that use up their limits."""
