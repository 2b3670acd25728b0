"""hydra/launcher=isolated: every job of a sweep in a process of its own, as many at once as there are slots.

A slot is what CUDA_VISIBLE_DEVICES says in a job. Knows nothing of training and imports no torch: a job is a task function and its
config, and all that is known of how it fares stands in its run folder.
"""

import contextlib
import importlib
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from inspect import unwrap
from pathlib import Path
from typing import Any, Optional

from hydra._internal.callbacks import Callbacks
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobRuntime, JobStatus, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig, open_dict

from grpo_cli import runfolder
from grpo_cli.compose import convert
from grpo_cli.config import GrpoRun, SftRun
from grpo_cli.runtime import Interrupts

POLL_S = 0.1
ORPHAN_S = 60
"""Seconds that a job gets to save and stop when the launcher is gone."""
INTERRUPTED = 130
LOG_LINES = 20


@dataclass
class Isolated:
    _target_: str = "grpo_cli.launcher.IsolatedLauncher"
    gpus: Any = "auto"
    """CUDA device ids to hand out, such as [3,5]; auto: all that this machine or CUDA_VISIBLE_DEVICES has; none: the jobs see no GPU."""
    gpus_per_job: int = 1
    jobs_at_once: Optional[int] = None
    """None: one for each slot of GPUs, without GPUs one for each `threads` cores."""


ConfigStore.instance().store(group="hydra/launcher", name="isolated", node=Isolated, provider="grpo-cli")


