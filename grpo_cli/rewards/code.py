"""Rewards for programs: which share of the tests one passes, and how fast it is beside the reference. Knows nothing of how they are run."""

import math
import re
from collections.abc import Mapping
from typing import Any, Literal

from grpo_cli.records import Problem, Sample
from grpo_cli.rewards import sandbox
from grpo_cli.rewards.rules import NOT_APPLICABLE, NotApplicable
from grpo_cli.rewards.sandbox import Limits

_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*([^\s`]*)[^`]*")
_PYTHON_TAGS = {"", "python", "py", "python3"}
_MODES = ("asserts", "stdin", "check")
_GRAIN_S = 0.005
"""Too short a time for a difference to count."""


def program(text: str, bare: bool = False) -> str | None:
    """The last complete fenced block that is tagged python, py, python3 or not at all, after the last </think>; None without one.

    "Here:\n```python\nx = 1\n```" gives "x = 1\n". With `bare`, a text without any fence is the program.
    """
    text = text.rsplit("</think>", 1)[-1]
    found, fence, tag, lines = None, "", "", []
    for line in text.split("\n"):
        match = _FENCE.fullmatch(line)
        if not fence and match:
            fence, tag, lines = match[1], match[2].lower(), []
            indent = re.compile(rf"[ \t]{{0,{match.start(1)}}}")  # a block in a list stands as far in as its fence
        elif fence and match and match[1].startswith(fence) and not match[2]:
            if tag in _PYTHON_TAGS:
                found = "".join(f"{line}\n" for line in lines)
            fence = ""
        else:
            lines.append(indent.sub("", line, count=1) if fence else line)
    return text if bare and found is None and not fence and "```" not in text else found


def code(
    sample: Sample,
    credit: Literal["fraction", "all"] = "fraction",
    timeout_s: float = 10.0,
    total_s: float = 25.0,
    memory_mb: int = 1024,
    allow_unsandboxed: bool = False,
) -> float:
    """The share of the problem's tests that the program in the completion passes; with credit=all, 1.0 for every one and else 0.0.

    Fields of the problem: `mode` asserts, stdin or check; `tests`, assert statements, {"input", "output"} pairs or texts that define
    HumanEval's check(candidate); `entry_point`, what asserts and check call; and if there are any `prompt_code`, the code that the
    completion continues; `setup`, run after the program; `tolerance`, relative, for numbers in the output; `memory_limit_mb`.
    Loading the program and each test take timeout_s at most, all tests total_s; a test that fails or hangs costs its own share.
    "```python\ndef f(x):\n    return 2 * x\n```" and the tests "assert f(1) == 2" and "assert f(2) == 5" give 0.5.
    """
    found = program(sample.text, bare=bool(sample.problem.fields.get("prompt_code")))
    job, limits, sandboxed = _assembled(sample.problem, timeout_s, total_s, memory_mb, allow_unsandboxed)
    if found is None:
        return 0.0
    share = sum(sandbox.run(job | {"program": found}, limits, sandboxed).passed) / len(job["tests"])
    return share if credit == "fraction" else float(share == 1.0)


def code_efficiency(
    sample: Sample,
    repeats: int = 3,
    timeout_s: float = 10.0,
    total_s: float = 25.0,
    memory_mb: int = 1024,
    allow_unsandboxed: bool = False,
) -> float | NotApplicable:
    """t_reference / t for a program that passes all tests, 1.0 when it is no more than a tenth slower; 0.0 for a wrong one.

    t is the wall time that the tests' process waits for loading and all tests, the least of `repeats` turns of program and reference
    (the problem's field `solution`; not applicable without one), and 5 ms: beside a reference of 0.1 s, one of 0.2 s gets 0.56.
    The other fields and limits are those of `code`.
    """
    solution = sample.problem.fields.get("solution")
    if not solution:
        return NOT_APPLICABLE
    found = program(sample.text, bare=bool(sample.problem.fields.get("prompt_code")))
    job, limits, sandboxed = _assembled(sample.problem, timeout_s, total_s, memory_mb, allow_unsandboxed)
    best = {"reference": math.inf, "program": math.inf}
    for _ in range(repeats if found is not None else 0):
        for name, text in (("program", found), ("reference", solution)):
            report = sandbox.run(job | {"program": text}, limits, sandboxed)
            if len(report.passed) < len(job["tests"]) or not all(report.passed):
                if name == "reference":
                    raise ValueError(f"problem {sample.problem.id}: its solution does not pass its tests")
                return 0.0
            best[name] = min(best[name], report.load_s + sum(report.seconds))
    return 0.0 if found is None else min(1.0, 1.1 * (best["reference"] + _GRAIN_S) / (best["program"] + _GRAIN_S))


def prepare(allow_unsandboxed: bool = False, **_: Any) -> None:
    """Find out, while a run is assembled, that the programs can be run here: with a rule's args, raises what the rule would."""
    if not allow_unsandboxed:
        sandbox.probe()


def _assembled(problem: Problem, timeout_s: float, total_s: float, memory_mb: int, allow_unsandboxed: bool) -> tuple[dict, Limits, bool]:
    """What the sandbox is given but for the program, its limits, and whether there is one."""
    prepare(allow_unsandboxed)
    fields = {"prompt_code": "", "entry_point": "", "setup": "", "tolerance": None, "memory_limit_mb": memory_mb, **problem.fields}
    fields["setup"] = fields["setup"] if isinstance(fields["setup"], str) else ""  # a field of that name may be something else
    job: dict[str, Any] = {key: fields.get(key) for key in ("mode", "prompt_code", "entry_point", "setup", "tolerance")}
    tests = fields.get("tests") or ()
    tests = (tests,) if isinstance(tests, str) else tests
    kind = str if job["mode"] in ("asserts", "check") else Mapping
    if job["mode"] not in _MODES or not tests or not all(isinstance(test, kind) for test in tests):
        raise ValueError(
            f"problem {problem.id}: a code reward needs the fields mode ({', '.join(_MODES)}) and tests (for stdin pairs of input and "
            f"output, else texts); mode is {job['mode']!r}, tests {tests!r:.200}"
        )
    if job["mode"] != "stdin" and not job["entry_point"]:
        raise ValueError(f"problem {problem.id}: mode={job['mode']} needs the field entry_point: the name that the tests call")
    job["tests"] = [{"input": test["input"], "output": test["output"]} if kind is Mapping else test for test in tests]
    return job, Limits(timeout_s, total_s, int(fields["memory_limit_mb"])), sandbox.works()


code.prepare = code_efficiency.prepare = prepare
