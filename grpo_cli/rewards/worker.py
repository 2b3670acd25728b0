"""The process that calls rules: it reads samples from a connection and answers with one verdict per call. Imports no torch."""

import ctypes
import os
import resource
import signal
import sys
import time
from multiprocessing.connection import Connection

_PR_SET_PDEATHSIG = 1


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    if sys.platform == "linux" and sys.argv[2] == "bound":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a hanging rule must not outlive a killed run
    try:
        sys.path[:], memory_bytes, rules = connection.recv()
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        from grpo_cli.rewards.calling import judge, load_rules

        try:
            loaded = load_rules(rules)
        except (ValueError, OSError) as error:
            connection.send(str(error))
            return
        connection.send(None)
        while True:
            for index, sample, known in connection.recv():
                started = time.perf_counter()
                for name, verdict in judge(loaded, sample, known):
                    now = time.perf_counter()
                    connection.send((index, name, verdict, now - started))
                    started = now
    except (EOFError, ConnectionError):
        return  # the run has ended


if __name__ == "__main__":
    main()
