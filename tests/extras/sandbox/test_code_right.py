"""Right programs against tests of every kind that people write: each earns 1, though its objects never meet
the test.
"""

from __future__ import annotations

import pytest
import trio

from agentrl.errors import DataError, RewardError
from agentrl.extras.sandbox.code_reward import Code
from agentrl.plugins import Attempted
from parts.trajectories import attempted, make_task


def attempt(code: str, truth: dict) -> Attempted:
    return attempted(make_task("Write it.", truth), f"```python\n{code}\n```")


def asserts(*texts: str) -> dict:
    return {"assert_case": list(texts)}


RIGHT: dict[str, tuple[str, dict]] = {
    "float": (
        "def f(x): return x/3",
        {
            "test": """def check(c):
    assert abs(c(1)-0.3333333)<1e-6
    assert c(3)==1.0""",
            "entry_point": "f",
        },
    ),
    "math": (
        "def f(x): return x**.5",
        asserts(
            "assert math.isclose(f(2), 1.41421356237, rel_tol=1e-9)",
        ),
    ),
    "raises_try": (
        """def f(x):
    if x<0: raise ValueError('neg')
    return x""",
        asserts(
            """try:
    f(-1)
    assert False
except ValueError as e:
    assert str(e)=='neg'""",
            "assert f(2)==2",
        ),
    ),
    "pytest_raises": (
        """def f(x):
    if x<0: raise ValueError('neg')
    return x""",
        asserts(
            """import pytest
with pytest.raises(ValueError, match='neg'):
    f(-1)""",
        ),
    ),
    "custom_exc": (
        """class Bad(Exception):
    def __init__(self, n):
        super().__init__(f'bad {n}')
        self.n=n
def f(x): raise Bad(x)""",
        asserts(
            """try:
    f(3)
    assert False
except Bad as e:
    assert e.n==3 and str(e)=='bad 3'""",
        ),
    ),
    "class": (
        """class Stack:
    def __init__(self): self.items=[]
    def push(self,x): self.items.append(x)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)""",
        asserts(
            """s=Stack()
s.push(1); s.push(2)
assert len(s)==2
assert s.pop()==2
assert s.items==[1]
assert not len(s)==0""",
        ),
    ),
    "vector": (
        """class V:
    def __init__(s,x,y): s.x,s.y=x,y
    def __add__(s,o): return V(s.x+o.x,s.y+o.y)
    def __eq__(s,o): return (s.x,s.y)==(o.x,o.y)
    def __repr__(s): return f'V({s.x}, {s.y})'
    def __mul__(s,k): return V(s.x*k,s.y*k)
    def __abs__(s): return (s.x**2+s.y**2)**.5
    def __getitem__(s,i): return (s.x,s.y)[i]
    def __iter__(s): return iter((s.x,s.y))
    def __lt__(s,o): return abs(s)<abs(o)""",
        asserts(
            "assert V(1,2)+V(3,4)==V(4,6)",
            "assert repr(V(1,2))=='V(1, 2)'",
            "assert V(1,2)*3==V(3,6)",
            "assert abs(V(3,4))==5",
            "assert V(1,2)[1]==2 and list(V(1,2))==[1,2]",
            "assert V(1,2)<V(2,2) and sorted([V(2,2),V(1,1)])[0]==V(1,1)",
            "assert V(1,2)!=V(2,1)",
        ),
    ),
    "inplace": (
        "def f(a): a.sort()",
        asserts(
            """x=[3,1,2]
f(x)
assert x==[1,2,3]""",
        ),
    ),
    "inplace_check": (
        """def rot(m):
    m[:]=[list(r) for r in zip(*m[::-1])]""",
        {
            "test": """def check(c):
    m=[[1,2],[3,4]]
    c(m)
    assert m==[[3,1],[4,2]]""",
            "entry_point": "rot",
        },
    ),
    "inplace_nested": (
        "def f(d): d['a'].append(1); d['b']={2}",
        asserts(
            """inner=[]
d={'a':inner}
f(d)
assert d=={'a':[1],'b':{2}} and inner==[1]""",
        ),
    ),
    "inplace_k": (
        """def f(n):
    k=len(set(n)); n[:]=sorted(set(n)); return k""",
        asserts(
            """n=[1,1,2]
k=f(n)
assert k==2 and n[:k]==[1,2]""",
        ),
    ),
    "unchanged": (
        "def f(a): return sorted(a)",
        asserts(
            """x=[3,1]
y=f(x)
assert x==[3,1] and y==[1,3]""",
        ),
    ),
    "generator": (
        """def f(n):
    for i in range(n): yield i*i""",
        asserts(
            "assert list(f(4))==[0,1,4,9]",
            """g=f(3)
assert next(g)==0 and next(g)==1""",
            "assert sum(f(2000))==sum(i*i for i in range(2000))",
        ),
    ),
    "map": (
        "def f(x): return map(lambda i:i+1,x)",
        asserts(
            "assert list(f([1,2]))==[2,3]",
            "assert tuple(f([1]))==(2,)",
        ),
    ),
    "keys": (
        "def f(d): return d.keys()",
        asserts(
            "assert list(f({'a':1}))==['a']",
            "assert len(f({'a':1}))==1",
        ),
    ),
    "closure": (
        "def f(n): return lambda x: x+n",
        asserts(
            "assert f(1)(2)==3",
        ),
    ),
    "callback": (
        "def f(g,xs): return [g(x) for x in xs]",
        asserts(
            "assert f(lambda x:x*2,[1,2])==[2,4]",
            "assert f(len,['a','bb'])==[1,2]",
            "assert f(str.upper, ['a'])==['A']",
        ),
    ),
    "decorator": (
        """def twice(g):
    def h(*a): return g(g(*a))
    return h""",
        asserts(
            """@twice
def inc(x): return x+1
assert inc(1)==3""",
        ),
    ),
    "types": (
        "def f(t,x): return [i for i in t if not isinstance(i,x)]",
        asserts(
            "assert f((4,5,7.7),int)==[7.7]",
        ),
    ),
    "set_tuple": (
        "def f(x): return (set(x),frozenset(x),{1:(2,)},1j,b'a',None,True)",
        asserts(
            "assert f([1])==({1},frozenset({1}),{1:(2,)},1j,b'a',None,True)",
            "r=f([1]); assert isinstance(r, tuple) and r[0]=={1}",
        ),
    ),
    "big": (
        "def f(n): return 2**n",
        asserts(
            "assert f(50000)==2**50000",
            "assert f(3)==8",
        ),
    ),
    "counter": (
        """from collections import *
def f(s): return Counter(s)""",
        asserts(
            "assert f('aab')=={'a':2,'b':1}",
            "assert f('aab').most_common(1)==[('a',2)]",
        ),
    ),
    "odict": (
        """from collections import *
def f(s): return OrderedDict(s), defaultdict(int,{1:2}), deque([1]), namedtuple('P','x y')(1,2)""",
        asserts(
            """a,b,c,d=f([(1,2)])
assert a=={1:2} and b=={1:2} and list(c)==[1] and d==(1,2)""",
        ),
    ),
    "decimal": (
        """from decimal import Decimal
from fractions import Fraction
import datetime
def f(): return Decimal('1.1'),Fraction(1,3),datetime.date(2020,1,2),datetime.datetime(2020,1,2,3),datetime.timedelta(days=2)""",  # noqa: E501
        asserts(
            """from decimal import Decimal
from fractions import Fraction
import datetime
assert f()==(Decimal('1.1'),Fraction(1,3),datetime.date(2020,1,2),datetime.datetime(2020,1,2,3),datetime.timedelta(2))""",  # noqa: E501
        ),
    ),
    "numpy": (
        """import numpy as np
def f(x): return np.mean(x)
def g(x): return np.array(x)*2""",
        asserts(
            "assert f([1,2])==1.5",
            """import numpy as np
assert np.allclose(g([1,2]),[2,4])""",
            """import numpy as np
assert (g(np.array([1,2]))==np.array([2,4])).all() and g([1]).shape==(1,)""",
        ),
    ),
    "match": (
        """import re
def f(s): return re.match('a',s)""",
        asserts(
            "assert f('abc')",
            "assert not f('b')",
            "assert f('b') is None",
        ),
    ),
    "sum_name": (
        "def sum(a,b): return a+b",
        asserts(
            "assert sum(1,2)==3",
            "assert sum(1,2) is not None",
        ),
    ),
    "builtin_entry": (
        "def max(a): return sorted(a)[-1]",
        {
            "test": """def check(c):
    assert c([1,2])==2""",
            "entry_point": "max",
        },
    ),
    "helper": (
        """def poly(xs,x): return xs[0]+xs[1]*x
def find_zero(xs): return -xs[0]/xs[1]""",
        {
            "test": """import math, random
def check(candidate):
    rng=random.Random(42)
    for _ in range(100):
        c=[rng.randint(1,9),rng.randint(1,9)]
        s=candidate(list(c))
        assert math.fabs(poly(c,s))<1e-4""",
            "entry_point": "find_zero",
        },
    ),
    "solution_class": (
        """class Solution:
    def two(self, nums: list, t: int):
        return [0,1]""",
        {
            "test": """def check(candidate):
    assert candidate(nums=[2,7],t=9)==[0,1]""",
            "entry_point": "Solution().two",
        },
    ),
    "listnode": (
        """def rev(h):
    p=None
    while h:
        h.next,p,h=p,h,h.next
    return p""",
        asserts(
            """class ListNode:
    def __init__(self,val=0,next=None):
        self.val=val; self.next=next
def to(h):
    r=[]
    while h: r.append(h.val); h=h.next
    return r
assert to(rev(ListNode(1,ListNode(2,ListNode(3)))))==[3,2,1]""",
        ),
    ),
    "tree_own": (
        """class Node:
    def __init__(s,v): s.v=v; s.left=s.right=None
def height(n): return 0 if n is None else 1+max(height(n.left),height(n.right))""",
        asserts(
            """root=Node(1)
root.left=Node(2)
root.left.left=Node(3)
assert (height(root))==3""",
        ),
    ),
    "dataclass": (
        """from __future__ import annotations
from dataclasses import dataclass
@dataclass
class P:
    x: int
    y: int = 0
    @property
    def s(self): return self.x+self.y
    @classmethod
    def of(cls,t): return cls(*t)
    @staticmethod
    def z(): return 7""",
        asserts(
            """p=P(1)
assert p.s==1 and p==P(1,0)
p.x=5
assert p.s==5""",
            "assert P.of((1,2)).y==2 and P.z()==7",
            "assert isinstance(P(1),P) and str(P(1))=='P(x=1, y=0)'",
        ),
    ),
    "enum": (
        """from enum import Enum
class Color(Enum):
    RED=1
    BLUE=2
def f(x): return Color(x)""",
        asserts(
            "assert f(1)==Color.RED and f(1) is Color.RED and f(2)!=Color.RED",
            "assert Color.RED.value==1 and len(Color)==2 and [c.name for c in Color]==['RED','BLUE']",
            "assert f(1).name=='RED'",
        ),
    ),
    "context": (
        """class C:
    def __enter__(self): self.on=True; return self
    def __exit__(self,*a): self.on=False""",
        asserts(
            """c=C()
with c as d:
    assert d.on
assert not c.on""",
        ),
    ),
    "inherit": (
        """class Animal:
    def speak(self): return self.sound()""",
        asserts(
            """class Dog(Animal):
    def sound(self): return 'woof'
assert Dog().speak()=='woof'""",
        ),
    ),
    "unittest": (
        "def add(a,b): return a+b",
        {
            "test": """import unittest
class TestAdd(unittest.TestCase):
    def setUp(self): self.x=1
    def test_a(self): self.assertEqual(add(self.x,2),3)
    def test_b(self):
        with self.assertRaises(TypeError): add(1,'a')
if __name__=='__main__':
    unittest.main()"""
        },
    ),
    "unittest2": (
        "def task_func(a,b): return a+b",
        {
            "test": """import unittest
class TestCases(unittest.TestCase):
    def test_a(self): self.assertAlmostEqual(task_func(.1,.2),.3)
"""
        },
    ),
    "pytest_fns": (
        "def add(a,b): return a+b",
        {
            "test": """from solution import add

def test_one():
    assert add(1,2)==3
def test_two():
    assert add('a','b')=='ab'
"""
        },
    ),
    "from_as": (
        "def add(a,b): return a+b",
        {
            "test": """from solution import add as plus
assert plus(1,2)==3
"""
        },
    ),
    "async": (
        """import asyncio
async def f(x):
    await asyncio.sleep(0)
    return x+1""",
        asserts(
            """import asyncio
assert asyncio.run(f(1))==2""",
        ),
    ),
    "surrogate": (
        "def f(): return '\\ud800'+chr(0)+'é'",
        asserts(
            "assert f()=='\\ud800\\x00é'",
        ),
    ),
    "nan": (
        "def f(): return float('nan'),float('inf'),-0.0",
        asserts(
            """import math
a,b,c=f()
assert math.isnan(a) and b==float('inf') and math.copysign(1,c)==-1""",
        ),
    ),
    "print_noise": (
        """def f(x):
    print('x'*1000)
    return x""",
        asserts(
            "assert f(0)==0",
            "assert f(1)==1",
            "assert f(2)==2",
            "assert f(3)==3",
            "assert f(4)==4",
        ),
    ),
    "global_const": (
        """MOD=7
def f(x): return x%MOD""",
        asserts(
            "assert f(9)==9%MOD",
        ),
    ),
    "kw": (
        "def f(a,*,b=2): return a+b",
        asserts(
            "assert f(1,b=3)==4",
            "assert f(a=1)==3",
        ),
    ),
    "main_guard": (
        """def f(x): return x
if __name__=='__main__':
    print(f(int(input())))""",
        asserts(
            "assert f(1)==1",
        ),
    ),
    "intsub": (
        """import enum
class L(enum.IntEnum):
    A=1
def f(): return L.A""",
        asserts(
            "assert f()==1",
        ),
    ),
    "lru": (
        """import functools
@functools.lru_cache
def f(n): return n if n<2 else f(n-1)+f(n-2)""",
        asserts(
            "assert f(50)==12586269025",
            """f.cache_clear()
assert f(10)==55""",
        ),
    ),
    "kwargs_fn": (
        "def f(**k): return k",
        asserts(
            "assert f(a=1,b=[2])=={'a':1,'b':[2]}",
        ),
    ),
    "iter_class": (
        """class It:
    def __init__(s,n): s.n=n; s.i=0
    def __iter__(s): return s
    def __next__(s):
        if s.i>=s.n: raise StopIteration
        s.i+=1; return s.i""",
        asserts(
            "assert list(It(3))==[1,2,3]",
            """it=It(2)
assert next(it)==1 and next(it)==2
try:
    next(it); assert False
except StopIteration: pass""",
        ),
    ),
    "sysexit": (
        """import sys
def f(): sys.exit(2)""",
        asserts(
            """try:
    f(); assert False
except SystemExit: pass""",
        ),
    ),
    "linked_class": (
        """class LL:
    def __init__(s): s.xs=[]
    def add(s,x): s.xs.append(x); return s
    def __contains__(s,x): return x in s.xs
    def __str__(s): return '->'.join(map(str,s.xs))
    def __bool__(s): return bool(s.xs)
    def __getattr__(s,n): raise AttributeError(n)""",
        asserts(
            """l=LL()
assert not l
l.add(1).add(2)
assert 1 in l and 3 not in l and str(l)=='1->2' and f'{l}'=='1->2'
assert not hasattr(l,'zz')""",
        ),
    ),
    "fn_tuple": (
        "def f(x): return (x,[x])",
        {"fn_name": "f", "inputs": [[1]], "outputs": [[1, [1]]]},
    ),
    "fn_lcb": (
        "def f(a,b): return {a[0]:b}",
        {
            "fn_name": "f",
            "inputs": [
                """[1,2]
3"""
            ],
            "outputs": ['{"1": 3}'],
        },
    ),
    "fn_float": (
        "def f(x): return x*0.1",
        {"fn_name": "f", "inputs": [[3]], "outputs": [0.3]},
    ),
    "fn_tol": (
        "def f(x): return 0.3334",
        {"fn_name": "f", "inputs": [[3]], "outputs": [0.3333], "tolerance": 0.001},
    ),
    "fn_float_int": (
        "def f(x): return x/1",
        {"fn_name": "f", "inputs": [[3]], "outputs": [3]},
    ),
    "std": (
        """import sys
for l in sys.stdin: print(int(l)*2)""",
        {
            "inputs": [
                """1
2
"""
            ],
            "outputs": [
                """2
4
"""
            ],
        },
    ),
    "big_out": (
        "print('x '*300000)",
        {"inputs": [""], "outputs": ["x " * 300000]},
    ),
    "fn_big_out": (
        "def f(n): return list(range(n))",
        {"fn_name": "f", "inputs": [[100000]], "outputs": [list(range(100000))]},
    ),
    "typing": (
        """class Solution:
    def f(self, x: 'List[int]') -> 'int': return x[0]""",
        {"fn_name": "f", "inputs": [[[1]]], "outputs": [1]},
    ),
    "shared_state": (
        """class Stack:
    def __init__(self): self.a = []
    def push(self, x): self.a.append(x)
    def pop(self): return self.a.pop()""",
        asserts(
            "s = Stack()",
            "s.push(1)",
            """s.push(2)
assert s.pop() == 2""",
            "assert s.pop() == 1",
        ),
    ),
    "setup": (
        "def f(p): return sum(p)",
        asserts(
            """import math
data = [1, 2, 3]""",
            "assert f(data) == 6",
            "assert math.isclose(f([0.1, 0.2]), 0.3)",
        ),
    ),
    "typing_names": (
        """def f(a: List[int]) -> Optional[int]:
    return a[0] if a else None""",
        asserts(
            "assert f([1]) == 1",
            "assert f([]) is None",
        ),
    ),
    "check_of_typing_names": (
        """def has_close(numbers: List[float], threshold: float) -> bool:
    return any(abs(a-b) < threshold for i, a in enumerate(numbers) for b in numbers[i+1:])""",
        {
            "test": """METADATA = {}
def check(candidate):
    assert candidate([1.0, 2.0, 3.9], 0.3) == False
    assert candidate([1.0, 1.1], 0.3) == True
""",
            "entry_point": "has_close",
        },
    ),
    "check_with_a_loop": (
        "def f(x): return x * 0.1",
        {
            "test": """def check(candidate):
    def is_floats(x): return isinstance(x, float)
    inputs = [[1], [2], [3]]
    results = [0.1, 0.2, 0.3]
    for i, (inp, exp) in enumerate(zip(inputs, results)):
        out = candidate(*inp)
        assert out == exp or abs(out - exp) < 1e-6, f'{i}'
""",
            "entry_point": "f",
        },
    ),
    "check_of_copies": (
        """def f(a):
    a.append(1)
    return a""",
        {
            "test": """import copy
import numpy as np
def assertion(out, exp, atol):
    exact = out == exp
    if atol == 0 and isinstance(exp, float): atol = 1e-6
    if not exact and atol != 0: assert np.allclose(out, exp, atol=atol)
    else: assert exact
def check(candidate):
    for inp, exp in [([[0]], [0, 1]), ([[]], [1])]:
        assertion(candidate(*copy.deepcopy(inp)), exp, 0)
""",
            "entry_point": "f",
        },
    ),
    "tests_of_helpers": (
        """def helper(x): return x + 1
def f(x): return helper(x) * 2""",
        {
            "test": """from solution import f, helper
def test_helper():
    assert helper(1) == 2
def test_f():
    assert f(1) == 2 * helper(1)
class TestAll:
    pass"""
        },
    ),
    "test_class": (
        "def f(x): return x + 1",
        {
            "test": """from solution import f
class TestF:
    def test_a(self):
        assert f(1) == 2
    def test_b(self):
        assert f(2) == 3
"""
        },
    ),
    "unittest_with_setup": (
        """class Bank:
    def __init__(self): self.b = 0
    def deposit(self, x):
        if x <= 0: raise ValueError('bad amount')
        self.b += x
        return self.b""",
        {
            "test": """import unittest
class TestBank(unittest.TestCase):
    @classmethod
    def setUpClass(cls): cls.rate = 2
    def setUp(self): self.bank = Bank()
    def test_deposit(self):
        self.assertEqual(self.bank.deposit(5), 5)
        self.assertEqual(self.bank.b, 5)
    def test_bad(self):
        with self.assertRaisesRegex(ValueError, 'bad'):
            self.bank.deposit(0)
    def test_sub(self):
        for x in (1, 2):
            with self.subTest(x=x): self.assertGreater(self.bank.deposit(x), 0)
"""
        },
    ),
    "captured_output": (
        """def hello(n):
    print('hello', n)""",
        {
            "test": """import unittest, io
from contextlib import redirect_stdout
class TestHello(unittest.TestCase):
    def test_it(self):
        out = io.StringIO()
        with redirect_stdout(out): hello('x')
        self.assertEqual(out.getvalue(), 'hello x\\n')
"""
        },
    ),
    "fluent": (
        """class Q:
    def __init__(self, n=0): self.n = n
    def add(self, x):
        self.n += x
        return self
    def __str__(self): return f'Q{self.n}'
    def __len__(self): return self.n
    def __int__(self): return self.n""",
        asserts(
            "assert str(Q().add(1).add(2)) == 'Q3'",
            "assert len(Q().add(4)) == 4",
            """q = Q()
q.add(1)
assert f'{q}' == 'Q1' and str(q) == 'Q1' and int(q.add(1)) == 2""",
        ),
    ),
    "ops": (
        """class M:
    def __init__(self, n): self.n = n
    def __sub__(self, o): return M(self.n - (o.n if isinstance(o, M) else o))
    def __gt__(self, o): return self.n > (o.n if isinstance(o, M) else o)
    def __eq__(self, o): return self.n == o.n
    def double(self): return M(2 * self.n)""",
        asserts(
            "assert M(5) - M(2) == M(3)",
            "assert (M(5) - 2) == M(3)",
            "assert M(5) > 3",
            "assert M(3).double() - M(1) == M(5)",
            "assert M(3).double() > M(5)",
        ),
    ),
    "nested_class": (
        """class Node:
    def __init__(self, v): self.v = v; self.kids = []
class Tree:
    def __init__(self): self.root = Node(1)
    def add(self, v):
        n = Node(v)
        self.root.kids.append(n)
        return n""",
        asserts(
            """t = Tree()
n = t.add(3)
assert t.root is not None""",
            """t = Tree()
assert t.root.v == 1 and t.add(3).v == 3 and t.root.kids[0].v == 3""",
        ),
    ),
    "iter_protocol": (
        """def f(n): return iter(range(n))
def g(n): return zip(range(n), range(n))
def h(d): return d.items()""",
        asserts(
            "assert list(f(3)) == [0, 1, 2]",
            "assert dict(g(2)) == {0: 0, 1: 1}",
            "assert sorted(h({'a': 1})) == [('a', 1)]",
            "assert [x for x in f(2)] == [0, 1] and max(f(5)) == 4",
        ),
    ),
    "much_noise": (
        """def f(x):
    print('x' * 10**6)
    return x""",
        asserts(
            "assert f(1) == 1 and f(2) == 2",
            "assert f(3) == 3",
            "assert f(4) != 5",
            "assert f(4) != 5",
            "assert f(4) != 5",
        ),
    ),
}
SAMPLE = (
    *(
        "raises_try",
        "custom_exc",
        "vector",
        "inplace_nested",
        "generator",
        "callback",
        "set_tuple",
        "sum_name",
        "helper",
        "listnode",
    ),
    *(
        "enum",
        "unittest",
        "pytest_fns",
        "fn_lcb",
        "shared_state",
        "captured_output",
        "fluent",
        "ops",
        "nested_class",
        "test_class",
    ),
)


