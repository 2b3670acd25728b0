"""What grpo-score shows: a progress bar on a terminal, then tables of rules, of the slowest rows and of those that raised."""

import statistics
import sys

from rich.console import Console
from rich.progress import Progress as Bar
from rich.table import Table

from grpo_cli.tracking.console import number, visible


class Progress:
    """A bar on a terminal, nothing elsewhere."""

    def __init__(self, what: str, total: int):
        self._bar = Bar(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
        self._task = self._bar.add_task(what, total=total)

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()

    def advance(self, count: int) -> None:
        self._bar.advance(self._task, count)


def print_scores(rows: list[dict], seconds: list[float], texts: list[str], show: int, elapsed_s: float, saved: str | None) -> None:
    console = Console(highlight=False)
    table = Table("rule", "mean", "std", "least", "most", "not applicable", "errors", title=f"{len(rows)} completions")
    for name in [*rows[0]["rules"], "total"]:
        values = [row["total"] if name == "total" else row["rules"][name] for row in rows]
        applied = [value for value in values if value is not None]
        figures = (statistics.fmean(applied), statistics.pstdev(applied), min(applied), max(applied)) if applied else ()
        errors = sum(name in row["errors"] for row in rows)
        table.add_row(name, *([number(f) for f in figures] or ["-"] * 4), str(len(values) - len(applied)), str(errors))
    console.print(table)
    order = sorted(range(len(rows)), key=lambda place: -seconds[place])[:show]
    _print_rows(console, "slowest", [(rows[i], f"{seconds[i] * 1000:.1f} ms", texts[i]) for i in order])
    raised = [(row, f"{name} {reason}", text) for row, text in zip(rows, texts, strict=True) for name, reason in row["errors"].items()]
    _print_rows(console, "failed", raised[:show])
    console.print(f"{elapsed_s:.1f} s, {len(rows) / elapsed_s:.1f} completions/s" + (f", saved to {saved}" if saved else ""), markup=False)


def _print_rows(console: Console, title: str, rows: list[tuple[dict, str, str]]) -> None:
    if not rows:
        return
    table = Table("id", title, "total", "completion", expand=False)
    for row, what, text in rows:
        table.add_row(*(visible(cell) for cell in (row["id"], what, number(row["total"]), text if len(text) <= 80 else f"{text[:77]}...")))
    console.print(table, markup=False)
