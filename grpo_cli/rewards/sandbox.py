"""Runs a program and its tests in two bubblewrap sandboxes that talk over one socket. Knows nothing of completions or rewards.

Inside a sandbox: no network, no files but Python's own and a temporary folder, an empty environment, its own processes, a user without
rights. System calls are not filtered: a hole in the kernel is a hole in the sandbox.
"""

import contextlib
import functools
import marshal
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import IO

_BASE = os.path.realpath(sys.base_prefix)
_PYTHON = f"{_BASE}/bin/python3.{sys.version_info.minor}"
_FLAGS = ["-s", "-S", "-P", "-B", "-X", "utf8"]
_BOOT = """
import marshal, sys
job, guest = marshal.loads(open(0, "rb", closefd=False).read())
for name, code in guest:
    module = sys.modules[name] = type(sys)(name)
    exec(code, vars(module))
module.main(job)
"""
# The fixed hash seed gives sets of strings one order, so a verdict that hangs on it is the same after a resume.
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
_START_S = 60.0


class SandboxError(RuntimeError):
    """The sandbox failed, not the program in it."""


@dataclass(frozen=True)
class Limits:
    timeout_s: float
    """Wall time of loading the program, and of each test."""
    total_s: float
    """Wall time of all tests together."""
    memory_mb: int
    """Address space of each process."""


@dataclass(frozen=True)
class Report:
    load_s: float
    """Wall time of loading the program."""
    passed: list[bool]
    """One per test that ran: none when the program did not load."""
    seconds: list[float]
    """Wall time of each."""


def run(job: dict, limits: Limits, sandboxed: bool) -> Report:
    """Load the job's program and evaluate its tests; what was started here is gone on return.

    A job has the keys mode, program, prompt_code, entry_point, setup, tests and tolerance; `code` says what they mean. Without the
    sandbox the two processes have limits and a folder of their own, and else the rights of the user.
    """
    return _run(job, limits, probe() if sandboxed else None)


def _run(job: dict, limits: Limits, command: list[str] | None) -> Report:
    job = {**job, "timeout_s": limits.timeout_s, "total_s": limits.total_s, "limits": _rlimits(limits, command)}
    untold = {key: job[key] for key in job if key not in ("tests", "tolerance")}
    with tempfile.TemporaryFile() as stderr, contextlib.ExitStack() as stack:
        theirs, ours = socket.socketpair()
        with theirs, ours:
            stack.enter_context(_started("_serve", untold, theirs, command, stderr))
            judge = stack.enter_context(_started("_judge", job, ours, command, stderr))
        output = _output(judge, time.monotonic() + _START_S + limits.timeout_s + limits.total_s)
        stack.close()
        stderr.seek(0)
        complaint = stderr.read(2000).decode("utf-8", "replace").strip()
    lines = [line.partition(" ")[::2] for line in output.splitlines()]
    for word, rest in lines:
        if word == "error":
            raise ValueError(rest)
    if not lines or lines[0][0] != "loaded":
        raise SandboxError(f"the sandbox did not start: {complaint or 'it gives no reason'}")
    return Report(float(lines[0][1]), [word == "passed" for word, _ in lines[1:]], [float(rest) for _, rest in lines[1:]])


@functools.cache
def _guest(role: str) -> list[tuple[str, CodeType]]:
    """Compiled here: that takes longer than a test."""
    paths = [Path(__file__).with_name(f"{name}.py") for name in ("_wire", role)]
    return [(f"grpo_cli.rewards.{path.stem}", compile(path.read_text(encoding="utf-8"), path.name, "exec")) for path in paths]


def _rlimits(limits: Limits, command: list[str] | None) -> dict[str, int]:
    sizes = {"RLIMIT_AS": limits.memory_mb << 20, "RLIMIT_FSIZE": 64 << 20, "RLIMIT_NOFILE": 64, "RLIMIT_CORE": 0}
    # Outside of a sandbox the number of processes would count all those of the user.
    return sizes | {"RLIMIT_CPU": int(limits.total_s) + 30} | ({"RLIMIT_NPROC": 64} if command else {})


@contextlib.contextmanager
def _started(role: str, job: dict, connection: socket.socket, command: list[str] | None, stderr: IO) -> Iterator[subprocess.Popen]:
    """Start one of the two processes by plain exec: a fork of a trainer with gigabytes takes longer than the sandbox."""
    with contextlib.ExitStack() as stack:
        stdin = stack.enter_context(tempfile.TemporaryFile())
        stdin.write(marshal.dumps((job | {"fd": connection.fileno()}, _guest(role))))
        stdin.seek(0)
        read, write = map(stack.enter_context, map(os.fdopen, os.pipe(), ("rb", "wb")))
        folder = "/" if command else stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        process = subprocess.Popen(
            [*([*command, "--info-fd", str(write.fileno()), "--"] if command else []), _PYTHON, *_FLAGS, "-c", _BOOT],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=stderr,
            pass_fds=[connection.fileno(), write.fileno()] if command else [connection.fileno()],
            cwd=folder,
            env=_ENVIRONMENT,
            start_new_session=True,
        )
        stack.enter_context(process)
        write.close()
        stack.callback(_kill, process, read)
        yield process