def values(names) -> dict[str, float]:
    reward = Code({"wall_s": 60.0, "total_s": 200.0})
    found = {}

    async def score(name: str) -> None:
        found[name] = (await reward.score(attempt(*RIGHT[name]))).value

    async def score_all() -> None:
        async with trio.open_nursery() as nursery:
            for name in names:
                nursery.start_soon(score, name)

    trio.run(score_all)
    return found


def test_right_programs_earn_one() -> None:
    assert values(SAMPLE) == dict.fromkeys(SAMPLE, 1.0)


@pytest.mark.slow
def test_all_right_programs_earn_one() -> None:
    assert values(RIGHT) == dict.fromkeys(RIGHT, 1.0)


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        (
            asserts("""def check(f):
    assert f(1)"""),
            "a test runs nothing",
        ),
        (
            asserts("""import pytest
@pytest.mark.parametrize('x', [1])
def test_f(x):
    assert f(x)"""),
            "function test_f of a test needs pytest",
        ),
        (asserts("assert f(:"), "a test is not valid Python"),
        (
            {"inputs": ["1"], "outputs": ["1"], "tolerance": "x"},
            "`tolerance` must be a number from 0 up to 1",
        ),
        (
            {"fn_name": "f", "inputs": ["x"], "outputs": ["1"]},
            "a text among `inputs` must have JSON on each line",
        ),
    ],
)
def test_a_test_that_would_pay_everybody_or_nobody_is_refused(truth: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Code({}).check(attempt("", truth).task)


def test_a_test_that_cannot_be_run_is_an_error_and_no_wrong_answer() -> None:
    truth = asserts("""def make():
    class Local: pass
    return Local()
assert f(make()) == 1""")
    with pytest.raises(
        RewardError, match="passes an object of Local to the program, which takes plain data alone"
    ):
        trio.run(Code({}).score, attempt("def f(x): return 1", truth))
