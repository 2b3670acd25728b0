"""Where a run's numbers go: the row files, wandb, the terminal. The only package that knows wandb and rich.

The files are the truth, and failing to write them is an error. wandb and the terminal never stop or slow training.
"""

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_cli.tracking import console
from grpo_cli.tracking.files import RowFiles
from grpo_cli.tracking.wandb_sink import open_sink

if TYPE_CHECKING:
    from grpo_cli.config import TrackerSection


def announce(text: str) -> None:
    """One line before there is a tracker, while something slow begins."""
    with contextlib.suppress(OSError):
        print(f"{text} ...", flush=True)


class Tracker:
    def __init__(
        self,
        run_dir: Path,
        section: "TrackerSection",
        *,
        config: dict[str, Any],
        total_steps: int,
        log_every: int,
        resume_step: int | None,
        wandb_id: str | None,
        group: str | None,
        run_name: str,
    ):
        """resume_step None starts the files afresh; k keeps the rows with step <= k and continues."""
        self._files = RowFiles(Path(run_dir), resume_step)
        self._view = console.open_view(total_steps, log_every)
        self._finished = False
        self._sink = None
        if self._files.damaged:
            self.warn(f"{self._files.damaged} unreadable line(s) in the row files of {run_dir} were left out")
        group, run_name = section.group or group, section.run_name or run_name
        try:
            self._sink, say, text = open_sink(Path(run_dir), section, config, resume_step, wandb_id, group, run_name)
        except BaseException:  # a Ctrl-C while wandb is imported: give the terminal back
            self._view.close()
            self._files.close()
            raise
        self.wandb_id: str | None = self._sink.id if self._sink else wandb_id
        """Goes into checkpoints, so that a resumed run stays one wandb run."""
        if text:
            self._show(say, text)

    def step(self, step: int, metrics: dict[str, float], groups: list[dict[str, Any]]) -> None:
        self._files.append("groups", groups)
        self._files.append("metrics", [{"step": step, **metrics}])
        if self._sink:
            self._sink.train(step, metrics, groups)
        self._show("step", step, metrics)

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        self._files.append("samples", rows)
        if self._sink:
            self._sink.samples(step, rows)
        self._show("samples", step, rows)

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        self._files.append("eval", [{"step": step, **metrics}])
        if self._sink:
            self._sink.evaluation(step, metrics)
        self._show("evaluation", step, metrics)

    def solved(self, step: int, row: dict[str, Any]) -> None:
        """How often each held-out problem was solved: for the file alone."""
        self._files.append("eval_problems", [{"step": step, **row}])

    def status(self, text: str) -> None:
        """What is being done now; it does not stay."""
        self._show("status", text)

    def note(self, text: str) -> None:
        """One line that stays."""
        self._show("note", text)

    def warn(self, text: str) -> None:
        self._show("warn", text)

    def finish(self, status: str, reason: str, lines: list[str]) -> None:
        """Close everything and show the final panel. Never raises, never hangs; a second call does nothing."""
        if self._finished:
            return
        self._finished = True
        if self._sink:
            self._show("status", "handing the last rows to wandb")
            with contextlib.suppress(Exception):
                self._sink.finish(exit_code=0 if status in ("finished", "stopped", "interrupted") else 1)
        with contextlib.suppress(OSError):
            self._files.close()
        self._show("finish", status, reason, lines)

    def _show(self, method: str, *args: Any) -> None:
        """Pass on to the view, what wandb's thread has to say first; a view that fails is replaced by a simpler one."""
        calls = [(say, (text,)) for say, text in self._sink.messages()] if self._sink else []
        for name, values in [*calls, (method, args)]:
            while self._view:
                try:
                    getattr(self._view, name)(*values)
                    break
                except Exception as error:
                    self._view = self._simpler_view(error)

    def _simpler_view(self, error: Exception) -> "console.PlainView | None":
        view = self._view
        with contextlib.suppress(Exception):
            view.close()
        if isinstance(view, console.LiveView):
            plain = console.PlainView(view.total_steps, view.log_every)
            with contextlib.suppress(Exception):
                plain.warn(f"the live view failed ({type(error).__name__}: {error}); plain lines from here on")
            return plain
        if isinstance(error, OSError):
            # Nobody reads the output any more; without this, Python's own flush at exit would fail and change the exit status.
            with contextlib.suppress(Exception):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return None
