"""The report on a sweep or on several folders, and the list of the runs below a folder."""

import math
from collections.abc import Callable
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

import numpy as np

from grpo_cli.report.arms import PROCESS, Arm, Comparison, Sweep, compare_all, final, mean_of_arm, process_figure, shown, sweep_of, table_of
from grpo_cli.report.charts import COLOURS, Cells, Lines, Series, thinned
from grpo_cli.report.one import differences, points, spread_out
from grpo_cli.report.pages import MOST_TOLD, Document, Section, Table, Verdict
from grpo_cli.report.read import UNITS, Run, bytes_in
from grpo_cli.report.stats import LEVEL, Interval

MOST_EVALUATIONS = 60
"""Evaluations of a curve; more are thinned."""
MOST_BANDS = 6
"""Arms up to which their intervals are drawn."""
MOST_CONTEXTS = 4
"""Settings of the other axes that a verdict names."""
MOST_ROWS = 20
"""Arms in the terminal."""


def document(runs: list[Run], title: str, default: dict) -> Document:
    """`default` is the flat default config, to tell what all runs changed."""
    known = [run for run in runs if run.config]
    sweep = sweep_of(known)
    comparisons, process = compare_all(sweep, ["accuracy"]), compare_all(sweep, list(PROCESS))
    words, finished = _words(sweep, comparisons), sum(run.done for run in runs)
    table, figures = _arms(sweep)
    unfinished = _unfinished(runs, sweep)
    damaged = [f"{run.folder}: {note}" for run in runs for note in run.missing]
    common = {key: value for key, value in (known[0].config if known else {}).items() if all(run.config.get(key) == value for run in known)}
    curves = [*(_curve(sweep, unit) for unit in UNITS), _frontier(sweep)] if finished else []
    sections = [
        Section("Verdict", [*words, *_grounds(sweep, comparisons), *_moved(sweep, process)]),
        Section("Failed and unfinished jobs", unfinished),
        Section("Arms", [table, *_heat_maps(sweep, figures)] if table.rows else []),
        Section("Learning curves", curves),
        Section("Along the way", [_over_steps(sweep, *pair) for pair in {"reward/mean": "reward", **PROCESS}.items()] if finished else []),
        Section("Every comparison", [*_compared(sweep, comparisons), *_compared(sweep, process)]),
        Section("What all runs changed from the default config", [differences(common, {key: default.get(key) for key in common})]),
        Section("Missing or damaged", damaged),
    ]
    differing = f"{len(sweep.arms)} arms that differ in {_list([sweep.name(axis) for axis in sweep.axes])}"
    about = f"{len(runs)} runs, {finished} finished; {differing if sweep.axes else 'no two differ in more than the seed'}"
    width = len(sweep.axes) + 5
    compact = Table(table.head[:width], [row[:width] for row in table.rows[:MOST_ROWS]])
    more = [f"... and {len(words) - MOST_TOLD} more verdicts in the report"] if len(words) > MOST_TOLD else []
    rest = [f"... of {len(table.rows)} arms"] if len(table.rows) > MOST_ROWS else []
    hidden = [f"... and {len(damaged) - MOST_TOLD} more missing or damaged files"] if len(damaged) > MOST_TOLD else []
    summary = [*words[:MOST_TOLD], *more, *([compact] if table.rows else []), *rest, *unfinished, *damaged[:MOST_TOLD], *hidden]
    axes = {
        axis: {"name": sweep.name(axis), "values": values, "keys": sweep.merged.get(axis, [axis])} for axis, values in sweep.axes.items()
    }
    return Document("sweep", title, about, sections, summary, {"axes": axes, "comparisons": [asdict(c) for c in [*comparisons, *process]]})


