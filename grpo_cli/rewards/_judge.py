"""The tests' side of a verdict on code. Runs inside a sandbox of its own, and never a line of the program.

In the tests the entry point is a `Remote`, which sends plain data to the program's process and gets plain data back, so what is compared
can neither claim to be equal nor reach the verdict.
"""

import _socket
import builtins
import marshal
import os
import select
import sys
import time
from _functools import partial

from grpo_cli.rewards._wire import complete, confine, dump, load, mutable, receive, send

_START_S = 30.0
_KILL = 9


class ProgramError(Exception):
    """The program raised something that is no built-in exception."""


class Unjudgeable(BaseException):
    """A test does what cannot be judged: the data set's mistake, not the program's."""


class Remote:
    """Stands in the tests for something that lives in the program's process; equal to nothing but itself.

    Nor does it say whether it contains a value: `in` compares here what it yields. An opaque one is no part of what is judged (a class
    that arguments are made of): it can be used, and tells nothing.
    """

    def __init__(self, reference, opaque):
        vars(self).update(_reference=reference, _opaque=opaque)

    def _ask(self, operation, *args, **kwargs):
        return _ask(self._opaque, operation, self, *args, **kwargs)

    def __call__(self, *args, **kwargs):
        return self._ask("call", *args, **kwargs)

    def __getattr__(self, name):
        return self._ask("getattr", name)

    def __setattr__(self, name, value):
        self._ask("setattr", name, value)

    def __getitem__(self, key):
        return self._ask("getitem", key)

    def __iter__(self):
        return self._judged("iter")

    def __next__(self):
        return self._ask("next")

    def __len__(self):
        return self._judged("len")

    def __bool__(self):
        return self._judged("bool")

    def __str__(self):
        return self._judged("str")

    def _judged(self, operation, *args):
        if self._opaque:
            raise TypeError("a test cannot rest on what the program says about a name other than the entry point")
        return self._ask(operation, *args)


_connection = None


def _ask(opaque, operation, *args, **kwargs):
    try:
        request = dump((operation, opaque, args, kwargs), _refer)
    except RecursionError:
        raise Unjudgeable("a test passes a value nested too deeply") from None
    try:
        send(_connection, request)
        reply = load(receive(_connection), lambda tag, read, until: _remote(tag, until, opaque))
        if isinstance(reply, Remote):
            return reply
        fine, value, changed = reply
        error = None
        if fine is False:
            error = _exception(operation, value, changed)
        elif fine is not True or opaque:
            raise ValueError("no reply")
        elif value is None:
            for arg, new in zip(mutable(args), changed, strict=True):
                _overwrite(arg, new)
    except BaseException:  # the program left, or sent what is no reply: nothing in the test may catch that
        os._exit(1)
    if error is not None:
        raise error
    return value


def _refer(value):
    if isinstance(value, Remote):
        reference = value._reference
        return b"h%x;" % reference if isinstance(reference, int) else b"e" + dump(reference, _refer)
    if (code := getattr(value, "__code__", None)) is not None and not value.__closure__:
        return b"m" + dump(marshal.dumps(code), _refer)
    if callable(value) and code is None and getattr(value, "__module__", None):
        return b"e" + dump(f"__import__({value.__module__!r}).{value.__qualname__}", _refer)
    raise Unjudgeable(f"a test passes a {type(value).__name__}, which is no plain data")


def _remote(tag, until, opaque):
    if tag != b"h":
        raise ValueError("no value")
    return Remote(int(until(b";"), 16), opaque)


def _exception(operation, name, message):
    if not type(name) is type(message) is str:
        raise ValueError("no reply")
    kind = getattr(builtins, name, None)
    ends = name == "StopIteration" and operation != "next"  # would end a loop of the test's: all(map(f, xs)) of nothing is true
    if isinstance(kind, type) and issubclass(kind, Exception) and not ends:
        try:
            return kind(*([message] if message else []))
        except TypeError:
            pass  # UnicodeDecodeError and the like take more than a message
    return ProgramError(f"{name}: {message}")


def _overwrite(arg, new):
    if type(arg) is not type(new):
        raise ValueError("no reply")
    if isinstance(arg, (list, bytearray)):
        arg[:] = new
    else:
        arg.clear()
        arg.update(new)


