"""Worker processes for rules: each call has a wall-clock limit that holds whatever the rule does, since its process is killed.

Verdicts come back in the order of the samples, whatever the timing. Knows nothing of weights.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import wait

from grpo_cli.config import Reward, Rule
from grpo_cli.records import Sample
from grpo_cli.rewards.calling import Failed, Verdict, shown

_LOADING_S = 120
_BATCH = 16
"""Samples sent to a worker at a time; enough that it seldom waits for more."""
_MOST_WORKERS = 8

Note = Callable[[int, str, Verdict, float], None]
"""Takes (number of the sample, name of the rule, verdict, seconds)."""


class Pool:
    def __init__(self, section: Reward, rules: dict[str, Rule]):
        """Starts the processes and waits until one has loaded the rules. ValueError says what is wrong with them."""
        self._section = section
        self._rules = {name: rules[name] for name in sorted(rules, key=lambda name: _depth(name, rules))}
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        self.seconds_B: list[float] = []
        """What each sample of the last call of `judge` took, all rules together; a call that was ended counts its limit."""
        self._workers = [self._start() for _ in range(section.workers or min(_MOST_WORKERS, cores)) if rules]
        try:
            for worker in self._workers[:1]:
                worker.await_loaded()
        except BaseException:
            self.close()
            raise

    def _start(self) -> "_Worker":
        return _Worker(self._rules, self._section.timeout_s, int(self._section.memory_gib * 2**30))

    def judge(self, samples: list[Sample], max_error_frac: float) -> list[dict[str, Verdict]]:
        """Every rule's verdict on every sample. ValueError when a rule fails on more than max_error_frac of them."""
        verdicts: list[dict[str, Verdict]] = [{} for _ in samples]
        failures = dict.fromkeys(self._rules, 0)
        waiting = deque(range(len(samples)))

        self.seconds_B = [0.0] * len(samples)
        if not self._rules:
            return verdicts

        def note(number: int, name: str, verdict: Verdict, seconds: float) -> None:
            verdicts[number][name] = verdict
            self.seconds_B[number] += seconds
            if isinstance(verdict, Failed):
                failures[name] += 1
                if failures[name] > max_error_frac * len(samples):
                    raise ValueError(
                        f"reward rule {name!r} failed on {failures[name]} of {len(samples)} completions, more than "
                        f"reward.max_error_frac={max_error_frac:g}: it {verdict.reason}; {shown(samples[number])}"
                    )

        while waiting or any(worker.at_work for worker in self._workers):
            for worker in self._workers:
                if waiting and worker.is_idle:
                    share = min(_BATCH, -(-len(waiting) // len(self._workers)))
                    worker.send([(i, samples[i], verdicts[i]) for i in (waiting.popleft() for _ in range(share))])
            awaited = [worker for worker in self._workers if not worker.is_idle]
            earliest = min(worker.deadline for worker in awaited)
            ready = wait([worker.connection for worker in awaited], max(0.0, earliest - time.monotonic()))
            for worker in awaited:
                reason = worker.take(note) if worker.connection in ready else worker.late()
                if reason is not None:
                    failed = (*worker.at_work[0], Failed(reason), worker.running_s()) if worker.at_work else None
                    waiting.extendleft(dict.fromkeys(number for number, _ in reversed(worker.at_work[1:])))
                    worker.kill()
                    self._workers[self._workers.index(worker)] = self._start()
                    if failed:
                        note(*failed)
        return verdicts

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()


def _depth(name: str, rules: dict[str, Rule]) -> int:
    """How many gates stand before a rule: gates are called before what they guard."""
    gate = rules[name].gate
    return 0 if gate is None else 1 + _depth(gate, rules)


class _Worker:
    def __init__(self, rules: dict[str, Rule], timeout_s: float, memory_bytes: int):
        self._rules, self._timeout_s = rules, timeout_s
        self.at_work: list[tuple[int, str]] = []
        """Calls not answered yet, (number of the sample, rule); the first of them is running."""
        self._is_loaded = False
        self.deadline = time.monotonic() + _LOADING_S
        """When the process must have answered (time.monotonic)."""
        self.connection, theirs = Pipe()
        # By plain exec: a fork of a process with a model in it is slow and may deadlock. -P: the current folder hides no package.
        bound = "bound" if threading.current_thread() is threading.main_thread() else "free"
        environment = os.environ | {"PYTHONHASHSEED": "0"}  # a rule that uses hash() must not differ between runs
        command = [sys.executable, "-P", "-m", "grpo_cli.rewards.worker", str(theirs.fileno()), bound]
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], start_new_session=True, stdin=subprocess.DEVNULL, env=environment
        )
        theirs.close()
        self.connection.send((sys.path, memory_bytes, rules))

    @property
    def is_idle(self) -> bool:
        return self._is_loaded and not self.at_work

    def await_loaded(self) -> None:
        """ValueError when it could not load the rules."""
        reason = self.take(lambda *_: None) if self.connection.poll(_LOADING_S) else self.late()
        if reason:
            raise ValueError(f"the process that loads the reward rules {reason}: try a larger reward.memory_gib")

    def send(self, batch: list[tuple[int, Sample, dict[str, Verdict]]]) -> None:
        self.at_work = [(number, name) for number, _, known in batch for name in self._rules if name not in known]
        self._start_clock()
        with suppress(ConnectionError):  # the process is gone, which `take` will find
            self.connection.send(batch)

    def take(self, note: Note) -> str | None:
        """Hand on the verdicts that have arrived; what happened when the process is gone."""
        try:
            while not self.is_idle and self.connection.poll():
                message = self.connection.recv()
                if not self._is_loaded:
                    if message is not None:
                        raise ValueError(message)
                    self._is_loaded = True
                    continue
                number, name, verdict, seconds = message
                assert (number, name) == self.at_work.pop(0)
                self._start_clock()
                note(number, name, verdict, seconds)
        except (EOFError, ConnectionError):
            return self._ending()
        return None

    def late(self) -> str | None:
        """What to say when the running call has passed its limit."""
        if time.monotonic() < self.deadline:
            return None
        return f"took longer than {self._limit_s() if self.at_work else _LOADING_S:g} s"

    def running_s(self) -> float:
        """How long the running call has taken."""
        return time.monotonic() - self.deadline + self._limit_s()

    def kill(self) -> None:
        """The process and what it started."""
        if self._process.returncode is None:  # not waited for, so that its number cannot be another's
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self.connection.close()

    def _limit_s(self) -> float:
        own = self._rules[self.at_work[0][1]].timeout_s
        return self._timeout_s if own is None else own

    def _start_clock(self) -> None:
        if self.at_work:
            self.deadline = time.monotonic() + self._limit_s()

    def _ending(self) -> str:
        """How the process ended; it stays to be waited for, since `kill` needs its number for what it left behind."""
        for _ in range(50):
            ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if ended is not None:
                by_signal = ended.si_code != os.CLD_EXITED
                return f"ended its process ({signal.Signals(ended.si_status).name if by_signal else f'exit status {ended.si_status}'})"
            time.sleep(0.01)
        return "closed its connection"
