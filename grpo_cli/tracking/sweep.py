"""What a sweep on the isolated launcher shows: a live table of its jobs on a terminal, a plain line per event elsewhere."""

import contextlib
import time
from collections import Counter
from typing import TYPE_CHECKING

from grpo_cli.tracking import console, jobs
from grpo_cli.tracking.files import last_row

if TYPE_CHECKING:
    from rich.table import Table

    from grpo_cli.launcher import Job

REFRESH_S = 0.5
ORDER = ("running", "failed", "interrupted", "waiting", "finished", "stopped", "skipped")
"""Where not all jobs fit, these come first."""


def open_view(sweep: "list[Job]") -> "LiveJobs | PlainJobs":
    if console.on_terminal():
        with contextlib.suppress(Exception):
            return LiveJobs(sweep)
    return PlainJobs()


class PlainJobs:
    def event(self, job: "Job", text: str) -> None:
        self.say(f"job {job.number} ({job.label}): {text}")

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            print(text, flush=True)

    def refresh(self) -> None:
        pass

    def close(self) -> None:
        pass


class LiveJobs:
    """A row per job, read from its folder; it goes when the sweep ends, and the table of all jobs takes its place."""

    def __init__(self, sweep: "list[Job]"):
        from rich.live import Live

        self._sweep, self._paces, self._drawn = sweep, {job.number: console.Pace(job.run.steps) for job in sweep}, 0.0
        self._live = Live(console=console.quiet_console(), auto_refresh=False, transient=True)
        self._live.start()

    def event(self, job: "Job", text: str) -> None:
        if job.state == "failed":
            self.say(f"job {job.number} ({job.label}): {text}")

    def say(self, text: str) -> None:
        with contextlib.suppress(Exception):
            self._live.console.print(text, markup=False, soft_wrap=True)

    def refresh(self) -> None:
        if time.monotonic() - self._drawn >= REFRESH_S:
            self._drawn = time.monotonic()
            with contextlib.suppress(Exception):  # a terminal that fails stops no job
                self._live.update(self._table(), refresh=True)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._live.stop()

    def _table(self) -> "Table":
        from rich.table import Table
        from rich.text import Text

        counts = Counter(job.state for job in self._sweep)
        table = Table(box=None, pad_edge=False, caption=", ".join(f"{counts[state]} {state}" for state in ORDER if counts[state]))
        table.caption_justify = "left"
        for name in ("job", "overrides", "state", "step", "reward", "accuracy", "ETA"):
            right = name in ("job", "step", "reward", "ETA")
            table.add_column(name, no_wrap=name != "overrides", justify="right" if right else "left")
        shown = sorted(self._sweep, key=lambda job: ORDER.index(job.state))[: max(1, self._live.console.height - 4)]
        for job in sorted(shown, key=lambda job: job.number):
            label = Text(job.label, no_wrap=True, overflow="ellipsis")  # what does not fit is taken from the overrides
            table.add_row(str(job.number), label, job.state, *self._progress(job), style=console.STYLE.get(job.state, ""))
        return table

    def _progress(self, job: "Job") -> tuple[str, str, str, str]:
        """Step, reward, accuracy and ETA."""
        if job.state == "waiting":
            return "", "", "", ""
        row, pace = last_row(job.folder / "metrics.jsonl"), self._paces[job.number]
        step, reward = row.get("step", 0), row.get("reward/mean")
        if job.state == "running" and step != pace.step:
            pace.add(step, row.get("time/step_s"))
        left = pace.left_s if job.state == "running" else None
        return (
            f"{step}/{job.run.steps}",
            console.number(reward) if console.is_number(reward) else "-",
            jobs.accuracy(job.folder),
            "" if left is None else console.duration(left),
        )