class Names(dict):
    """What the tests see: their own names, Python's and its modules'. Any other is the program's, or an error until `complete`."""

    complete = False

    def __missing__(self, name):
        if hasattr(builtins, name):
            return getattr(builtins, name)
        if not self.complete:
            raise NameError(name)
        if name in sys.stdlib_module_names:
            return __import__(name)
        return Remote(name, opaque=True)


def main(job):
    """Evaluate each test in a process of its own; writes the program's loading time, then a line a test: passed, seconds."""
    out = os.dup(1)
    control = confine(job)

    def report(*words):
        os.write(out, (" ".join(map(str, words)) + "\n").encode())

    try:
        tests = _TESTS[job["mode"]](job)
    except Exception as error:
        return report("error", f"the tests cannot be run: {type(error).__name__}: {error}")
    control.settimeout(_START_S)
    if control.recv(1) != b"h":
        return report("lost")
    deadline = time.monotonic() + job["total_s"]
    control.settimeout(job["timeout_s"])
    begin = time.monotonic()
    try:
        loaded = control.recv(1) == b"r"
    except OSError:
        loaded = False
    report("loaded", time.monotonic() - begin)
    for test in tests if loaded else []:
        begin = time.monotonic()
        if begin > deadline:
            break
        verdict = _attempt(test, control, min(job["timeout_s"], deadline - begin))
        word = "passed" if verdict == b"1" else "failed"
        report(*(["error", verdict[1:].decode()] if verdict[:1] == b"!" else [word, time.monotonic() - begin]))
    os._exit(0)  # Python's own end takes longer than a test


def _attempt(test, control, timeout_s):
    """b"1" when the test ran to its end in time, b"!" and a reason when it cannot be judged, else b""."""
    global _connection
    ours, theirs = _socket.socketpair()
    try:
        control.sendmsg([b"t"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, theirs.fileno().to_bytes(4, sys.byteorder))])
    except OSError:
        return b""  # the program is gone
    theirs.close()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        _connection = ours.fileno()
        try:
            test()
            os.write(write, b"1")
        except Unjudgeable as error:
            os.write(write, b"!" + str(error).encode()[:1000])
        finally:
            os._exit(0)
    os.close(write)
    ended = select.select([read], [], [], max(0.0, timeout_s))[0]
    verdict = os.read(read, 2000) if ended else b""
    os.close(read)
    ours.close()
    os.kill(child, _KILL)
    os.waitpid(child, 0)
    return verdict


def _names(job):
    """The tests' names: prompt and setup as far as they stand without the program, its classes left to the program."""
    names = Names()
    for text in (complete(job["prompt_code"]), job["setup"]):
        tree = compile(text, "setup", "exec", 0x400)  # the syntax tree, without the ast module
        for node in tree.body:
            tree.body = [node]
            try:
                if type(node).__name__ != "ClassDef":
                    exec(compile(tree, "setup", "exec"), names)
            except NameError:
                pass
    names.complete = True
    candidate = Remote(job["entry_point"], opaque=False)
    names.update({"candidate": candidate, job["entry_point"]: candidate})
    return names


def _asserts(job):
    names = _names(job)
    return [partial(exec, compile(test, "test", "exec"), names) for test in job["tests"]]


def _checks(job):
    names = _names(job)
    return [partial(exec, compile(f"{test}\ncheck(candidate)", "test", "exec"), names) for test in job["tests"]]


def _outputs(job):
    run = Remote("run", opaque=False)

    def test(case):
        status, output = run(case["input"])
        assert status == 0 and same_output(output, case["output"], job["tolerance"])

    return [partial(test, case) for case in job["tests"]]


_TESTS = {"asserts": _asserts, "check": _checks, "stdin": _outputs}


def same_output(output, expected, tolerance):
    """Equal line by line but for trailing white space; numbers within the relative tolerance, if there is one.

    "3.14160 \\n" equals "3.1416", and within 1e-4 "3.1415".
    """
    lines, wanted = ([line.rstrip() for line in text.rstrip().split("\n")] for text in (output, expected))
    if tolerance is None or len(lines) != len(wanted):
        return lines == wanted
    pairs = [(line.split(), want.split()) for line, want in zip(lines, wanted, strict=True)]
    return all(len(a) == len(b) and all(_near(word, want, tolerance) for word, want in zip(a, b, strict=True)) for a, b in pairs)


def _near(word, wanted, tolerance):
    try:
        return word == wanted or abs(float(word) - float(wanted)) <= tolerance * abs(float(wanted))
    except ValueError:
        return False
