"""Right programs as people write them for contests: with the usual names and no imports, in every way of
reading and printing.
"""

from __future__ import annotations

import pytest
import trio

from agentrl.extras.sandbox.code_reward import Code
from parts.trajectories import attempted, make_task

PROGRAMS: dict[str, tuple[str, dict]] = {
    "lcb_typing": (
        """class Solution:
    def f(self, nums: List[int], k: Optional[int] = None) -> Dict[str, int]:
        return {str(n): n for n in nums}""",
        {"fn_name": "f", "inputs": ["[1,2]"], "outputs": ['{"1":1,"2":2}']},
    ),
    "lcb_usual": (
        """class Solution:
    def f(self, nums: List[int]) -> int:
        d = defaultdict(int)
        q = deque(nums)
        h = []
        heappush(h, 3)
        c = Counter(nums)
        i = bisect_left(nums, 2)
        @cache
        def g(n): return n if n < 2 else g(n-1) + g(n-2)
        return sum(accumulate(nums)) + gcd(4, 6) + g(10) + math.floor(inf > 1) + len(ascii_lowercase) + reduce(lambda a, b: a + b, nums)""",  # noqa: E501
        {"fn_name": "f", "inputs": ["[1,2,3]"], "outputs": ["100"]},
    ),
    "lcb_state": (
        """class Solution:
    def __init__(self): self.out = []
    def f(self, n):
        self.out.append(n)
        return self.out""",
        {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[1], [2]]},
    ),
    "lcb_recursion": (
        """class Solution:
    def f(self, n):
        def g(k): return 0 if k == 0 else 1 + g(k-1)
        return g(n)""",
        {"fn_name": "f", "inputs": [[20000]], "outputs": [20000]},
    ),
    "lcb_cached_recursion": (
        """class Solution:
    def f(self, n):
        @cache
        def g(k): return 0 if k == 0 else 1 + g(k-1)
        return g(n)""",
        {"fn_name": "f", "inputs": [[5000]], "outputs": [5000]},
    ),
    "std_usual": (
        """n = int(input())
d = defaultdict(list)
d[n].append(math.sqrt(n))
print(d[n][0])""",
        {"inputs": ["4"], "outputs": ["2.0"]},
    ),
    "std_recursion": (
        """def g(k): return 0 if k == 0 else 1 + g(k-1)
print(g(int(input())))""",
        {"inputs": ["20000"], "outputs": ["20000"]},
    ),
    "std_thread": (
        """import sys, threading
def main():
    sys.setrecursionlimit(10**6)
    def g(k): return 0 if k == 0 else 1 + g(k-1)
    print(g(int(input())))
threading.stack_size(2**27)
t = threading.Thread(target=main)
t.start()
t.join()""",
        {"inputs": ["50000"], "outputs": ["50000"]},
    ),
    "std_rlimit": (
        """import resource, sys
resource.setrlimit(resource.RLIMIT_STACK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(input())""",
        {"inputs": ["5"], "outputs": ["5"]},
    ),
    "std_buffer": (
        """import sys
data = sys.stdin.buffer.read().split()
sys.stdout.write(str(int(data[0]) + int(data[1])))""",
        {"inputs": ["1 2\n"], "outputs": ["3"]},
    ),
    "std_open0": (
        "print(sum(map(int, open(0))))",
        {"inputs": ["1\n2\n3"], "outputs": ["6"]},
    ),
    "std_open0_read": (
        "n, *a = map(int, open(0).read().split())\nprint(n, *a, sep='\\n')",
        {"inputs": ["3\n1 2 3"], "outputs": ["3\n1\n2\n3\n"]},
    ),
    "std_osread": (
        """import os, io
input = io.BytesIO(os.read(0, os.fstat(0).st_size)).readline
print(int(input()) * 2)""",
        {"inputs": ["21\n"], "outputs": ["42"]},
    ),
    "std_readline_alias": (
        """import sys
input = sys.stdin.readline
n = int(input())
for _ in range(n): print(input().strip()[::-1])""",
        {"inputs": ["2\nab\ncd"], "outputs": ["ba\ndc"]},
    ),
    "std_eof": (
        """while True:
    try: print(int(input()) + 1)
    except EOFError: break""",
        {"inputs": ["1\n2\n"], "outputs": ["2\n3"]},
    ),
    "std_exit": (
        """n = int(input())
if n == 1:
    print('YES')
    exit()
print('NO')""",
        {"inputs": ["1", "2"], "outputs": ["YES", "NO"]},
    ),
    "std_exit0": (
        """import sys
print('YES')
sys.exit(0)""",
        {"inputs": ["1"], "outputs": ["YES"]},
    ),
    "std_os_exit": (
        """import os, sys
print('YES')
sys.stdout.flush()
os._exit(0)""",
        {"inputs": ["1"], "outputs": ["YES"]},
    ),
    "std_trailing": (
        "print(*[1, 2, 3], end=' \\n\\n')\nprint()",
        {"inputs": [""], "outputs": ["1 2 3"]},
    ),
    "std_expected_trailing": (
        "print('1 2 3')",
        {"inputs": [""], "outputs": ["1 2 3   \n\n \n"]},
    ),
    "std_leading_blank": (
        "print('\\n5')",
        {"inputs": [""], "outputs": ["5"]},
    ),
    "std_expected_leading": (
        "print('5')",
        {"inputs": [""], "outputs": ["\n5"]},
    ),
    "std_crlf": (
        """print('a b')
print('c')""",
        {"inputs": [""], "outputs": ["a b\r\nc\r\n"]},
    ),
    "std_crlf_in": (
        """n = int(input())
print(n, input())""",
        {"inputs": ["3\r\nx\r\n"], "outputs": ["3 x"]},
    ),
    "std_float_digits": (
        "print('%.2f' % (1/3))",
        {"inputs": [""], "outputs": ["0.33"]},
    ),
    "std_float_tol": (
        "print(1/3)",
        {"inputs": [""], "outputs": ["0.333"], "tolerance": 0.001},
    ),
    "std_float_less": (
        "print('%.9f' % (2/3))",
        {"inputs": [""], "outputs": ["0.6666666666666666"]},
    ),
    "std_exp": (
        "print(1e-7, 1.5e10)",
        {"inputs": [""], "outputs": ["0.0000001 15000000000"]},
    ),
    "std_unicode": (
        "print('é' + input())",
        {"inputs": ["ü"], "outputs": ["éü"]},
    ),
    "std_big": (
        "print(hex(2**int(input())))",
        {"inputs": ["20000"], "outputs": [hex(2**20000)]},
    ),
    "std_numpy": (
        """import numpy as np
print(int(np.array(input().split(), dtype=int).sum()))""",
        {"inputs": ["1 2 3"], "outputs": ["6"]},
    ),
    "std_decimal": (
        """from decimal import *
getcontext().prec = 30
print(Decimal(1) / 3)""",
        {"inputs": [""], "outputs": ["0.333333333333333333333333333333"]},
    ),
    "std_class": (
        """from typing import List
class Solution:
    def add(self, a: List[int]) -> int: return sum(a)
print(Solution().add(list(map(int, input().split()))))""",
        {"inputs": ["1 2"], "outputs": ["3"]},
    ),
    "std_dataclass": (
        """from __future__ import annotations
from dataclasses import dataclass
@dataclass
class P:
    x: int
print(P(int(input())))""",
        {"inputs": ["1"], "outputs": ["P(x=1)"]},
    ),
    "std_pickle_main": (
        """import pickle
class A: pass
a = A(); a.x = 4
print(pickle.loads(pickle.dumps(a)).x)""",
        {"inputs": [""], "outputs": ["4"]},
    ),
    "std_pool": (
        """from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(2) as p: print(*p.map(lambda x: x * 2, [1, 2]))""",
        {"inputs": [""], "outputs": ["2 4"]},
    ),
    "std_stderr": (
        """import sys
print('debug', file=sys.stderr)
print(1)""",
        {"inputs": [""], "outputs": ["1"]},
    ),
    "std_doc_future": (
        '"""doc"""\nfrom __future__ import annotations\nx: Undefined = 3\nprint(x)',
        {"inputs": [""], "outputs": ["3"]},
    ),
    "fn_none": (
        """def f(a):
    a.sort()""",
        {"fn_name": "f", "inputs": [[[2, 1]]], "outputs": [None]},
    ),
    "fn_static": (
        """class Solution:
    @staticmethod
    def f(x): return x
    @classmethod
    def g(cls, x): return x""",
        {"fn_name": "f", "inputs": [[1]], "outputs": [1]},
    ),
    "fn_helper": (
        """def helper(x): return x + 1
class Solution:
    def f(self, x: int) -> int: return self.g(helper(x))
    def g(self, x): return x * 2""",
        {"fn_name": "f", "inputs": [[1]], "outputs": [4]},
    ),
    "fn_prints_test": (
        """def f(x): return x
assert f(1) == 1
print(f(2))
if __name__ == '__main__':
    print(input())""",
        {"fn_name": "f", "inputs": [[1]], "outputs": [1]},
    ),
    "fn_strings": (
        "def f(s): return s[::-1]",
        {"fn_name": "f", "inputs": ['"ab\\n\\u00e9"'], "outputs": ['"\\u00e9\\nba"']},
    ),
    "fn_numpy": (
        """import numpy as np
def f(a): return int(np.sum(a)), float(np.mean(a))""",
        {"fn_name": "f", "inputs": [[[1, 2]]], "outputs": [[3, 1.5]]},
    ),
    "fn_numpy_scalars": (
        """import numpy as np
def f(a): return [np.int64(3), np.float64(1.5), np.bool_(True)]""",
        {"fn_name": "f", "inputs": [[[1, 2]]], "outputs": [[3, 1.5, True]]},
    ),
    "fn_defaultdict": (
        """from collections import defaultdict
def f(a):
    d = defaultdict(list)
    for x in a: d[x % 2].append(x)
    return d""",
        {"fn_name": "f", "inputs": [[[1, 2, 3]]], "outputs": [{"0": [2], "1": [1, 3]}]},
    ),
    "fn_rounded": (
        "def f(x): return round(x / 3, 2)",
        {"fn_name": "f", "inputs": [[1]], "outputs": [0.33]},
    ),
    "lcb_modules": (
        """def f(a):
    i = bisect.bisect_left(a, 2)
    b = copy.deepcopy(a)
    random.seed(1)
    return [i, b, len(string.ascii_letters), datetime.date(2020, 1, 2).year, re.sub('a', 'b', 'a')]""",
        {"fn_name": "f", "inputs": [[[1, 2]]], "outputs": [[1, [1, 2], 52, 2020, "b"]]},
    ),
}
SAMPLE = (
    "lcb_usual",
    "lcb_modules",
    "lcb_state",
    "lcb_recursion",
    "std_usual",
    "std_buffer",
    "std_open0",
    "std_dataclass",
    "std_pickle_main",
)
FORGETFUL = """def f(x):
    return defaultdict(int) and not_imported(x)"""


def score(code: str, truth: dict) -> float:
    attempt = attempted(make_task("Write it.", truth), f"```python\n{code}\n```")
    return trio.run(Code({"wall_s": 60.0, "total_s": 200.0}).score, attempt).value


@pytest.mark.parametrize("name", SAMPLE)
def test_a_right_program_earns_one(name: str) -> None:
    assert score(*PROGRAMS[name]) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_right_program_earns_one(name: str) -> None:
    assert score(*PROGRAMS[name]) == 1.0


def test_a_name_that_no_grader_imports_stays_unknown() -> None:
    assert score(FORGETFUL, {"fn_name": "f", "inputs": [[1]], "outputs": [1]}) == 0.0
