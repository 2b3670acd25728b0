import ast
import gzip
import json
import os
import re
import socket
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

import pytest

from grpo_cli.records import Ended, Problem, Sample
from grpo_cli.rewards import sandbox
from grpo_cli.rewards.code import code, code_efficiency, program
from grpo_cli.rewards.rules import NOT_APPLICABLE

SHARED = Path(__file__).parents[2] / "../shared"
needs_bwrap = pytest.mark.skipif(not sandbox.works(), reason="bubblewrap is not installed, or does not work here")
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared cases and data sets are not beside this checkout")


def sample(text, **fields) -> Sample:
    return Sample(Problem("p", "prompt", "", MappingProxyType(fields)), "prompt", text, 9, Ended.eos)


def asserts(text, *tests, entry_point="f", **fields) -> Sample:
    return sample(fenced(text), mode="asserts", tests=tests, entry_point=entry_point, **fields)


def stdin(text, *tests, **fields) -> Sample:
    pairs = tuple(MappingProxyType({"input": given, "output": wanted}) for given, wanted in tests)
    return sample(fenced(text), mode="stdin", tests=pairs, **fields)


def fenced(text) -> str:
    return f"```python\n{textwrap.dedent(text).strip()}\n```"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```py\nx = 1\n```", "x = 1\n"),
        ("```Python3\nx = 1\n```\nDone.", "x = 1\n"),
        ("```\ndef f(x):\n    return x\n```", "def f(x):\n    return x\n"),  # B040
        ("```python\na\n```\n```python\nb\n```", "b\n"),
        ("```python\na\n```\n```text\nb\n```\n```bash\nc\n```", "a\n"),
        ("```text\n```python\na\n```\n```python\nb\n```", "b\n"),
        ("<think>```python\na\n```</think>```python\nb\n```", "b\n"),
        ("<think>```python\na\n```</think> no code", None),
        ("```python\na\n</think>\nb\n```", None),
        ("```python\na\n```\n```python\nb", "a\n"),  # cut off
        ("```python\na", None),
        ("  ```python\n  a\n  ```", "a\n"),
        ("~~~python\na = '''\n```\n'''\n~~~", "a = '''\n```\n'''\n"),
        ("````python\n```\n````", "```\n"),
        ("```python\r\nx = 1\r\n```\r\n", "x = 1\r\n"),
        ("```python title=a.py\nx\n```", "x\n"),
        ("```python\n\u2028x\n```", "\u2028x\n"),
        ("Use `x = 1`, or ```x = 1```.", None),
        ("", None),
    ],
)
def test_the_program_is_the_last_complete_python_block(text, found):
    assert program(text) == found


def test_programs_are_found_in_linear_time():
    begin = time.monotonic()
    for text in (
        "```python\n" * 30_000,
        "```" * 100_000,
        "`" * 300_000,
        "```python\nx\n```\n" * 30_000,
        "~~~\n```\n" * 30_000,
        " " * 300_000,
    ):
        program(text)
    assert time.monotonic() - begin < 5


F = "def f(x):\n    return 2 * x"


