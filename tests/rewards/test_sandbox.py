import math
import os
import stat
import time
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_cli.rewards import sandbox
from grpo_cli.rewards._judge import same_output
from grpo_cli.rewards._wire import dump, load
from grpo_cli.rewards.code import prepare
from grpo_cli.rewards.sandbox import Limits

needs_bwrap = pytest.mark.skipif(not sandbox.works(), reason="bubblewrap is not installed, or does not work here")


def refuse(*_):
    raise ValueError("no plain data")


def sent(value):
    return load(dump(value, refuse), refuse)


KEYS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters()) | st.binary()
VALUES = st.recursive(
    KEYS | st.complex_numbers(allow_nan=False) | st.frozensets(KEYS) | st.sets(KEYS),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(VALUES)
def test_plain_data_arrives_as_it_was(value):
    assert repr(sent(value)) == repr(value) or sent(value) == value
    assert type(sent(value)) is type(value)


def test_rich_values_arrive_as_they_were():
    values = [range(1, 9, 2), Fraction(1, 3), Decimal("1.10"), date(2024, 2, 29), datetime(2024, 2, 29, 1, 2, 3, 4), timedelta(1, 2, 3)]
    assert sent(10**5000) == 10**5000
    values += [-1, math.inf, -0.0, bytearray(b"x"), "\ud800", True, 1]
    assert list(map(repr, sent(values))) == list(map(repr, values))
    assert math.isnan(sent(math.nan))


def test_subclasses_arrive_as_what_they_are_built_on():
    always = {"__eq__": lambda *_: True, "__ne__": lambda *_: False, "__hash__": lambda _: 0}
    for kind, value in ((int, 3), (float, 2.5), (str, "x"), (list, [1]), (dict, {1: 2}), (tuple, (1,)), (set, {1}), (bytes, b"x")):
        arrived = sent(type("Yes", (kind,), always)(value))
        assert type(arrived) is kind and arrived == value and arrived != "anything else"


BROKEN = [b"", b"x", b"i", b"i12", b"ig;", b"i1;i2;", b"s5:abc", b"s-1:abc", b"s1e9:a", b"l3:i1;", b"l9999999999:", b"d1:i1;", b"d1:l0:n"]
BROKEN += [b"S1:l0:", b"s2:\xff\xff", b"h1;", b"es4:quit", b"mb1:x", b"os7:os.path", b"os16:subprocess.Popenl1:s2:ls", b"ol0:l0:"]
BROKEN += [b"os14:builtins.rangel0:", b"os18:fractions.Fractiont2:i1;i0;", b"l1:" * 100_000, b"os13:builtins.evall1:s1:1", b"f1"]


@pytest.mark.parametrize("data", BROKEN, ids=lambda data: repr(data[:20]))
def test_what_is_no_plain_data_is_refused(data):
    with pytest.raises((ValueError, TypeError, ZeroDivisionError, RecursionError)):
        load(data, refuse)


def test_output_is_compared_by_lines_and_within_a_tolerance():
    assert same_output("a \nb\n\n", "a\nb", None) and not same_output("a b", "a  b", None)
    assert same_output("a 1.0000001", "a  1", 1e-6) and not same_output("1.00001", "1", 1e-6)
    assert not same_output("0.0000001", "0", 1e-6) and not same_output("1\n", "1\n2", 1e-6) and not same_output("", "0", 1e-6)


JOB = {"mode": "asserts", "program": "def f(x):\n    return x + 1", "prompt_code": "", "entry_point": "f", "setup": "", "tolerance": None}
LIMITS = Limits(5.0, 10.0, 1024)


@pytest.mark.parametrize("sandboxed", [pytest.param(True, marks=needs_bwrap), False])
def test_a_run_reports_every_test(sandboxed):
    report = sandbox.run(
        JOB | {"tests": ["assert f(1) == 2", "assert f(1) == 3", "import time\nf(time.sleep(0.2) or 1)"]}, LIMITS, sandboxed
    )
    assert report.passed == [True, False, True]
    assert report.seconds[2] > 0.2 > report.seconds[0] > 0 and 0 <= report.load_s < 5


def test_without_the_sandbox_values_are_still_compared_outside_of_the_program():
    evil = "import os, builtins\nbuiltins.abs = lambda x: 0\nclass Yes:\n    __eq__ = lambda *_: True\n"
    tests = ["assert f(1) == 3", "assert abs(f(1) - 3) < 1"]
    for body in ("return Yes()", "os._exit(0)", "return 9", "raise SystemExit"):
        assert not any(sandbox.run(JOB | {"program": f"{evil}def f(x):\n    {body}", "tests": tests}, LIMITS, False).passed)
    begin = time.monotonic()
    hang = {"program": "def f(x):\n    while x == 1:\n        pass\n    return x", "tests": ["assert f(1)", "assert f(2)"]}
    assert sandbox.run(JOB | hang, Limits(1.0, 10.0, 1024), False).passed == [False, True]
    assert time.monotonic() - begin < 8
    assert sandbox.run(
        JOB | {"mode": "stdin", "program": "print(input())", "tests": [{"input": "1", "output": "1"}]}, LIMITS, False
    ).passed == [True]


def bwrap_that(says, tmp_path, monkeypatch):
    path = tmp_path / "bwrap"
    path.write_text(f"#!/bin/sh\necho '{says}' >&2\nexit 1\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    monkeypatch.setattr(sandbox.shutil, "which", lambda _: str(path) if says else None)
    monkeypatch.setattr(sandbox, "_found", sandbox._found.__wrapped__)
    monkeypatch.setattr(sandbox, "_as_nobody", list)  # who could not enter pytest's folder


@pytest.mark.parametrize(
    ("says", "advice"),
    [
        ("", "is not installed: apt install bubblewrap, or dnf install bubblewrap"),
        ("bwrap: setting up uid map: Permission denied", "Ubuntu 24.04"),
        ("bwrap: loopback: Failed RTM_NEWADDR: Operation not permitted", "AppArmor profile"),
        ("bwrap: No permissions to create a new namespace, likely because the kernel does not allow it", "seccomp=unconfined"),
        ("bwrap: Creating new namespace failed: Operation not permitted", "max_user_namespaces"),
        ("bwrap: Can't mount proc on /newroot/proc: Operation not permitted", "systempaths=unconfined"),
        ("bwrap: something else", "does not work here: the sandbox did not start: bwrap: something else"),
    ],
)
def test_a_sandbox_that_does_not_start_is_refused_with_the_way_out(says, advice, tmp_path, monkeypatch):
    bwrap_that(says.replace("'", "'\\''"), tmp_path, monkeypatch)
    with pytest.raises(ValueError, match=f"(?s){advice}.*allow_unsandboxed=true"):
        prepare()
    prepare(allow_unsandboxed=True, timeout_s=3)
    assert not sandbox.works()


def test_a_bwrap_that_cannot_forbid_user_namespaces_is_used_without(tmp_path, monkeypatch):
    bwrap_that("x", tmp_path, monkeypatch)

    def run(job, limits, command):
        if "--disable-userns" in command:
            raise sandbox.SandboxError("bwrap: Unknown option --disable-userns")
        return sandbox.Report(0.1, [True], [0.1])

    monkeypatch.setattr(sandbox, "_run", run)
    assert str(tmp_path / "bwrap") in sandbox.probe() and "--disable-userns" not in sandbox.probe()
    monkeypatch.setattr(sandbox, "_run", lambda *_: sandbox.Report(0.1, [False], [0.1]))
    with pytest.raises(ValueError, match="a program in it cannot be run"):
        sandbox.probe()


@needs_bwrap
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_python_in_a_folder_of_root_is_shown_to_an_ordinary_user(tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox, "_BASE", "/usr/local")
    assert sandbox._as_nobody()[0] == "setpriv" and "/mnt" not in sandbox._bound()
    (tmp_path / "closed" / "python").mkdir(parents=True)
    (tmp_path / "closed").chmod(0o700)
    monkeypatch.setattr(sandbox, "_BASE", str(tmp_path / "closed" / "python"))
    assert sandbox._as_nobody()[0] == "unshare" and sandbox._bound()[-2:] == ["/mnt", str(tmp_path / "closed" / "python")]
