"""Small runs of the embedded default, in this process or in one that dies at a chosen point."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

from grpo_cli.cli import TRAIN
from grpo_cli.compose import Composer, convert
from grpo_cli.ledger import MEASURES, PARTS
from grpo_cli.stages import grpo
from grpo_cli.tracking.files import KINDS

SMALL = [
    "steps=9",
    "eval_every=3",
    "save_every=4",
    "sample_every=2",
    "group_size=g4",
    "group_size.completions_per_step=8",
    "rollout.max_new_tokens=24",
    "data.train.limit=20",
    "data.eval.limit=4",
    "evaluation.samples_per_problem=2",
    "evaluation.pass_at=[2]",
    "tracker=none",
    "reward.workers=1",
]


TIMES = ("time/", "speed/", "memory/", "ledger/rollout_s/", "ledger/update_s/")


def config(*overrides: str):
    words = [*SMALL, *overrides]
    with Composer(TRAIN, None, None) as composer:
        return convert(composer.compose(words), words)


def train(folder: Path, *overrides: str) -> dict:
    summary = grpo.run(config(*overrides), folder, list(overrides))
    adds_up(folder, summary)
    return summary


def adds_up(folder: Path, summary: dict) -> None:
    """At every step each completion sampled so far, each of its tokens and each second is in one part of the ledger."""
    groups, past = raw(folder, "groups"), {"dropped": 0, "rollout_s": 0.0, "update_s": 0.0}
    for row in raw(folder, "metrics"):
        ledger = {measure: {part: row[f"ledger/{measure}/{part}"] for part in PARTS} for measure in MEASURES}
        past["dropped"] += row.get("group/dropped_all_right", 0) + row.get("group/dropped_all_wrong", 0)
        lengths = [length for group in groups if group["step"] <= row["step"] for length in group["lengths"]]
        assert ledger["completions"]["filtered"] == past["dropped"] * len(groups[0]["rewards"])
        assert sum(ledger["completions"].values()) == len(lengths) + ledger["completions"]["filtered"]
        assert sum(ledger["tokens"].values()) == sum(lengths) + ledger["tokens"]["filtered"]
        for measure in ("rollout_s", "update_s"):
            past[measure] += row[f"time/{measure}"]
            assert abs(sum(ledger[measure].values()) - past[measure]) < 1e-6
        assert ledger["update_s"]["filtered"] == 0
        if row["step"] == summary["step"]:
            assert summary["ledger"] == {part: {measure: ledger[measure][part] for measure in MEASURES} for part in PARTS}
            assert sum(ledger["tokens"].values()) == summary["tokens"]


def rows(folder: Path, name: str) -> list[dict]:
    """Rows of a file without what no two runs share: times, speed, memory."""
    kept = []
    for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        kept.append({key: value for key, value in row.items() if not key.startswith(TIMES)})
    return kept


def raw(folder: Path, name: str) -> list[dict]:
    """Rows of a file as they stand."""
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def numbers(folder: Path) -> dict[str, list[dict]]:
    return {name: rows(folder, name) for name in KINDS}


def dies(folder: Path, prepare: Callable[[], None], *overrides: str) -> None:
    """Train in a forked process that `prepare` makes kill itself; fails when it lives to the end."""
    child = os.fork()
    if child == 0:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        try:
            prepare()
            train(folder, *overrides)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, "the run was not killed"


def kill_on_call(owner, name: str, call: int, after: bool = False) -> Callable[[], None]:
    """SIGKILL at the call-th call of owner.name, before it or behind it."""

    def prepare() -> None:
        original = getattr(owner, name)
        calls = 0

        def counted(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == call and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = original(*args, **kwargs)
            if calls == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(owner, name, counted)

    return prepare