@needs_bwrap
@pytest.mark.parametrize(
    ("text", "tests", "share"),
    [
        (F, ["assert f(1) == 2", "assert f(2) == 4"], 1.0),
        (F, ["assert f(1) == 2", "assert f(2) == 5"], 0.5),
        (F, ["assert f(1) != 2", "assert not f(0) == 0", "assert f('a') == 'ab'", "assert f(1) is None"], 0.0),
        (F, ["assert f([1, 'é', (2.5, None)]) == [1, 'é', (2.5, None)] * 2"], 1.0),
        (F, ["assert f(10**5000) == 2 * 10**5000"], 1.0),
        (F, ["assert f(float('inf')) == float('inf') and f(float('nan')) != f(float('nan'))", "assert f(1j) == 2j"], 1.0),
        (F, ["assert f(b'ab') == b'abab'", r"assert f('\ud800\x00') == '\ud800\x00' * 2"], 1.0),
        (F, ["from fractions import Fraction\nassert f(Fraction(1, 4)) == Fraction(1, 2)"], 1.0),
        (F, ["for i in range(9):\n    assert f(i) == i + i", "assert all(f(i) == i for i in range(9))"], 0.5),
        (F, ["assert math.isclose(f(0.1), 0.2)", "assert f('ab') == string.ascii_lowercase[:2] * 2"], 1.0),
        (F, ["assert f() == 2", "assert f(1", "assert g(1) == 2"], ValueError),
        (F, ["assert f(iter([1])) == 1"], ValueError),
        (F, ["try:\n    f({})\n    assert False\nexcept TypeError:\n    pass"], 1.0),
        (F, ["assert f(g(1)) == 2", "assert f.name == 1"], 0.0),
        ("def f(d):\n    return d", ["assert f({(1, 2): {3}, None: [frozenset({4})]}) == {None: [frozenset({4})], (1, 2): {3}}"], 1.0),
        (
            "def f(x):\n    x.sort()",
            ["a = [3, 1, 2]\nf(a)\nassert a == [1, 2, 3]", "assert f([2, 1]) is None", "assert f([2, 1]) == [1, 2]"],
            2 / 3,
        ),
        ("def f(g, x):\n    return g(x)", ["assert f(lambda x: x + 1, 2) == 3", "assert f(len, [1, 2]) == 2"], 1.0),
        (
            "def f(n):\n    i = 0\n    while True:\n        yield i\n        i += n",
            ["assert [x for x, _ in zip(f(2), range(3))] == [0, 2, 4]"],
            1.0,
        ),
        ("def f(n):\n    return map(str, range(n))", ["assert list(f(2)) == ['0', '1']", "assert f(2) == ['0', '1']"], 0.5),
        (
            "class A:\n    def __init__(self, x):\n        self.x = x\ndef f(a):\n    return a.x",
            ["assert f(A(3)) == 3", "assert A(3).x == 3"],
            0.5,
        ),
        (
            "class f:\n    def __init__(self):\n        self.n = 0\n    def add(self):\n        self.n += 1",
            ["s = f()\ns.add()\nassert s.n == 1"],
            1.0,
        ),
        ("n = 0\ndef f():\n    global n\n    n += 1\n    return n", ["assert f() == 1 and f() == 2", "assert f() == 1"], 1.0),
        ("f = 3", ["assert f == 3", "assert f(1) == 2"], 0.0),
        ("def f(x):\n    return x\nif __name__ == '__main__':\n    f(input())", ["assert f(1) == 1"], 1.0),
        ("def f(x):\n    return x\nassert f(1) == 2", ["assert f(1) == 1"], 0.0),
        ("def f(x):\n    return (x", ["assert f(1) == 1"], 0.0),
        ("x = '\x00'", ["assert f(1) == 1"], 0.0),
        ("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\ndef f(x):\n    return P(x).x", ["assert f(1) == 1"], 1.0),
    ],
)
def test_a_program_is_paid_by_the_tests_it_passes(text, tests, share):
    judged = asserts(text, *tests)
    if share is ValueError:
        with pytest.raises(ValueError, match=r"the tests cannot be run: SyntaxError|a test passes a list_iterator"):
            code(judged)
    else:
        assert code(judged) == share
        assert code(judged, credit="all") == float(share == 1.0)


@needs_bwrap
@pytest.mark.parametrize(
    ("text", "output", "tolerance", "right"),
    [
        ("print(input())", "7\n", None, True),
        ("print('7  \\n\\n')", "7", None, True),
        ("print(7, end='')", "7\n", None, True),
        ("print(' 7')", "7", None, False),
        ("print('7\\n8')", "7", None, False),
        ("print(7.0)", "7", None, False),
        ("print(7.0)", "7", 1e-9, True),
        ("print(7.0001)", "7", 1e-6, False),
        ("print('x 7.0')", "x 7", 1e-6, True),
        ("print('nan')", "7", 1e-6, False),
        ("print(float('nan'))", "7", 1e300, False),
        ("print(7); raise SystemExit(1)", "7", None, False),
        ("print(7); 1 / 0", "7", None, False),
        ("print(7); exit()", "7", None, True),
        ("import sys; sys.stdout.write('7'); sys.exit()", "7", None, True),
        ("import threading; threading.Thread(target=print, args=(7,)).start()", "7", None, True),
        ("import atexit; atexit.register(print, 7)", "7", None, True),
        ("import os; os.write(2, b'7')", "7", None, False),
        ("print('é日本')", "é日本", None, True),
    ],
)
def test_a_script_is_judged_by_what_it_prints(text, output, tolerance, right):
    assert code(stdin(text, ("7\n", output), tolerance=tolerance)) == float(right)


