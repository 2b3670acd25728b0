import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.cells import cell_len
from rich.console import Console

from grpo_cli.tracking import console, sweep


@pytest.fixture
def draw(monkeypatch):
    def draw(jobs, height=24):
        terminal = Console(file=io.StringIO(), force_terminal=True, width=80, height=height, color_system=None)
        monkeypatch.setattr(console, "quiet_console", lambda: terminal)
        view = sweep.LiveJobs(jobs)
        with terminal.capture() as capture:
            terminal.print(view._table())
        view.close()
        return capture.get().splitlines()

    return draw


def job(number: int, state: str, folder: Path = Path("nowhere"), label: str = "kl.beta=0 seed=1"):
    return SimpleNamespace(number=number, label=label, state=state, folder=folder, run=SimpleNamespace(steps=20))


def test_the_table_shows_step_reward_accuracy_and_time_left(draw, tmp_path):
    row = {"step": 10, "reward/mean": 0.625, "time/step_s": 60.0}
    (tmp_path / "metrics.jsonl").write_text('{"step": 9}\n' + json.dumps(row) + '\n{"step": 11, "rew')
    evaluation = {"first": {"eval/accuracy": 0.25}, "last": {"eval/accuracy": 0.5}}
    (tmp_path / "summary.json").write_text(json.dumps({"evaluation": evaluation}))
    heading, running, waiting, caption = draw([job(0, "running", tmp_path), job(1, "waiting")])
    assert heading.split() == ["job", "overrides", "state", "step", "reward", "accuracy", "ETA"]
    # 10 of 20 steps at 60 s each are left
    assert " ".join(running.split()) == "0 kl.beta=0 seed=1 running 10/20 0.625 0.25 -> 0.50 10:00"
    assert " ".join(waiting.split()) == "1 kl.beta=0 seed=1 waiting"
    assert caption.strip() == "1 running, 1 waiting"


def test_a_small_terminal_shows_running_and_failed_jobs_first(draw):
    states = ["finished"] * 20 + ["running", "failed"] + ["waiting"] * 20
    lines = draw([job(number, state, label="model.lora.rank=4 " * 9) for number, state in enumerate(states)], height=10)
    assert len(lines) <= 9 and max(map(cell_len, lines)) <= 80
    assert [line.split()[0] for line in lines[1:3]] == ["20", "21"]
    assert lines[-1].strip() == "1 running, 1 failed, 20 waiting, 20 finished"
