"""Weights & Biases behind a queue: one thread does all of it, and training never waits for it.

What wandb does not take is counted and reported; the row files have it in any case.
"""

import contextlib
import json
import math
import os
import queue
import secrets
import shlex
import threading
import time
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_cli.tracking.files import read_rows

if TYPE_CHECKING:
    from grpo_cli.config import TrackerSection

QUEUE_ROWS = 5000
INIT_LIMIT_S = 20.0
FINISH_LIMIT_S = 60.0
COLUMNS = ["step", "problem", "prompt", "completion", "answer", "rewards", "total", "tokens", "ended"]


def open_sink(
    run_dir: Path,
    section: "TrackerSection",
    config: dict[str, Any],
    resume_step: int | None,
    wandb_id: str | None,
    group: str | None,
    name: str,
) -> tuple["WandbSink | None", str, str]:
    """The sink, or None where wandb is off or broken, and what to tell the user: ("note" or "warn", text)."""
    mode, why = section.mode.name, f"tracker.mode={section.mode.name}"
    if mode == "auto" and os.environ.get("WANDB_MODE"):
        why = f"WANDB_MODE={os.environ['WANDB_MODE']}"
        mode = {"dryrun": "offline", "run": "online"}.get(os.environ["WANDB_MODE"], os.environ["WANDB_MODE"])
    if section.name.name == "none":
        return None, "note", ""
    if mode == "disabled":
        return None, "note", f"wandb: off ({why})"
    say = "note"
    # wandb's reports about itself go over the network, and delay the exit where there is none.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    try:
        # In this thread: two threads that import at once can meet half-made modules.
        import wandb  # noqa: F401

        if mode != "offline":
            has, found = _credentials()
            if not has:
                # Explicitly online without a key: wandb would stop and ask.
                say = "warn" if mode == "online" else "note"
                mode, why = "offline", found
    except Exception as error:
        return None, "warn", f"wandb: off, it cannot be used ({type(error).__name__}: {error}); the run folder has everything"
    sink = WandbSink(run_dir, section, "offline" if mode == "offline" else "online", config, resume_step, wandb_id, group, name)
    if mode != "offline":
        return sink, say, f"wandb: online, project {section.entity + '/' if section.entity else ''}{section.project}, run {name}"
    return sink, say, f"wandb: offline ({why}); {_how_to_view(run_dir)}"


def _how_to_view(run_dir: Path) -> str:
    folder = run_dir / "wandb"
    if folder.is_absolute() and folder.is_relative_to(Path.cwd()):
        folder = folder.relative_to(Path.cwd())
    folder = shlex.quote(str(folder))
    return f"view: wandb leet {folder}   upload: wandb sync {folder}/offline-run-*"


def _credentials() -> tuple[bool, str]:
    """Whether wandb would find a key (environment, netrc, its settings), looked up as wandb does it but without prompt or network."""
    import wandb
    from wandb.sdk.lib import wbauth

    settings = wandb.setup(settings=wandb.Settings(silent=True)).settings
    try:
        auth = wbauth.authenticate_session(host=settings.base_url, source="grpo-train", prompt=False, update_session=False)
    except Exception as error:  # a key of the wrong form
        return False, f"the credentials found cannot be used: {error}"
    return auth is not None, "no credentials found: `wandb login` sets them"