def slots(section: Isolated, runs: list[GrpoRun | SftRun]) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each job that may run at once; None leaves the variable alone. ValueError names the key to mend."""
    for key in ("gpus_per_job", "jobs_at_once"):
        if (value := getattr(section, key)) is not None and value < 1:
            raise ValueError(f"hydra.launcher.{key} must be 1 or above, not {value}: leave it out, or try hydra.launcher.{key}=1")
    gpus, size, hidden = section.gpus, section.gpus_per_job, None
    if gpus == "auto":
        gpus = [] if all(run.device == "cpu" for run in runs) else visible_gpus()
    elif gpus in ("none", None):
        gpus, hidden = [], ""
    elif isinstance(gpus, (str, int, float)) or not gpus or not all(re.fullmatch(r"[\w/-]+", str(gpu)) for gpu in gpus):
        raise ValueError(f"hydra.launcher.gpus={gpus} is no list of device ids: try 'hydra.launcher.gpus=[0,1]', or auto, or none")
    if len(set(map(str, gpus))) < len(gpus):
        raise ValueError(f"hydra.launcher.gpus={list(gpus)} names a GPU twice: two jobs would share it: name each once")
    if not gpus:
        if size > 1:
            raise ValueError(f"hydra.launcher.gpus_per_job={size}, and there are no GPUs to hand out: leave it out")
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return [hidden] * (section.jobs_at_once or max(1, cores // max(run.threads for run in runs)))
    if size > len(gpus):
        raise ValueError(f"hydra.launcher.gpus_per_job={size} is more than the {len(gpus)} GPUs there are: try gpus_per_job={len(gpus)}")
    sets = [",".join(map(str, gpus[start : start + size])) for start in range(0, len(gpus) - size + 1, size)]
    return sets[: section.jobs_at_once]


def visible_gpus() -> list[str]:
    """The ids in CUDA_VISIBLE_DEVICES when it is set, else those that nvidia-smi knows."""
    if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [gpu.strip() for gpu in given.split(",") if gpu.strip() not in ("", "-1", "NoDevFiles")]
    if not shutil.which("nvidia-smi"):
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout
    return re.findall(r"^GPU (\d+):", listed, re.MULTILINE)


@dataclass
class Job:
    number: int
    label: str
    """The overrides in which it differs from the other jobs."""
    folder: Path
    run: GrpoRun | SftRun
    config: DictConfig
    state: str = "waiting"
    reason: str = ""
    slot: str | None = None
    process: subprocess.Popen | None = None
    log_start: int = 0

    @property
    def log(self) -> Path:
        return self.folder / "job.log"


class IsolatedLauncher(Launcher):
    def __init__(self, **section: Any):
        self.section = Isolated(**section)

    def setup(self, *, hydra_context: HydraContext, task_function: Any, config: DictConfig) -> None:
        self.loader, self.task, self.config = hydra_context.config_loader, unwrap(task_function), config

    def launch(self, job_overrides: list[list[str]], initial_job_idx: int) -> list[JobReturn]:
        """Run the jobs. KeyboardInterrupt when a signal came: the running jobs were told, and have stopped."""
        setup_globals()
        jobs = [self._job(number, list(overrides)) for number, overrides in enumerate(job_overrides, initial_job_idx)]
        free = deque(slots(self.section, [job.run for job in jobs]))
        view = importlib.import_module("grpo_cli.tracking.sweep").open_view(jobs)
        with Interrupts() as interrupts, contextlib.closing(view):
            _let_go([job.folder for job in jobs], view, interrupts)
            self._work(deque(jobs), free, view, interrupts)
        if interrupts.received:
            raise KeyboardInterrupt
        # A failure is told and recorded already; raised out of a JobReturn it would end a sweep of several batches.
        return [
            JobReturn(overrides, job.config, _return_value=runfolder.objective(job.folder), status=JobStatus.COMPLETED)
            for overrides, job in zip(job_overrides, jobs, strict=True)
        ]

    def _job(self, number: int, overrides: list[str]) -> Job:
        config = self.loader.load_sweep_config(self.config, overrides)
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = number
        HydraConfig.instance().set_config(config)
        node = HydraConfig.get()
        return Job(number, node.job.override_dirname, Path(node.sweep.dir) / str(node.sweep.subdir), convert(config, overrides), config)

    def _work(self, waiting: deque[Job], free: deque[str | None], view: Any, interrupts: Interrupts) -> None:
        running, told = [], False
        try:
            while running or (waiting and not interrupts.received):
                while waiting and free and not interrupts.received:
                    job = waiting.popleft()
                    if runfolder.is_done(job.folder, job.run):
                        job.state = "skipped"
                        view.event(job, f"finished already in {job.folder}, skipped")
                        continue
                    job.slot = free.popleft()
                    try:
                        self._start(job)
                    except OSError as error:
                        job.state, job.reason = "failed", runfolder.reason(error)
                        free.append(job.slot)
                        view.event(job, f"cannot start: {job.reason}")
                        continue
                    running.append(job)
                    view.event(job, f"started{f' on GPU {job.slot}' if job.slot else ''}, its log is {job.log}")
                if interrupts.received and not told:
                    told = True
                    view.say(f"{interrupts.received}: the running jobs save and stop; a second Ctrl-C ends them at once")
                    for job in running:
                        job.process.send_signal(signal.Signals[interrupts.received])
                for job in [job for job in running if job.process.poll() is not None]:
                    running.remove(job)
                    free.append(job.slot)
                    _end(job, interrupts.received)
                    view.event(job, f"{job.state}{f': {job.reason}' if job.reason else ''}")
                view.refresh()
                time.sleep(POLL_S)
        finally:
            for job in running:
                job.process.kill()
                job.process.wait()
                _end(job, "SIGKILL")

    def _start(self, job: Job) -> None:
        job.folder.mkdir(parents=True, exist_ok=True)
        environment = os.environ | ({} if job.slot is None else {"CUDA_VISIBLE_DEVICES": job.slot})
        command = [sys.executable, "-P", "-X", "faulthandler", "-c", "from grpo_cli.launcher import child; child()"]
        with open(job.log, "ab") as log:
            job.log_start = log.tell()
            # A group of its own, or a Ctrl-C at the terminal would reach the job twice: from there and from here.
            job.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=environment, process_group=0
            )
        job.state = "running"
        with contextlib.suppress(BrokenPipeError):
            job.process.stdin.write(pickle.dumps((self.task, job.config)))
            job.process.stdin.flush()


def _let_go(folders: list[Path], view: Any, interrupts: Interrupts) -> None:
    """Wait for jobs of an earlier command that was killed: they save and stop. Who holds a folder longer keeps it, and the job fails."""
    deadline, said = time.monotonic() + ORPHAN_S + 5, False
    while (held := [folder for folder in folders if runfolder.in_use(folder)]) and time.monotonic() < deadline and not interrupts.received:
        if not said:
            view.say(f"waiting for {', '.join(map(str, held))}: still in use by an earlier command")
        said = True
        time.sleep(POLL_S)


def _end(job: Job, interrupted: str | None) -> None:
    """How the job ended, by its exit status and its folder; what it could not write there itself is written now."""
    job.process.stdin.close()
    code, found = job.process.returncode, runfolder.summary(job.folder)
    job.state, job.reason = found.get("status", ""), found.get("reason") or ""
    if (code == 0 and job.state in runfolder.DONE) or (code == INTERRUPTED and job.state == "interrupted"):
        return
    with open(job.log, "rb") as log:
        log.seek(max(job.log_start, log.seek(0, os.SEEK_END) - 10_000))
        end = log.read().decode(errors="replace").splitlines()[-LOG_LINES:]
    told = code == 1 and job.state == "failed"
    if interrupted and code != 1:
        status, reason = "interrupted", interrupted
    elif code < 0:
        names = {number.value: number.name for number in signal.Signals}
        status, reason = "failed", f"killed by {names.get(-code, -code)}{' (out of memory?)' if code == -signal.SIGKILL else ''}"
    else:
        status, reason = "failed", job.reason if told else f"exited with status {code} before its end"
    job.state, job.reason = status, reason
    if runfolder.in_use(job.folder):  # by another command, whose summary it is
        job.reason = end[-1] if end else "its folder is in use"
    elif status == "failed" or found:
        with contextlib.suppress(OSError):
            runfolder.write_json(job.folder / "summary.json", {**found, "status": status, "reason": reason, "log_end": end})


def child() -> None:
    """The process of one job: task function and config come through stdin, whose end means that the launcher is gone."""
    task, config = pickle.load(sys.stdin.buffer)
    launcher = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    threading.Thread(target=_stop_with, args=(launcher,), daemon=True).start()
    setup_globals()
    JobRuntime.instance().set("name", config.hydra.job.name)
    try:
        context = HydraContext(config_loader=None, callbacks=Callbacks(config))
        ended = run_job(task, config, "hydra.sweep.dir", "hydra.sweep.subdir", context)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    sys.exit(0 if ended.return_value else 1)


def _stop_with(launcher: int) -> None:
    os.read(launcher, 1)
    print("the launcher is gone: this job saves and stops", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_S)
    os.kill(os.getpid(), signal.SIGKILL)


def register() -> None:
    """Make the launcher known to Hydra, which on its own takes none from outside the package hydra_plugins."""
    plugins, name = Plugins.instance(), Isolated._target_
    plugins.register(IsolatedLauncher)
    plugins.is_in_toplevel_plugins_module = lambda wanted: wanted == name or Plugins.is_in_toplevel_plugins_module(wanted)