def _kill(process: subprocess.Popen, info: IO[bytes]) -> None:
    """Kill the process and all that it started, and wait until they are gone.

    In a sandbox that is the end of its init, which the kernel reports when all others in there are dead; bwrap itself may end before.
    """
    init = re.search(rb'"child-pid": ([0-9]+)', os.read(info.fileno(), 4096))
    running = process.poll() is None
    if init:
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(int(init[1]))
            if running:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            _readable(pidfd, 10.0)
            os.close(pidfd)
    elif running:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _output(process: subprocess.Popen, deadline: float) -> str:
    """What the process wrote until it ended or time was up."""
    parts, fd = [], process.stdout.fileno()
    while _readable(fd, deadline - time.monotonic()) and (part := os.read(fd, 1 << 16)):
        parts.append(part)
    return b"".join(parts).decode()


def _readable(fd: int, timeout_s: float) -> bool:
    poll = select.poll()  # unlike select it takes the file descriptors above 1023 of a busy trainer
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))


def works() -> bool:
    return isinstance(_found(), list)


def probe() -> list[str]:
    """The command that starts a sandbox here, found by a real run; raises ValueError that says why there is none, and what to do."""
    found = _found()
    if isinstance(found, str):
        raise ValueError(f"code rewards run model-written programs in bubblewrap, which {found}{_WAY_ROUND}")
    return found


@functools.cache
def _found() -> list[str] | str:
    """The command, or why there is none."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        return "is not installed: apt install bubblewrap, or dnf install bubblewrap"
    job = {
        "mode": "asserts",
        "program": "def f(x):\n    return x + 1",
        "prompt_code": "",
        "entry_point": "f",
        "setup": "",
        "tolerance": None,
    }
    complaints = []
    for extra in (["--disable-userns"], []):  # bubblewrap before 0.8 and some kernels cannot forbid further user namespaces
        command = [*_as_nobody(), bwrap, *_ISOLATED, *extra, *_bound()]
        try:
            if _run(job | {"tests": ["assert f(1) == 2"]}, Limits(20.0, 20.0, 1024), command).passed == [True]:
                return command
            complaints.append("a program in it cannot be run")
        except SandboxError as error:
            complaints.append(str(error))
    return f"does not work here: {complaints[-1]}{_advice(complaints[-1])}"


_WAY_ROUND = (
    ". The only way round is reward.rules.NAME.args.allow_unsandboxed=true, which runs what the model writes with your own rights: "
    "your files, your network"
)
_ISOLATED = ["--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL", "--die-with-parent"]
_ISOLATED += ["--proc", "/proc", "--dev", "/dev", "--size", str(64 << 20), "--tmpfs", "/tmp", "--chdir", "/tmp"]


def _bound() -> list[str]:
    """What a sandbox sees of the host, read-only: /usr, and Python where it lies elsewhere."""
    places = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "lib", "lib64"):
        if os.path.islink(f"/{name}"):
            places += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        elif os.path.isdir(f"/{name}"):
            places += ["--ro-bind", f"/{name}", f"/{name}"]
    return places if f"{_BASE}/".startswith("/usr/") else [*places, "--ro-bind", "/mnt" if _is_closed() else _BASE, _BASE]


def _as_nobody() -> list[str]:
    """For root: become an ordinary user first, since no limit on processes holds for root.

    Python in a folder that only root may enter, such as a home folder, is shown to that user at /mnt, in a mount namespace of its own.
    """
    if os.geteuid() != 0:
        return []
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    shown = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /mnt && exec "$@"', _BASE]
    return [*shown, *nobody] if _is_closed() else nobody


def _is_closed() -> bool:
    return os.geteuid() == 0 and not all(path.stat().st_mode & 0o001 for path in Path(_BASE).parents)


_ADVICE = {
    r"uid map|RTM_NEWADDR|loopback": (
        "AppArmor forbids it to ordinary programs (Ubuntu 24.04 and later): give /usr/bin/bwrap an AppArmor profile with the rule "
        "`userns,`, or set sysctl kernel.apparmor_restrict_unprivileged_userns=0"
    ),
    r"mount proc": "the container hides parts of /proc: start it with docker run --security-opt systempaths=unconfined",
    r"namespace|[Oo]peration not permitted|pivot|[Pp]ermission denied": (
        "a container's default seccomp filter forbids it (docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined) "
        "or the kernel's settings do (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone)"
    ),
}


def _advice(complaint: str) -> str:
    return next((f". {advice}" for pattern, advice in _ADVICE.items() if re.search(pattern, complaint)), "")