class WandbSink:
    """One wandb run, fed through a bounded queue."""

    def __init__(
        self,
        run_dir: Path,
        section: "TrackerSection",
        mode: str,
        config: dict[str, Any],
        resume_step: int | None,
        wandb_id: str | None,
        group: str | None,
        name: str,
    ):
        self.id = wandb_id or secrets.token_hex(4)
        self._run_dir, self._mode, self._resume_step = run_dir, mode, resume_step
        self._init = {
            "id": self.id,
            "entity": section.entity,
            "project": section.project,
            "group": group,
            "name": name,
            "job_type": "train",
            "tags": list(section.tags),
            "dir": str(run_dir),
            "config": json.loads(json.dumps(config, default=lambda value: value.name if isinstance(value, Enum) else str(value))),
            "resume": "allow",
            "reinit": "create_new",
        }
        self._high_water_file = run_dir / "wandb" / "high_water.json"
        self._high_water = self._read_high_water()
        self._queue: queue.Queue = queue.Queue(QUEUE_ROWS)
        self._messages: queue.SimpleQueue = queue.SimpleQueue()
        self._lost, self._lost_lock = 0, threading.Lock()
        self._thread = threading.Thread(target=self._work, name="wandb-sink", daemon=True)
        self._thread.start()

    def train(self, step: int, metrics: dict[str, float], groups: list[dict[str, Any]]) -> None:
        self._put("train", step, _train_row(metrics, groups))

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        self._put("eval", step, dict(metrics))

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        self._put("samples", step, list(rows))

    def messages(self) -> Iterator[tuple[str, str]]:
        """What the thread has to say since the last call: ("note" or "warn", text)."""
        while not self._messages.empty():
            yield self._messages.get()

    def finish(self, exit_code: int) -> None:
        """Log what is queued and close the run, within FINISH_LIMIT_S. Ctrl-C ends the wait."""
        deadline = time.monotonic() + FINISH_LIMIT_S
        with contextlib.suppress(queue.Full, KeyboardInterrupt):
            self._queue.put(("finish", exit_code, None), timeout=FINISH_LIMIT_S)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._messages.put(
                ("warn", f"wandb did not finish in {FINISH_LIMIT_S:.0f} s and is left behind; {_how_to_view(self._run_dir)}")
            )
            restart = threading.Thread(target=_restart_wandb, daemon=True)
            restart.start()
            restart.join(5)
        self._lost += sum(row[0] != "finish" for row in list(self._queue.queue))
        if self._lost:
            self._messages.put(("warn", f"wandb missed {self._lost} row(s) of this run; the run folder has them all"))

    def _put(self, kind: str, step: int, payload: Any) -> None:
        try:
            self._queue.put_nowait((kind, step, payload))
        except queue.Full:
            self._lose(f"it is {QUEUE_ROWS} rows behind")

    def _lose(self, why: str) -> None:
        with self._lost_lock:
            self._lost += 1
            first = self._lost == 1
        if first:
            self._messages.put(("warn", f"wandb did not take a row ({why}); training goes on, the run folder has every row"))

    # From here on: in the thread.

    def _work(self) -> None:
        run = self._start()
        table = None
        if run:
            import wandb

            with contextlib.suppress(Exception):
                table = wandb.Table(columns=COLUMNS, log_mode="INCREMENTAL")
            with contextlib.suppress(OSError):
                for kind, step, payload in self._backlog():
                    self._log(run, table, kind, step, payload)
        while True:
            kind, step, payload = self._queue.get()
            if kind == "finish":
                break
            if run:
                self._log(run, table, kind, step, payload)
            else:
                self._lose("wandb did not start")
        if run:
            try:
                run.finish(exit_code=step)
            except Exception as error:
                self._messages.put(("warn", f"wandb did not close its run ({type(error).__name__}: {error})"))

    def _start(self) -> Any:
        """The run; offline when online fails; None when that fails too."""
        import wandb

        for mode in dict.fromkeys([self._mode, "offline"]):
            settings = wandb.Settings(
                silent=True,
                console="off",
                save_code=False,
                disable_code=True,
                disable_git=True,
                init_timeout=INIT_LIMIT_S,
                finish_timeout=FINISH_LIMIT_S * 0.8,
            )
            try:
                run = wandb.init(mode=mode, settings=settings, **self._init)
                # wandb's own counter moves with every call, so train and eval rows of a step share this field instead.
                run.define_metric("step")
                run.define_metric("*", step_metric="step")
                if mode == "online":
                    self._messages.put(("note", f"wandb: {run.url}"))
                elif mode != self._mode:
                    self._messages.put(("note", f"wandb: offline instead; {_how_to_view(self._run_dir)}"))
                return run
            except Exception as error:
                self._messages.put(("warn", f"wandb did not start {mode} ({type(error).__name__}: {error})"))
                _restart_wandb()  # its helper process keeps the id of a run that did not start
        return None

    def _backlog(self) -> list[tuple[str, int, Any]]:
        """Rows of before a resume that wandb has not had: the process was killed while they were queued."""
        if self._resume_step is None:
            return []
        read = {kind: read_rows(self._run_dir / f"{kind}.jsonl", self._resume_step) for kind in ("metrics", "groups", "samples", "eval")}
        groups, samples = ({row["step"]: [] for row in read[kind]} for kind in ("groups", "samples"))
        for row in read["groups"]:
            groups[row["step"]].append(row)
        for row in read["samples"]:
            samples[row["step"]].append(row)
        rows = [("train", row["step"], _train_row(row, groups.get(row["step"], []))) for row in read["metrics"]]
        rows += [("eval", row["step"], row) for row in read["eval"]]
        rows += [("samples", step, of_step) for step, of_step in samples.items()]
        return sorted(rows, key=lambda row: row[1])

    def _log(self, run: Any, table: Any, kind: str, step: int, payload: Any) -> None:
        import wandb

        if step <= self._high_water.get(kind, -1):
            return
        try:
            if kind == "samples":
                for row in payload:
                    rewards = ", ".join(f"{rule} {_text(value)}" for rule, value in row["rewards"].items())
                    table.add_data(*({**row, "rewards": rewards}.get(column) for column in COLUMNS))
                row = {"samples": table}
            else:
                measured = {name: value for name, value in payload.items() if value is not None}
                row = {name: wandb.Histogram(value) if isinstance(value, list) else value for name, value in measured.items()}
            run.log({**row, "step": step})
        except Exception as error:
            self._lose(f"{type(error).__name__}: {error}")
            return
        self._high_water[kind] = step
        with contextlib.suppress(OSError):
            temporary = self._high_water_file.with_suffix(".tmp")
            temporary.write_text(json.dumps({"id": self.id, **self._high_water}))
            os.replace(temporary, self._high_water_file)

    def _read_high_water(self) -> dict[str, int]:
        """The last step of each kind that wandb has of this run: a resumed run repeats steps that were logged before the kill."""
        try:
            saved = json.loads(self._high_water_file.read_text())
            return saved if saved.pop("id") == self.id else {}
        except (OSError, ValueError, KeyError):
            return {}


def _train_row(metrics: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    stds, kls = ([group[key] for group in groups if group[key] is not None and math.isfinite(group[key])] for key in ("reward_std", "kl"))
    return {**metrics, "reward/group_std_hist": stds or None, "kl/group_hist": kls or None}


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) else "-"


def _restart_wandb() -> None:
    """End wandb's helper process, so that neither the next run nor the exit of the program waits for it. Its files can be synced."""
    with contextlib.suppress(Exception):
        from wandb.sdk import wandb_setup

        wandb_setup.singleton()._connection._proc._process.kill()
    with contextlib.suppress(Exception, SystemExit):  # it exits when its helper ended otherwise than well
        import wandb

        wandb.teardown()
