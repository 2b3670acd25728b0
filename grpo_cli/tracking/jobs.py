"""The table at the end of a sweep, read from what its jobs left in their folders. Knows nothing of rich or wandb."""

from pathlib import Path

from grpo_cli.runfolder import summary


def accuracy(folder: Path) -> str:
    """Sampled held-out accuracy at the first and the last evaluation, such as `0.28 -> 0.91`."""
    found = summary(folder).get("evaluation") or {}
    values = [found.get(which, {}).get("eval/accuracy") for which in ("first", "last")]
    return "-" if None in values else f"{values[0]:.2f} -> {values[1]:.2f}"


def status(folder: Path) -> str:
    """The status with its reason, but for a run that finished, which says it all."""
    found = summary(folder)
    state, reason = found.get("status", "not started"), " ".join(str(found.get("reason") or "").split())
    short = reason if len(reason) <= 60 else reason[:57] + "..."
    return state if state == "finished" or not reason else f"{state} ({short})"


def table(sweep_dir: Path, jobs: list[tuple[Path, str]]) -> str:
    """One line per job: number, overrides, status, accuracy, folder below sweep_dir."""
    rows = [("job", "overrides", "status", "accuracy", "folder")]
    for number, (folder, overrides) in enumerate(jobs):
        rows.append((str(number), overrides, status(folder), accuracy(folder), str(folder.relative_to(sweep_dir))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([f"jobs in {sweep_dir}", *lines])
