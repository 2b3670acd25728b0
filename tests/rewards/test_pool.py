"""Rules in worker processes: whatever one does, its call ends in time and the others are not disturbed."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from test_rewards import R1, group, section

from grpo_cli.rewards import Rules, score

HOSTILE = """
import os, re, sys, threading, time

def sleeps(sample):
    if "sleep" in sample.text:
        time.sleep(1000)
    return 1.0

def hangs_in_c(sample):
    if "regex" in sample.text:
        re.match("(a+)+$", "a" * 40 + "b")
    return 1.0

def exits(sample):
    if "exit" in sample.text:
        os._exit(0)
    if "abort" in sample.text:
        os.abort()
    if "sys" in sample.text:
        sys.exit(1)
    return 1.0

def wants_memory(sample):
    return float(len(bytearray(20 * 2**30)) > 0) if "big" in sample.text else 1.0

def prints(sample):
    if "print" in sample.text:
        for _ in range(1024):
            print("x" * 2**20)
            sys.stderr.write("y" * 2**20)
    return 1.0

def leaves_a_process(sample):
    if "child" in sample.text:
        import subprocess
        subprocess.Popen(["sleep", "4242"])
        os._exit(3)
    return 1.0

def number(sample):
    time.sleep(0.02 * (7 - int(sample.text) % 7))
    return float(sample.text)

def where(sample):
    return float("torch" in sys.modules)
"""


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    (tmp_path / "hostile.py").write_text(HOSTILE)
    monkeypatch.setenv("GRPO_CLI_TEST", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)


def judged(*texts, fn, workers=1, timeout_s=1.0, max_error_frac=1.0):
    rules = {"mine": {"fn": f"hostile:{fn}", "on_error": -1.0}}
    with Rules(section(rules, "mine", workers=workers, timeout_s=timeout_s, max_error_frac=max_error_frac)) as loaded:
        return score(loaded, [group(*texts)])


@pytest.mark.parametrize(
    ("fn", "bad", "reason"),
    [
        ("sleeps", "sleep", "took longer than 1 s"),
        ("hangs_in_c", "regex", "took longer than 1 s"),
        ("exits", "exit", r"ended its process (exit status 0)"),
        ("exits", "abort", r"ended its process (SIGABRT)"),
        ("exits", "sys", "raised SystemExit: 1"),
        ("wants_memory", "big", "raised MemoryError"),
        ("leaves_a_process", "child", "ended its process (exit status 3)"),
    ],
)
def test_a_hostile_rule_costs_its_own_score_and_its_time_limit(hostile, fn, bad, reason):
    started = time.monotonic()
    scores = judged("a", bad, "b", bad, "c", fn=fn)
    assert scores.total_PG.tolist() == [[1, -1, 1, -1, 1]]
    assert scores.errors == {"mine": 2} and reason in scores.examples["mine"] and repr(bad) in scores.examples["mine"]
    assert time.monotonic() - started < 20  # two limits of a second and three starts, on a busy machine
    assert not _processes()


def test_a_rule_may_print_a_gigabyte(hostile, capfd):
    assert judged("print", fn="prints", timeout_s=60.0).total_PG.tolist() == [[1.0]]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("workers", [1, 3])
def test_the_order_of_verdicts_does_not_depend_on_timing(hostile, workers):
    texts = [str(number) for number in range(40)]
    assert judged(*texts, fn="number", workers=workers).total_PG.tolist() == [[float(number) for number in range(40)]]


def test_too_many_failures_stop_the_run_early(hostile):
    started = time.monotonic()
    with pytest.raises(ValueError, match=r"'mine' failed on 2 of 10 completions, .*_error_frac=0.1: it took longer") as stop:
        judged(*["sleep"] * 10, fn="sleeps", max_error_frac=0.1)
    assert "problem p1, completion 'sleep'" in str(stop.value) and time.monotonic() - started < 20
    assert not _processes()


def test_rules_run_without_torch(hostile):
    assert judged("a", fn="where").total_PG.tolist() == [[0.0]]


def test_a_rules_own_limit_takes_the_place_of_the_common_one(hostile):
    rules = {"mine": {"fn": "hostile:sleeps", "timeout_s": 0.3}, "other": {"fn": "hostile:number"}}
    with Rules(section(rules, "mine", timeout_s=30.0)) as loaded:
        assert "took longer than 0.3 s" in score(loaded, [group("sleep")]).examples["mine"]


def test_two_threads_may_each_have_rules(hostile):
    found = {}

    def one(name):
        with Rules(section(R1, "accuracy")) as rules:
            found[name] = score(rules, [group("<think>a</think><answer>12</answer>")] * 20).total_PG.sum().item()

    threads = [threading.Thread(target=one, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"a": 30, "b": 30}


@pytest.mark.parametrize(
    ("fn", "message"),
    [("numerics", "is not a rule"), ("hostile:nothing", "has no 'nothing'"), ("absent:f", "there is no module absent")],
)
def test_what_cannot_be_loaded_is_told_at_once_and_leaves_no_process(hostile, fn, message):
    with pytest.raises(ValueError, match=message):
        Rules(section({"mine": {"fn": fn}}, "mine"))
    assert not _processes()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills a process with its parent")
def test_a_hanging_rule_does_not_outlive_a_killed_run(hostile, tmp_path):
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1])!r}]\n"
        "from test_pool import judged\nprint('here', flush=True)\njudged('sleep', fn='sleeps', timeout_s=1000.0)"
    )
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert run.stdout.readline() == b"here\n"
    _until(lambda: _processes())
    run.kill()
    run.wait()
    _until(lambda: not _processes())


def _until(reached) -> None:
    for _ in range(200):
        if reached():
            return
        time.sleep(0.05)
    raise AssertionError


def _processes() -> list[str]:
    """Live processes that this test started, however they are called now."""
    mark, found = f"GRPO_CLI_TEST={os.environ['GRPO_CLI_TEST']}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if entry.name != str(os.getpid()) and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append((entry / "cmdline").read_text())
        except OSError:
            continue
    return found