def _list(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


# --- words -------------------------------------------------------------------------------------------------------------


def _words(sweep: Sweep, comparisons: list[Comparison]) -> list[Verdict]:
    """A verdict on each comparison; what is refused for one reason is told once."""
    words, refused = [verdict(sweep, c) for c in comparisons if not c.refused], {}
    for c in comparisons:
        if c.refused:
            refused.setdefault((c.axis, c.refused), []).append(f"{shown(c.first)} and {shown(c.second)}")
    for (axis, reason), pairs in refused.items():
        told = "; ".join(pairs[:4]) + (f"; {len(pairs) - 4} more pairs" if len(pairs) > 4 else "")
        words.append(Verdict(f"{_of(sweep, axis)}{told} are not compared:", f"{reason}."))
    return words


def verdict(sweep: Sweep, c: Comparison) -> Verdict:
    """One comparison in a sentence, with its evidence."""
    flipped = c.difference.mean < 0
    ahead, behind = (shown(value) for value in ((c.second, c.first) if flipped else (c.first, c.second)))
    evidence = f"{points(_turned(c.difference, flipped))} at {c.budget:.0f} completions each"
    if "tokens" in c.at_equal:
        evidence += f", at equal tokens {points(_turned(c.at_equal['tokens'], flipped))}"
    if 1 < len(c.contexts) <= MOST_CONTEXTS:
        evidence += "; by " + ", ".join(f"{at}: {100 * (-value if flipped else value):.1f}" for at, value in c.contexts.items())
    seeds = "one seed: the interval covers problems only" if len(c.seeds) == 1 else f"{len(c.seeds)} seeds"
    problems = "" if c.problems is None else f", {c.problems} problems"
    evidence += f"{f'; {c.note}' if c.note else ''} ({seeds}{problems})."
    name = _of(sweep, c.axis)
    if c.shown:
        return Verdict(f"{name}{ahead} {'beats' if len(c.seeds) > 1 else 'is ahead, in this seed, of'} {behind}", f"by {evidence}")
    if c.difference.p < LEVEL:
        return Verdict(f"{name}{ahead} may be ahead of {behind},", f"not shown after Holm's correction: {evidence}")
    return Verdict(f"{name}{ahead} and {behind} can't be told apart:", evidence)


def _of(sweep: Sweep, axis: str) -> str:
    return "" if axis == "arm" else f"{sweep.name(axis)} "


def _turned(difference: Interval, flipped: bool) -> Interval:
    return Interval(-difference.mean, -difference.high, -difference.low, difference.p) if flipped else difference


def _grounds(sweep: Sweep, comparisons: list[Comparison]) -> list[str]:
    """How the verdicts were reached, and what the null controls gained."""
    judged = [c for c in comparisons if c.difference]
    told = []
    if judged:
        alone = " (of one seed problems alone)" if any(len(c.seeds) == 1 for c in judged) else ""
        covers = f"seeds and held-out problems{alone}, paired in both"
        if not all(c.problems for c in judged):
            covers = "seeds only (of one seed: standard errors) where no eval_problems.jsonl tells which problems were solved"
        counted = f"{len(comparisons)} comparison{'s' * (len(comparisons) > 1)} of sampled held-out accuracy"
        told = [f"{counted}; a verdict stands after Holm's correction for all. The 95 % intervals are for each alone and cover {covers}."]
    elif not comparisons:
        told = ["One arm: there is nothing to compare."]
    for arm in sweep.arms:
        if arm.control and arm.by_seed:
            first, last = (_evaluated(list(arm.by_seed.values()), index, "eval/accuracy") for index in (0, -1))
            told.append(
                f"Null control ({sweep.label(arm)}): {first:.2f} -> {last:.2f}. A gain no larger than this owes nothing to the reward."
            )
    return told


def _moved(sweep: Sweep, process: list[Comparison]) -> list[str]:
    """Of each axis the process figures that it demonstrably moved, each by its clearest pair."""
    told = []
    for axis in dict.fromkeys(c.axis for c in process):
        clearest: dict[str, Comparison] = {}
        for c in sorted((c for c in process if c.axis == axis and c.shown), key=lambda c: c.difference.p):
            clearest.setdefault(c.measure, c)
        pairs = [f"{PROCESS[m]} ({c.means[0]:.2g} at {shown(c.first)}, {c.means[1]:.2g} at {shown(c.second)})" for m, c in clearest.items()]
        told += [f"{sweep.name(axis)} moved {_list(pairs)}."] if pairs else []
    return told


# --- tables ------------------------------------------------------------------------------------------------------------


def _arms(sweep: Sweep) -> tuple[Table, list[dict[str, float]]]:
    """The table, and the figures of each arm for the heat maps."""
    accuracies, rows, figures = table_of(sweep, lambda run: final(run)[0]), [], []
    columns = [sweep.name(axis) for axis in sweep.axes]
    columns += ["runs", "accuracy", "95 %", *PROCESS.values(), "start", "greedy", *UNITS]
    for number, arm in enumerate(sweep.arms):
        runs = list(arm.by_seed.values())
        row, figure = [*(shown(value) for value in arm.values.values()), f"{len(runs)}/{len(arm.runs)}"], {}
        if runs:
            mean = mean_of_arm([final(run) for run in runs], accuracies, number)
            figure = {"accuracy": mean.mean} | {metric: float(np.mean([process_figure(run, metric) for run in runs])) for metric in PROCESS}
            ends = [_evaluated(runs, 0, "eval/accuracy"), _evaluated(runs, -1, "eval/accuracy_greedy")]
            row += [f"{mean.mean:.3f}", f"{max(mean.low, 0):.3f}..{min(mean.high, 1):.3f}" if mean.high > mean.low else "-"]
            row += [f"{value:.3g}" if math.isfinite(value) else "-" for value in (*list(figure.values())[1:], *ends)]
            row += [f"{np.mean([run.spent[unit][-1] for run in runs]):.0f}" for unit in UNITS]
        rows.append(row + ["-"] * (len(columns) - len(row)))
        figures.append(figure)
    note = "Runs: finished of all. Accuracy: sampled, held-out, at the last evaluation, mean over seeds, interval over seeds and problems. "
    note += "KL/seq (nats), zero-std (share of groups), length (tokens), entropy (nats): means over the last third of the steps."
    merged = [f" {sweep.name(axis)} stands for {', '.join(keys[:6])}{', ...' * (len(keys) > 6)}." for axis, keys in sweep.merged.items()]
    return Table(columns, rows, note + "".join(merged)), figures


def _evaluated(runs: list[Run], index: int, name: str) -> float:
    values = [run.evals[index].get(name) for run in runs]
    return math.nan if None in values else float(np.mean(values))


def _compared(sweep: Sweep, comparisons: list[Comparison]) -> list[Table]:
    def texts(c: Comparison) -> list[str]:
        scale = {"accuracy": lambda v: f"{100 * v:.1f}", "kl/sequence": lambda v: f"{math.exp(v):.3g}"}.get(c.measure, lambda v: f"{v:.3g}")
        no_interval = len(c.seeds) == 1 and c.measure != "accuracy"
        intervals = (c.difference, *c.at_equal.values())
        return [scale(i.mean) if no_interval else f"{scale(i.mean)} [{scale(i.low)}, {scale(i.high)}]" for i in intervals]

    judged = [c for c in comparisons if c.difference]
    if not judged:
        return []
    rows = [[PROCESS.get(c.measure, c.measure), f"{_of(sweep, c.axis)}{shown(c.first)} - {shown(c.second)}", *texts(c)] for c in judged]
    for row, c in zip(rows, judged, strict=True):
        row += [f"{c.difference.p:.2g}", f"{c.adjusted_p:.2g}", str(len(c.seeds))]
    at = [f"at equal {unit}" for unit in ("completions", *judged[0].at_equal)] if judged[0].measure == "accuracy" else ["difference"]
    note = "Percentage points. At equal tokens or seconds the side that needs more of them is read before its end."
    note = note if judged[0].measure == "accuracy" else "First minus second, of KL first over second. Intervals over seeds alone."
    return [Table(["figure", "pair", *at, "p", "p (Holm)", "seeds"], rows, note)]


def _unfinished(runs: list[Run], sweep: Sweep) -> list[Table]:
    arm_of = {id(run): sweep.label(arm) for arm in sweep.arms for run in arm.runs}
    rows = [[run.folder.name, f"{arm_of.get(id(run), '?')}, seed {run.config.get('seed', '?')}", run.state] for run in runs if not run.done]
    return [Table(["job", "arm", "status"], rows, "They are left out of every mean and comparison.")] if rows else []


# --- charts ------------------------------------------------------------------------------------------------------------


def _heat_maps(sweep: Sweep, figures: list[dict[str, float]]) -> list[Cells]:
    """The two axes of most values against each other, the mean over the others; without null controls."""
    if len(sweep.axes) < 2:
        return []
    across, down = sorted(sweep.axes, key=lambda axis: -len(sweep.axes[axis]))[:2]

    def mean(figure: str, place: tuple) -> float | None:
        judged = [(arm.values, f) for arm, f in zip(sweep.arms, figures, strict=True) if not arm.control]
        known = [f[figure] for at, f in judged if (at[across], at[down]) == place and math.isfinite(f.get(figure, math.nan))]
        return float(np.mean(known)) if known else None

    titles = {"accuracy": "Accuracy", "kl/sequence": "KL, nats per completion", "group/frac_zero_std": "Share of zero-std groups"}
    names = [[shown(value) for value in sweep.axes[axis]] for axis in (across, down)]
    cells = {figure: [[mean(figure, (a, d)) for a in sweep.axes[across]] for d in sweep.axes[down]] for figure in titles}
    return [Cells(title, sweep.name(across), sweep.name(down), *names, cells[figure]) for figure, title in titles.items()]


def _lines(title: str, x_label: str, y_label: str, sweep: Sweep, line: Callable[[Arm], Series], note: str = "") -> Lines:
    """A line for each arm with finished runs; of many arms those that end highest have a colour, null controls are dashed."""
    arms = [arm for arm in sweep.arms if arm.by_seed]
    ranked = sorted(arms, key=lambda arm: -np.mean([final(run)[0] for run in arm.by_seed.values()]))
    if len(arms) > COLOURS:
        note += f" In colour the {COLOURS} arms that end highest."
    series = []
    for arm in arms:
        one = line(arm)
        one.name, one.dashed, one.faint = sweep.label(arm, arms), arm.control, arm not in ranked[:COLOURS]
        series += [one] if one.x else []
    return Lines(title, x_label, y_label, series, (note + " Dashed: null controls." * any(one.dashed for one in series)).strip())


def _steps(arm: Arm) -> list[int]:
    """The evaluations that all runs of the arm have."""
    return spread_out(sorted(set.intersection(*({row["step"] for row in run.evals} for run in arm.by_seed.values()))), MOST_EVALUATIONS)


def _at_step(run: Run, step: int) -> float:
    return next((row["eval/accuracy"] for row in run.evals if row["step"] == step), math.nan)


def _curve(sweep: Sweep, unit: str) -> Lines:
    tables: dict[int, np.ndarray] = {}

    def line(arm: Arm) -> Series:
        runs, bands, x = list(arm.by_seed.values()), [], []
        for step in _steps(arm):
            if step not in tables:
                tables[step] = table_of(sweep, lambda run, step=step: _at_step(run, step))
            bands.append(mean_of_arm([(_at_step(run, step), run.solved.get(step)) for run in runs], tables[step], sweep.arms.index(arm)))
            x.append(float(np.mean([run.spent[unit][[row["step"] for row in run.evals].index(step)] for run in runs])))
        low, high = ([b.low for b in bands], [b.high for b in bands]) if banded else (None, None)
        return Series("", x, [b.mean for b in bands], low, high)

    banded = sum(bool(arm.by_seed) for arm in sweep.arms) <= MOST_BANDS
    note = f"Mean over seeds{'; bands: 95 % interval over seeds and problems' if banded else ''}."
    return _lines(f"By {unit}", f"training {unit}" if unit == "seconds" else unit, "held-out accuracy", sweep, line, note)


def _frontier(sweep: Sweep) -> Lines:
    def distance(run: Run, before: int, step: int) -> float:
        steps, kl = run.series("kl/sequence")
        inside = kl[(steps > before) & (steps <= step)]
        return math.sqrt(max(0.0, inside.mean())) if len(inside) else 0.0 if step == 0 else math.nan

    def line(arm: Arm) -> Series:
        runs, steps = list(arm.by_seed.values()), _steps(arm)
        x = [float(np.mean([distance(run, before, step) for run in runs])) for before, step in zip([-1, *steps], steps, strict=False)]
        known = [(a, float(np.mean([_at_step(run, step) for run in runs]))) for a, step in zip(x, steps, strict=True) if math.isfinite(a)]
        return Series("", [a for a, _ in known], [b for _, b in known])

    label, note = "sqrt of KL to the reference (nats per completion)", "A point for each evaluation, mean over seeds."
    return _lines("Frontier", label, "held-out accuracy", sweep, line, note)


def _over_steps(sweep: Sweep, metric: str, name: str) -> Lines:
    def line(arm: Arm) -> Series:
        measured = [run.series(metric) for run in arm.by_seed.values()]
        steps, values = (np.concatenate([one[i] for one in measured]) for i in (0, 1))
        unique, place = np.unique(steps, return_inverse=True)
        return Series("", *thinned(unique, np.bincount(place, values) / np.bincount(place)))

    units = {"KL/seq": "nats per completion", "zero-std": "share of groups", "length": "tokens", "entropy": "nats per token"}
    return _lines(name, "step", units.get(name, "mean of the batch"), sweep, line)


# --- a list ------------------------------------------------------------------------------------------------------------


def listing(root: Path, runs: list[Run]) -> Document:
    """Every run below a folder: status, best score, the overrides in which it differs from its neighbours, size on disk."""
    rows = []
    for _, group in groupby(runs, key=lambda run: run.folder.parent):
        siblings = list(group)
        words = {run.folder: [str(word) for word in run.summary.get("overrides") or []] for run in siblings}
        shared = set.intersection(*map(set, words.values())) if len(siblings) > 1 else set()
        for run in siblings:
            best = ((run.summary.get("evaluation") or {}).get("best") or {}).get("eval/accuracy")
            own = " ".join(word for word in words[run.folder] if word not in shared)
            size = f"{bytes_in(run.folder) / 2**20:.1f} MiB"
            rows.append([str(run.folder.relative_to(root)), run.state, "-" if best is None else f"{best:.3f}", own or "-", size])
    table = Table(
        ["run", "status", "best", "overrides that differ", "size"], rows, "Best: sampled held-out accuracy at its best evaluation."
    )
    short = Table(table.head, [[row[0], row[1].split(":")[0], *row[2:]] for row in rows])
    about = f"{len(runs)} runs below {root}; grpo-report FOLDER reports on one of them, or on a sweep"
    return Document("list", f"Runs in {root.resolve().name}", about, [Section("Runs", [table])], [short])
