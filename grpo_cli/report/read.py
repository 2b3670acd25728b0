"""Run folders to plain records. What is damaged, missing or still being written becomes a note, not an error."""

import json
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from grpo_cli.runfolder import DONE, summary

UNITS = ("completions", "tokens", "seconds")
QUIET_S = 600
"""A run that says `running` and has not written for so long is probably dead."""


@dataclass
class Run:
    folder: Path
    config: dict[str, Any]
    """Flat, by dotted key; empty when there is none that can be read."""
    summary: dict[str, Any]
    metrics: list[dict] = field(default_factory=list)
    evals: list[dict] = field(default_factory=list)
    solved: dict[int, dict[str, float]] = field(default_factory=dict)
    """Share of right samples by problem, at each evaluated step."""
    missing: list[str] = field(default_factory=list)
    _series: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return self.summary.get("status") in DONE and bool(self.evals) and bool(self.config)

    @cached_property
    def state(self) -> str:
        """Status and reason in one line."""
        status, reason = self.summary.get("status", "no summary.json"), " ".join(str(self.summary.get("reason") or "").split())
        if status == "running" and (quiet := time.time() - self._last_written()) > QUIET_S:
            reason = f"nothing written for {quiet / 3600:.1f} h: killed?"
        if status in DONE and not self.done:
            reason = "; ".join(self.missing) or "no evaluation"
        return f"{status}: {reason}" if reason else status

    def _last_written(self) -> float:
        return max((path.stat().st_mtime for name in ("summary.json", "metrics.jsonl") if (path := self.folder / name).exists()), default=0)

    @property
    def planned(self) -> int:
        """Completions that the config asks for, without what dynamic sampling adds."""
        return self.config.get("steps", 0) * self.config.get("group_size.completions_per_step", 0)

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a metric where it was measured."""
        if name not in self._series:
            found = [(row["step"], row[name]) for row in self.metrics if isinstance(row.get(name), (int, float))]
            self._series[name] = np.array([step for step, _ in found]), np.array([value for _, value in found], dtype=float)
        return self._series[name]

    @cached_property
    def spent(self) -> dict[str, np.ndarray]:
        """Completions, tokens and training seconds by the end of the step of each evaluation."""
        steps, evaluated = (np.array([0, *(row["step"] for row in table)]) for table in (self.metrics, self.evals))
        seconds = np.array([0] + [row.get("time/step_s") or 0 for row in self.metrics])
        tokens = seconds * [0, *(row.get("speed/tokens_per_s") or 0 for row in self.metrics)]
        totals = {"tokens": tokens.cumsum(), "seconds": seconds.cumsum()}
        for unit in ("completions", "tokens"):
            if parts := [key for key in (self.metrics or [{}])[-1] if key.startswith(f"ledger/{unit}/")]:
                totals[unit] = np.array([0] + [sum(row.get(part) or 0 for part in parts) for row in self.metrics])
        spent = {"completions": evaluated[1:] * self.config.get("group_size.completions_per_step", 0)}
        return spent | {unit: np.interp(evaluated[1:], steps, total) for unit, total in totals.items()}

    def at(self, unit: str, budget: float) -> tuple[float, dict[str, float] | None]:
        """Held-out accuracy, and by problem where known, once `budget` is spent; between two evaluations on the line that joins them."""
        spent = self.spent[unit]
        after = min(int(np.searchsorted(spent, budget * (1 - 1e-9))), len(spent) - 1)
        before = max(after - 1, 0)
        width = spent[after] - spent[before]
        share = float(np.clip((budget - spent[before]) / width, 0, 1)) if width else 1.0
        accuracy = sum(self.evals[i]["eval/accuracy"] * w for i, w in ((before, 1 - share), (after, share)))
        start, end = (self.solved.get(self.evals[i]["step"]) for i in (before, after))
        if share > 1 - 1e-9:
            return accuracy, end
        if start is None or end is None:
            return accuracy, None
        return accuracy, {problem: start[problem] * (1 - share) + end[problem] * share for problem in start.keys() & end.keys()}


def rows(path: Path, missing: list[str]) -> list[dict]:
    """The whole rows of a file, the last one of each step for metrics and evaluations; what is not there is noted in `missing`."""
    try:
        *lines, tail = path.read_bytes().split(b"\n")
    except OSError:
        missing.append(f"{path.name} is missing")
        return []
    found, damaged = [], 0
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            found.append(row)
        else:
            damaged += 1
    if tail:
        missing.append(f"the last line of {path.name} is cut off")
    if damaged:
        missing.append(f"{damaged} lines of {path.name} cannot be read")
    return found


def solved_shares(row: dict) -> dict[str, float]:
    """Of a row of eval_problems.jsonl: the share of each problem's samples that were right."""
    return {problem: right / row["samples"] for problem, right in row["sampled"].items()}


def read_run(folder: Path, light: bool = False) -> Run:
    """The run in a folder; `light` leaves the row files out."""
    missing: list[str] = []
    run = Run(folder, _config(folder), summary(folder), missing=missing)
    if not run.config:
        missing.append("config.yaml is missing, cannot be read or was not written by grpo-train")
    if not run.summary:
        missing.append("summary.json is missing or cannot be read")
    if light or not run.config:
        return run
    run.metrics = list({row["step"]: row for row in rows(folder / "metrics.jsonl", missing)}.values())
    evals = {row["step"]: row for row in rows(folder / "eval.jsonl", missing) if isinstance(row.get("eval/accuracy"), (int, float))}
    run.evals = [evals[step] for step in sorted(evals)]
    if (folder / "eval_problems.jsonl").exists():
        run.solved = {row["step"]: solved_shares(row) for row in rows(folder / "eval_problems.jsonl", missing) if row.get("samples")}
    return run


def _config(folder: Path) -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # three times as fast as runfolder.load, and a sweep has many
    try:
        content = yaml.load((folder / "config.yaml").read_text(encoding="utf-8"), loader)
        return flat(content) if content["defaults"][0] == "_grpo" else {}
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, IndexError):
        return {}


def flat(values: dict, prefix: str = "") -> dict[str, Any]:
    """Nested mappings by dotted key, without Hydra's defaults list."""
    found = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        elif prefix or key != "defaults":
            found[f"{prefix}{key}"] = value
    return found


def is_run(folder: Path) -> bool:
    return bool(_config(folder)) or "status" in summary(folder)


def jobs_in(folder: Path) -> list[Path]:
    """The jobs of a sweep folder; none when it is no sweep."""
    return sorted((sub for sub in folder.iterdir() if sub.name.isdigit() and is_run(sub)), key=_by_number)


def runs_below(folder: Path) -> list[Path]:
    """Every run below a folder."""
    places = {file.parent for name in ("config.yaml", "summary.json") for file in folder.rglob(name)}
    return sorted((place for place in places if is_run(place)), key=_by_number)


def _by_number(folder: Path) -> tuple[Path, int, str]:
    return folder.parent, int(folder.name) if folder.name.isdigit() else -1, folder.name


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