PROMPT = '''from typing import List

def helper(x):
    return x + 1

def f(xs: List[int]) -> List[int]:
    """Add 1 to each."""
'''
CHECK = "def check(candidate):\n    assert candidate([1, 2]) == [2, 3]\n    assert [helper(x) for x in [1, 2]] == candidate([1, 2])\n"


@needs_bwrap
@pytest.mark.parametrize(
    ("text", "paid"),
    [
        ("    return [helper(x) for x in xs]", 1.0),
        ("return [helper(x) for x in xs]", 1.0),
        ("out = []\n    for x in xs:\n        out.append(x + 1)\n    return out", 1.0),
        ("out = []\nfor x in xs:\n    out.append(x + 1)\nreturn out", 1.0),
        ("    return [x + 1 for x in xs]\n\nThis adds 1 to each item.", 1.0),
        ("```python\n    return [helper(x) for x in xs]\n```", 1.0),
        ("```python\ndef f(xs: List[int]):\n    return [x + 1 for x in xs]\n```", 1.0),
        (f"```python\n{PROMPT}    return [x + 1 for x in xs]\n```", 1.0),
        ("f = lambda xs: [helper(x) for x in xs]", 1.0),
        ("    return xs", 0.0),
        ("    pass", 0.0),
        ("It is easy to add 1.", 0.0),
        ("", 0.0),
        # What a helper of the prompt says counts as the prompt has it: the program cannot bend it.
        ("```python\ndef helper(x):\n    return 5\ndef f(xs):\n    return [5, 5]\n```", 0.0),
        ("    import sys\n    sys.modules['program'].helper = lambda x: x\n    return xs", 0.0),
    ],
)
def test_a_completion_continues_the_prompt_or_defines_its_function(text, paid):
    assert code(sample(text, mode="check", tests=CHECK, entry_point="f", prompt_code=PROMPT)) == paid


@needs_bwrap
def test_setup_runs_after_the_program_and_helps_the_tests():
    tree = "class Node:\n    def __init__(self, v):\n        self.v, self.left = v, None\n"
    tree += "def f(n):\n    return n.v + (f(n.left) if n.left else 0)"
    setup = "import math\nroot = Node(1)\nroot.left = Node(2)\ndef close(a, b):\n    return abs(a - b) < 1e-6"
    tests = ["assert f(root) == 3", "assert close(f(root), math.sqrt(9))", "assert f(root.left) == 2", "assert close(f(root), 4)"]
    assert code(asserts(tree, *tests, setup=setup)) == 0.75
    assert code(asserts(tree.replace("return", "return 0 *"), *tests, setup=setup)) == 0.0
    leet = "class Solution:\n    def two(self, xs):\n        return xs[:2]"
    assert code(asserts(leet, "assert candidate([1, 2, 3]) == [1, 2]", entry_point="Solution().two")) == 1.0


