"""hydra/launcher=isolated, with jobs that train nothing, and one sweep of real runs. Every job is a process."""

import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import fake_jobs
import pytest
from hydra.core.utils import JobStatus
from hydra.types import HydraContext, RunMode
from runs import SMALL, config, numbers, train

from grpo_cli import cli, launcher, runfolder
from grpo_cli.compose import Composer
from grpo_cli.tracking import jobs

GRPO_TRAIN = Path(sys.executable).parent / "grpo-train"


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """Runs fake jobs with these overrides in tmp_path/0, 1, ... and returns what Hydra's sweeper gets."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))

    def launch(*job_overrides: str, **section):
        with Composer(cli.TRAIN, None, None) as composer:
            words = [f"hydra.sweep.dir={tmp_path}", "hydra/launcher=isolated"]
            composed = composer.hydra.compose_config("grpo", words, run_mode=RunMode.MULTIRUN)
            isolated = launcher.IsolatedLauncher(**section)
            isolated.setup(hydra_context=HydraContext(composer.loader, None), task_function=fake_jobs.job, config=composed)
            return isolated.launch([overrides.split() for overrides in job_overrides], 0)

    return launch


def seen(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "seen.jsonl").read_text().splitlines()]


def wait_for(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def as_soon_as(condition, action) -> threading.Thread:
    def wait_and_act():
        wait_for(condition)
        action()

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    return thread


def at_work(folder: Path) -> bool:
    return (folder / "job.log").exists() and "at work" in (folder / "job.log").read_text()


# --- slots -------------------------------------------------------------------------------------------------------------


def test_two_jobs_never_share_a_gpu_and_a_free_one_is_taken_again(sweep, tmp_path):
    sweep("steps=12", "steps=2", "steps=1", "steps=4", "steps=3", gpus=[3, 5])
    work = [seen(tmp_path / str(n))[0] for n in range(5)]
    assert {job["gpu"] for job in work} == {"3", "5"}
    for gpu in "35":
        mine = sorted((job for job in work if job["gpu"] == gpu), key=lambda job: job["begin"])
        assert all(one["end"] <= other["begin"] for one, other in itertools.pairwise(mine))
    assert all(job["stdin"] == "" for job in work)


def run(threads=1, device="auto"):
    """What slots() reads of a config."""
    return SimpleNamespace(threads=threads, device=device)


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"gpus": [3, 5, 6], "gpus_per_job": 2}, ["3,5"]),
        ({"gpus": [3, 5, 6], "jobs_at_once": 2}, ["3", "5"]),
        ({"gpus": "none", "jobs_at_once": 3}, [""] * 3),
        ({"gpus": "none"}, [""] * 2),
        ({}, ["1", "GPU-a"]),
    ],
    ids=str,
)
def test_slots_follow_the_section_and_the_machine(monkeypatch, section, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(5)), raising=False)  # 5 cores: two jobs of two threads
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,GPU-a")
    assert launcher.slots(launcher.Isolated(**section), [run(threads=2), run(threads=1)]) == expected


def test_without_gpus_or_a_job_that_wants_one_auto_leaves_the_variable_alone(monkeypatch):
    cpu, any_device = run(device="cpu", threads=99), run()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert launcher.slots(launcher.Isolated(), [cpu]) == [None]
    assert launcher.slots(launcher.Isolated(), [cpu, any_device]) == ["1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert launcher.slots(launcher.Isolated(jobs_at_once=1), [any_device]) == [None]


def test_the_gpus_of_a_machine_are_those_that_nvidia_smi_lists(monkeypatch, tmp_path):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: H200 (UUID: GPU-a)'\necho 'GPU 1: H200 (UUID: GPU-b)'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert launcher.visible_gpus() == ["0", "1"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("gpus=[3,3]", "hydra.launcher.gpus=[3, 3] names a GPU twice"),
        ("gpus=[]", "hydra.launcher.gpus=[] is no list of device ids: try 'hydra.launcher.gpus=[0,1]'"),
        ("gpus=3", "hydra.launcher.gpus=3 is no list of device ids"),
        ("gpus=[a:b]", "is no list of device ids"),
        ("gpus=[0,1] hydra.launcher.gpus_per_job=3", "gpus_per_job=3 is more than the 2 GPUs there are: try gpus_per_job=2"),
        ("gpus=none hydra.launcher.gpus_per_job=2", "hydra.launcher.gpus_per_job=2, and there are no GPUs to hand out"),
        ("gpus_per_job=0", "hydra.launcher.gpus_per_job must be 1 or above, not 0"),
        ("jobs_at_once=0", "hydra.launcher.jobs_at_once must be 1 or above, not 0: leave it out, or try hydra.launcher.jobs_at_once=1"),
        ("jobs_at_once=two", "hydra.launcher.jobs_at_once=two: Value 'two'"),
        ("gpu=1", "hydra.launcher.gpu is unknown"),
    ],
)
def test_a_wrong_section_is_refused_before_anything_exists(tmp_path, monkeypatch, capsys, given, words):
    monkeypatch.chdir(tmp_path)
    argv = ["-m", "hydra/launcher=isolated", *f"hydra.launcher.{given}".split(), "seed=1,2"]
    assert cli._guarded(cli._hydra_command, cli.TRAIN, argv) == 1
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# --- ends --------------------------------------------------------------------------------------------------------------


def test_however_a_job_dies_it_is_recorded_and_the_others_finish(sweep, tmp_path, capsys):
    names = ["abort", "killed", "exit", "raise", "well"]
    results = sweep(*(f"steps=1 tracker.run_name={name}" for name in names), jobs_at_once=2)
    found = [runfolder.summary(tmp_path / str(n)) for n in range(5)]
    assert [summary["status"] for summary in found] == ["failed"] * 4 + ["finished"]
    assert [summary["reason"] for summary in found[:4]] == [
        "killed by SIGABRT",
        "killed by SIGKILL (out of memory?)",
        "exited with status 0 before its end",
        "ZeroDivisionError: this reward raises",
    ]
    assert all("at work" in summary["log_end"] for summary in found[:4])
    assert found[3]["log_end"][-1] == "ZeroDivisionError: this reward raises" and "log_end" not in found[4]
    assert [result.status for result in results] == [JobStatus.COMPLETED] * 5
    assert [result.return_value for result in results] == [None] * 4 + [0.75]
    shown = capsys.readouterr().out
    assert shown.count(": started") == 5 and f"its log is {tmp_path}/1/job.log" in shown
    assert "job 1 (steps=1,tracker.run_name=killed): failed: killed by SIGKILL (out of memory?)\n" in shown
    assert "failed (killed by SIGABRT)" in jobs.table(tmp_path, [(tmp_path / "0", "")])


def test_repeating_runs_what_is_unfinished_and_forgets_the_old_failure(sweep, tmp_path, monkeypatch, capsys):
    sweep("steps=1", "steps=2 tracker.run_name=killed")
    file = tmp_path / "1/config.yaml"
    file.write_text(file.read_text().replace("killed", "well"))
    sweep("steps=1", "steps=2 tracker.run_name=well")
    assert len(seen(tmp_path / "0")) == len(seen(tmp_path / "1")) == 1
    assert f"job 0 (steps=1): finished already in {tmp_path}/0, skipped" in capsys.readouterr().out
    assert "log_end" not in runfolder.summary(tmp_path / "1")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_running_jobs_once_and_no_more_start(sweep, tmp_path, capsys, number):
    thread = as_soon_as(lambda: at_work(tmp_path / "0"), lambda: os.kill(os.getpid(), number))
    with pytest.raises(KeyboardInterrupt):
        sweep("steps=600", "steps=600", jobs_at_once=1)
    thread.join()
    summary = runfolder.summary(tmp_path / "0")
    assert (summary["status"], summary["reason"]) == ("interrupted", signal.Signals(number).name)
    assert not (tmp_path / "1").exists()
    assert f"{signal.Signals(number).name}: the running jobs save and stop" in capsys.readouterr().out


def test_a_second_signal_ends_the_jobs_at_once(sweep, tmp_path):
    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    thread = as_soon_as(lambda: at_work(tmp_path / "0"), twice)
    with pytest.raises(KeyboardInterrupt):
        sweep("steps=600 tracker.run_name=stubborn")
    thread.join()
    assert runfolder.summary(tmp_path / "0")["reason"] == "SIGKILL" and not runfolder.in_use(tmp_path / "0")


def test_a_folder_that_another_command_keeps_fails_the_job_and_leaves_the_summary_alone(sweep, tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "ORPHAN_S", -5)
    with runfolder.RunFolder(tmp_path / "0", config("steps=1"), [], resume=False):
        sweep("steps=1", "steps=1")
        assert runfolder.summary(tmp_path / "0")["status"] == "running"
    assert runfolder.summary(tmp_path / "1")["status"] == "finished"


@pytest.mark.parametrize(("recipe", "count"), [("beta_g", 18), ("algorithms", 27), ("control", 12)])
def test_a_sweep_recipe_is_a_sweep_of_so_many_jobs_on_this_launcher(recipe, count):
    with Composer(cli.TRAIN, recipe, Path(__file__).parents[1] / "recipes/sweeps") as composer:
        jobs_of = composer.jobs([])[1]
        cfg = composer.compose(jobs_of[-1])
    assert len(set(map(tuple, jobs_of))) == count
    assert (cfg.hydra.mode, cfg.hydra.launcher._target_) == (RunMode.MULTIRUN, launcher.Isolated._target_)


# --- real runs ---------------------------------------------------------------------------------------------------------


def test_a_sweep_killed_with_its_launcher_is_completed_by_repetition_with_the_rows_of_a_job_alone(tmp_path):
    words = [*SMALL, "hydra/launcher=isolated", "hydra.sweep.dir=s", "kl.beta=0,0.4"]
    train(tmp_path / "s/0", "kl.beta=0")  # this job is done
    done = (tmp_path / "s/0/summary.json").read_text()
    command = subprocess.Popen([GRPO_TRAIN, "-m", *words], cwd=tmp_path, start_new_session=True, stdout=subprocess.DEVNULL)
    metrics = tmp_path / "s/1/metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, 200)
    os.killpg(command.pid, signal.SIGKILL)
    command.wait()
    again = subprocess.run([GRPO_TRAIN, "-m", *words], cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert "job 0 (kl.beta=0): finished already in s/0, skipped" in again.stdout
    assert (tmp_path / "s/0/summary.json").read_text() == done and not (tmp_path / "s/0/job.log").exists()
    assert "the launcher is gone: this job saves and stops" in (tmp_path / "s/1/job.log").read_text()
    train(tmp_path / "alone", "kl.beta=0.4")
    assert numbers(tmp_path / "s/1") == numbers(tmp_path / "alone")


@pytest.mark.skipif(not importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher"), reason="needs the extra slurm")
def test_submitit_runs_the_same_job_into_the_same_folder(tmp_path):
    words = [*SMALL, "steps=1", "hydra/launcher=submitit_local", "hydra.sweep.dir=s", "seed=1"]
    ended = subprocess.run([GRPO_TRAIN, "-m", *words], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert runfolder.summary(tmp_path / "s/0")["status"] == "finished"
    assert len(numbers(tmp_path / "s/0")["metrics"]) == 1 and "finished  0.12 -> " in ended.stdout