ALWAYS = """
class Yes:
    __eq__ = __lt__ = __gt__ = __contains__ = __bool__ = lambda *_: True
    __ne__ = lambda *_: False
    __hash__ = lambda _: 0
"""
HOSTILE = {
    "equal to everything": ALWAYS + "def f(x):\n    return Yes()",
    "an int equal to everything": """
class I(int):
    __eq__ = lambda *_: True
    __ne__ = lambda *_: False
def f(x):
    return I(0)
""",
    "a str, a list and a tuple": ALWAYS
    + """
class L(list):
    __eq__ = lambda *_: True
def f(x):
    return L([Yes()])
""",
    "claims to be a list": ALWAYS
    + """
Yes.__class__ = property(lambda self: list)
def f(x):
    return Yes()
""",
    "leaves at import": "import sys\nsys.exit(0)",
    "leaves at once": "import os\nos._exit(0)",
    "leaves in the call": """
import os
def f(x):
    os._exit(0)
""",
    "leaves by SystemExit": "def f(x):\n    raise SystemExit(0)",
    "leaves by atexit": """
import atexit, os
atexit.register(os._exit, 0)
def f(x):
    raise KeyboardInterrupt
""",
    "patches the builtins": """
import builtins
for n in dir(builtins):
    if n.islower() and n not in ('print', 'setattr'):
        setattr(builtins, n, lambda *a, **k: True)
def f(x):
    return 1
""",
    "patches AssertionError": """
import builtins
class E(BaseException):
    pass
builtins.AssertionError = E
def f(x):
    return 1
""",
    "a profile function": """
import sys, os
sys.setprofile(lambda *a: os._exit(0))
def f(x):
    return 1
""",
    "an audit hook": """
import sys
sys.addaudithook(lambda *a: 1 / 0)
def f(x):
    return 1
""",
    "walks the frames": """
import sys
def f(x):
    frame = sys._getframe()
    while frame:
        frame.f_locals.update(value=2, passed=True, reply=b'1')
        frame.f_globals['dump'] = lambda *a: b'T'
        frame = frame.f_back
    return 1
""",
    "looks through the garbage": """
import gc
def f(x):
    for o in gc.get_objects():
        if isinstance(o, dict) and 'tests' in o:
            exec(o['tests'][0].replace('assert f', 'r = f'))
    return [1, 'passed']
""",
    "writes to all file descriptors": """
import os
for n in range(64):
    for m in (b'1', b'passed 0.1\\n' * 9, b'T', b'\\0' * 7 + b'\\1T', b'r'):
        try:
            os.write(n, m)
        except OSError:
            pass
def f(x):
    return 1
""",
    "writes them in the call": """
import os
def f(x):
    for n in range(64):
        for m in (b'\\0' * 7 + b'\\1T', b'passed 0.1\\n' * 9, b'1'):
            try:
                os.write(n, m)
            except OSError:
                pass
    os._exit(0)
""",
    "sends a verdict as the reply": """
import os, fcntl
def f(x):
    for n in range(3, 64):
        try:
            os.write(n, (1000).to_bytes(8, 'big') + b'l' * 1000)
        except OSError:
            pass
""",
    "reads what the tests want": """
import glob
def f(x):
    for p in glob.glob('/proc/*/cmdline') + glob.glob('/proc/*/environ') + glob.glob('/tmp/*'):
        try:
            t = open(p).read()
            if 'assert' in t:
                return 4321
        except Exception:
            pass
    return 1
""",
    "kills everything": """
import os
try:
    os.kill(-1, 9)
except Exception:
    pass
for p in range(2, 4000):
    try:
        os.kill(p, 9)
    except Exception:
        pass
def f(x):
    return 1
""",
    "kills its parent": """
import os
def f(x):
    os.kill(os.getppid(), 9)
    return 1
""",
    "changes the guest": """
import sys
m = sys.modules['grpo_cli.rewards._serve']
m.load = m.dump = lambda *a: b'T'
m.send = lambda fd, _: __import__('os').write(fd, b'\\0' * 7 + b'\\1T')
def f(x):
    return 1
""",
    "raises what asserts raise": "def f(x):\n    raise AssertionError",
    "raises StopIteration in the tests' loops": "def f(x):\n    raise StopIteration",
    "is never there": """
class Meta(type):
    __call__ = lambda *_: None
class f(metaclass=Meta):
    pass
""",
    "raises StopIteration": "def f(x):\n    raise StopIteration(4321)",
    "an endless reply": """
class L(list):
    def __iter__(self):
        while True:
            yield 1
def f(x):
    return L()
""",
    "a reply nested without end": """
def f(x):
    a = []
    for _ in range(10**5):
        a = [a]
    return a
""",
    "a reply that holds itself": """
def f(x):
    a = []
    a.append(a)
    return a
""",
    "a reply of gigabytes": "def f(x):\n    return 'x' * (1 << 29)",
    "a number without end": "def f(x):\n    return 1 << (1 << 29)",
    "closes everything": """
import os
os.closerange(0, 256)
def f(x):
    return 1
""",
    "forks and answers twice": """
import os
os.fork()
os.fork()
def f(x):
    os.fork()
    return 1
""",
    "ends the interpreter": """
import ctypes
def f(x):
    ctypes.string_at(0)
""",
    "recurses": "def f(x):\n    return f(x)",
    "returns its argument changed": """
def f(x):
    x.clear() if isinstance(x, list) else None
    return x
""",
    "a generator that never ends": """
def f(x):
    while True:
        yield 1
""",
    "nests its code": f"def f(x):\n    return {'(' * 5000}{')' * 5000}",
    "a chain of operators": f"def f(x):\n    return {'-' * 50_000}1",
}
TESTS = [
    "assert f(1) == 4321",
    "assert abs(f(2) - 4321) < 1e-6",
    "assert f([3, 1]) == sorted([3, 1])",
    "x = f(4)\nassert len(x) == 3 and x[0] == 'p'",
]
TESTS += [
    "assert 4321 in f(7)",
    "assert all(map(lambda x: f(x) == 4321, [1, 2]))",
    "assert list(map(f, [5, 6])) == [4321] * 2",
    "assert all([f(x) == 4321 for x in [1]])",
]


@needs_bwrap
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_is_not_paid(name):
    begin = time.monotonic()
    assert code(asserts(HOSTILE[name], *TESTS), timeout_s=1.0, total_s=4.0) == 0.0
    assert time.monotonic() - begin < 25
    assert children() == []


@pytest.fixture(autouse=True)
def marked(monkeypatch):
    """Every process of a sandbox started by this test carries a mark in its environment, and so do all that it starts."""
    monkeypatch.setitem(sandbox._ENVIRONMENT, "GRPO_TEST", f"{os.getpid()} {time.monotonic_ns()}")


def children() -> list[str]:
    """Those of them that live."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"GRPO_TEST={sandbox._ENVIRONMENT['GRPO_TEST']}".encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
        except OSError:
            continue
    return found


@needs_bwrap
@pytest.mark.parametrize("name", ["leaves at once", "writes to all file descriptors", "kills everything", "closes everything"])
def test_a_hostile_script_is_not_paid(name):
    script = HOSTILE[name].partition("\ndef f")[0]
    assert code(stdin(script, ("1\n", "4321\n"), ("2\n", "1\n"))) == 0.0
    assert children() == []


@needs_bwrap
@pytest.mark.parametrize(
    ("body", "answer"),
    [
        ("import os; return sorted(os.environ)", ["GRPO_TEST", "HOME", "LANG", "PATH", "PWD", "PYTHONHASHSEED"]),
        (
            "import os; return [p for p in ('/root', '/home', '/etc', '/var', '/mnt') if os.path.exists(p) and len(os.listdir(p)) > 1]",
            [],
        ),
        ("import os; return [os.getuid(), os.getgid(), os.getcwd(), os.listdir('.')]", [65534, 65534, "/tmp", []]),
        ("import socket; return [name for _, name in socket.if_nameindex()]", ["lo"]),
        ("import os; return len([p for p in os.listdir('/proc') if p.isdigit()]) < 6", True),
        ("import os; return [os.path.exists(p) for p in ('/dev/sda', '/dev/tty1', '/dev/kmsg', '/sys', '/run')]", [False] * 5),
        ("import os, sys\n    open(sys.prefix + '/x', 'w')", OSError),
        ("open('/usr/x', 'w')", OSError),
        ("import os, time\n    for _ in range(500):\n        if os.fork() == 0:\n            time.sleep(9)", OSError),
        ("import ctypes; return ctypes.CDLL(None).unshare(0x10000000)", -1),
        ("open('x', 'wb').write(bytes(100 << 20))", OSError),
        ("return len(bytes(900 << 20)) - len(bytes(900 << 20))", 0),
        ("return len(bytes(900 << 20) + bytes(1 << 20) + bytes(200 << 20))", MemoryError),
    ],
)
def test_the_sandbox_holds(body, answer):
    test = f"assert f() == {answer!r}"
    if isinstance(answer, type):
        test = f"try:\n    f()\n    assert False\nexcept {answer.__name__}:\n    pass"
    assert code(asserts(f"def f():\n    {body}", test)) == 1.0


@needs_bwrap
def test_an_evil_test_file_is_in_a_sandbox_too(tmp_path):
    (tmp_path / "secret").write_text("x")
    test = f"import os\nassert not os.path.exists({str(tmp_path / 'secret')!r}) and os.getuid() == 65534"
    assert code(asserts(F, test, "assert f(1) == 2")) == 1.0


@needs_bwrap
def test_a_hanging_test_costs_its_own_share():
    text = "def f(x):\n    while x == 2:\n        pass\n    if x == 3:\n        import time\n        time.sleep(60)\n    return x"
    begin = time.monotonic()
    assert code(asserts(text, *(f"assert f({n}) == {n}" for n in range(1, 6))), timeout_s=1.5) == 0.6
    assert 3 < time.monotonic() - begin < 15


@needs_bwrap
def test_a_program_that_hangs_while_loading_fails_all_tests_at_one_limit():
    begin = time.monotonic()
    assert code(asserts("while True:\n    pass", *["assert f(1) == 1"] * 50), timeout_s=1.5) == 0.0
    assert 1.5 < time.monotonic() - begin < 10


@needs_bwrap
def test_all_tests_together_end_at_their_limit():
    begin = time.monotonic()
    assert (
        code(
            asserts("def f(x):\n    while x:\n        pass\n    return x", *["assert f(1) == 1"] * 50, "assert f(0) == 0"), 1.0, total_s=3.0
        )
        == 0.0
    )
    assert time.monotonic() - begin < 10


@needs_bwrap
def test_a_hanging_script_keeps_the_credit_of_its_other_tests():
    text = "n = input()\nwhile n == '2':\n    pass\nprint(n)"
    assert code(stdin(text, ("1", "1"), ("2", "2"), ("3", "3")), timeout_s=1.5) == pytest.approx(2 / 3)


@needs_bwrap
def test_long_inputs_arguments_and_outputs_arrive_whole():
    assert code(stdin("print(input()[::-1])", ("ab" * 500_000, "ba" * 500_000))) == 1.0
    assert code(asserts(F, "assert f(list(range(10**5))) == list(range(10**5)) * 2", "assert len(f('é' * 10**6)) == 2 * 10**6")) == 1.0
    assert code(asserts(F, *[f"assert f({n}) == {2 * n}" for n in range(300)])) == 1.0
    assert code(stdin("while True:\n    print('x' * 1000)", ("", "x"))) == 0.0


@needs_bwrap
def test_nothing_is_left_behind():
    code(asserts(F, "assert f(1) == 2"))
    before = len(os.listdir("/proc/self/fd"))
    child = "import os, time\nfor _ in range(5):\n    if os.fork() == 0:\n        os.setsid()\n        os.fork()\n        time.sleep(100)\n"
    for judged in (
        asserts(child + F, "assert f(1) == 2"),
        stdin(child + "print(2)", ("", "2")),
        asserts(child + "1 / 0", "assert f(1) == 2"),
    ):
        code(judged, timeout_s=2.0)
        assert children() == []
    assert len(os.listdir("/proc/self/fd")) == before


@needs_bwrap
def test_a_killed_worker_takes_its_sandbox_with_it():
    mark = sandbox._ENVIRONMENT["GRPO_TEST"]
    call = "from tests.rewards.test_code import *\n"
    call += f"sandbox._ENVIRONMENT['GRPO_TEST'] = {mark!r}\ncode(asserts('while True: pass', 'assert f(1)'))"
    worker = subprocess.Popen([sys.executable, "-c", call], cwd=Path(__file__).parents[2])
    while len(children()) < 2:
        assert worker.poll() is None
        time.sleep(0.1)
    worker.kill()
    worker.wait()
    limit = time.monotonic() + 5
    while children() and time.monotonic() < limit:
        time.sleep(0.05)
    assert children() == []


@needs_bwrap
def test_calls_from_many_threads_do_not_disturb_each_other():
    judged = [asserts(f"def f(x):\n    return x + {n % 3}", "assert f(1) == 1", "assert f(1) == 2", "assert f(1) != 3") for n in range(24)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(code, judged)) == [2 / 3, 2 / 3, 0.0] * 8
    assert children() == []


@needs_bwrap
def test_sets_have_one_order_in_every_run():
    judged = [asserts("def f():\n    return list({'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'})[0]", "assert f() == 'a'") for _ in range(6)]
    assert len(set(map(code, judged))) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "p: a code reward needs the fields mode"),
        ({"mode": "asserts", "tests": (), "entry_point": "f"}, "needs the fields mode"),
        ({"mode": "stdin", "tests": ("assert f",)}, "needs the fields mode"),
        ({"mode": "asserts", "tests": ("assert f(1)",)}, "needs the field entry_point"),
    ],
)
def test_a_problem_without_what_the_rule_needs_is_an_error(fields, message):
    with pytest.raises(ValueError, match=message):
        code(sample(fenced(F), **fields), allow_unsandboxed=True)


@needs_bwrap
@pytest.mark.parametrize(
    ("solution", "text", "low", "high"),
    [
        ("def f(n):\n    return sum(range(n))", "def f(n):\n    return n * (n - 1) // 2", 1.0, 1.0),
        ("def f(n):\n    return n * (n - 1) // 2", "def f(n):\n    return n * (n - 1) // 2", 0.7, 1.0),
        ("def f(n):\n    return n * (n - 1) // 2", "def f(n):\n    return sum(range(n))", 0.0, 0.5),
        ("def f(n):\n    return n * (n - 1) // 2", "import time\ntime.sleep(0.5)\ndef f(n):\n    return n * (n - 1) // 2", 0.0, 0.2),
        ("def f(n):\n    return n * (n - 1) // 2", "def f(n):\n    return 0", 0.0, 0.0),
    ],
)
def test_efficiency_is_speed_beside_the_reference(solution, text, low, high):
    tests = [f"assert f({n}) == {n * (n - 1) // 2}" for n in (2_000_000, 3_000_000)]
    assert low <= code_efficiency(asserts(text, *tests, solution=solution)) <= high


def test_efficiency_needs_a_reference_that_is_right():
    assert code_efficiency(asserts(F, "assert f(1) == 2")) is NOT_APPLICABLE
    if sandbox.works():
        with pytest.raises(ValueError, match="problem p: its solution does not pass"):
            code_efficiency(asserts(F, "assert f(1) == 2", solution="def f(x):\n    return x"))
        assert code_efficiency(asserts("", "assert f(1) == 2", solution=F)) == 0.0


def shared_cases() -> list[dict]:
    path = SHARED / "cases/code.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


@needs_bwrap
@needs_shared
@pytest.mark.parametrize("case", shared_cases(), ids=lambda case: f"{case['id']} {case['kind']}")
def test_the_shared_cases_from_two_threads_at_once(case, monkeypatch, capfd):
    def at(path):
        return Path(path).expanduser()

    listeners, made = {}, []
    for step in case.get("setup", []):
        if step["type"] == "create_file":
            at(step["path"]).parent.mkdir(exist_ok=True)
            at(step["path"]).write_text("x")
            made.append(at(step["path"]))
        elif step["type"] == "set_env":
            monkeypatch.setenv(step["name"], step["value"])
        else:
            listeners[step["port"]] = socket.create_server(("127.0.0.1", step["port"]))
    fields = {key: case[key] for key in ("mode", "tests", "entry_point", "tolerance", "memory_limit_mb") if key in case}
    judged, begin = sample(case["completion"], **fields), time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(code, judged, timeout_s=3.0, total_s=7.0)
        rewards = {code(judged, timeout_s=3.0, total_s=7.0), other.result()}
    assert time.monotonic() - begin < 30
    assert len(rewards) == 1 and case["expected_reward"] in (None, *rewards)
    for check in case.get("checks", []):
        kind = check["type"]
        if kind in ("path_absent", "path_present"):
            assert at(check["path"]).exists() == (kind == "path_present")
        elif kind == "no_leftover_processes":
            assert children() == []
        elif kind == "no_connection":
            listeners[check["port"]].settimeout(0)
            with pytest.raises(BlockingIOError):
                listeners[check["port"]].accept()
        else:
            assert kind == "captured_output_below_mb" and len("".join(capfd.readouterr())) < check["value"] << 20
    for listener in listeners.values():
        listener.close()
    for path in made:
        path.unlink()
        path.parent.rmdir()


def humaneval() -> list[tuple[str, dict, str]]:
    """(id, fields, canonical solution) of each problem."""
    with gzip.open(SHARED / "data/humaneval/HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return [
        (
            row["task_id"],
            {"mode": "check", "tests": row["test"], "entry_point": row["entry_point"], "prompt_code": row["prompt"]},
            row["canonical_solution"],
        )
        for row in rows
    ]


def mbpp(name: str, setup: str) -> list[tuple[str, dict, str]]:
    text = (SHARED / "data/mbpp" / name).read_text(encoding="utf-8")
    rows = json.loads(text) if name.endswith(".json") else [json.loads(line) for line in text.splitlines()]
    found = []
    for row in rows:
        defined = [node.name for node in ast.parse(row["code"]).body if isinstance(node, ast.FunctionDef)]
        called = re.findall(r"\w+(?=\()", row["test_list"][0].replace(" (", "("))
        fields = {"mode": "asserts", "tests": row["test_list"], "entry_point": next(name for name in called if name in defined)}
        found.append(
            (str(row["task_id"]), {**fields, "setup": "\n".join(row[setup]) if isinstance(row[setup], list) else row[setup]}, row["code"])
        )
    return found


def none_instead(fields: dict, solution: str) -> str:
    """The solution with `return None` as the body of the entry point."""
    tree = ast.parse(fields.get("prompt_code", "") + solution)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == fields["entry_point"]:
            node.body = ast.parse("return None").body
    return ast.unparse(tree)


@needs_bwrap
@needs_shared
@pytest.mark.parametrize(
    ("problems", "true_none"),
    [
        (humaneval, 0),
        (lambda: mbpp("sanitized-mbpp.json", "test_imports"), 14),
        (lambda: mbpp("mbpp.jsonl", "test_setup_code"), 974),
    ],
    ids=["humaneval", "mbpp sanitized", "mbpp"],
)
@pytest.mark.filterwarnings("ignore:invalid escape sequence")  # in the solutions
def test_the_data_sets_own_solutions_pass_and_no_solution_does_not(problems, true_none):
    """Every tenth problem; GRPO_ALL_PROBLEMS=1 takes all (5 minutes)."""
    rows = problems()[:: 1 if os.environ.get("GRPO_ALL_PROBLEMS") else 10]
    with ThreadPoolExecutor(2) as pool:
        right = list(pool.map(lambda row: code(sample(fenced_raw(row[2]), **row[1]), timeout_s=30.0, total_s=60.0), rows))
        none = list(pool.map(lambda row: code(sample(fenced_raw(none_instead(*row[1:])), **row[1])), rows))
    assert [row[0] for row, paid in zip(rows, right, strict=True) if paid != 1.0] == []
    assert 1.0 not in none
    assert sum(paid > 0 for paid in none) <= true_none


def fenced_raw(text) -> str:
    return f"```python\n{text}\n```"


def test_a_program_in_an_indented_list_item_is_read_without_its_indentation():
    text = "1. Do:\n   ```python\n   def double(x):\n       return 2 * x\n   ```\n"
    assert program(text) == "def double(x):\n    return 2 * x\n"
