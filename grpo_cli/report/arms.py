"""What a sweep is made of: axes that its configs differ in, arms (runs that differ in the seed alone), and fair comparisons of them.

Every comparison is made at a budget that both sides have spent, or is refused with the reason.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np

from grpo_cli.report.read import Run
from grpo_cli.report.stats import LEVEL, Interval, additive_residual, holm, interval, over_seeds_and_problems
from grpo_cli.runfolder import FREE

OF_NO_EFFECT = ("seed", "threads", "device", "evaluation", *(key for key in FREE if key != "steps"))
ABSENT = "absent"
SHORT = {"group_size.samples_per_prompt": "G", "group_size.completions_per_step": "completions per step"}
MOST_ALL_PAIRS = 8
"""Values of an axis up to which all pairs are compared; beyond, each with the best."""
LEAST_COMMON = 0.5
"""Share of the longest run's budget that all must have spent."""
LAST_PART = 1 / 3
"""Process figures are means over this last part of a run's steps."""

PROCESS = {
    "kl/sequence": "KL/seq",
    "group/frac_zero_std": "zero-std",
    "completion/tokens": "length",
    "policy/entropy": "entropy",
}


@dataclass
class Arm:
    values: dict[str, Any]
    """By axis."""
    runs: list[Run] = field(default_factory=list)

    @cached_property
    def by_seed(self) -> dict[int, Run]:
        """The runs that count; of two with one seed the one that was started last."""
        done = sorted((run for run in self.runs if run.done), key=lambda run: str(run.summary.get("started")))
        return {run.config.get("seed"): run for run in done}

    @property
    def control(self) -> bool:
        return any(run.config.get("reward.control", "none") != "none" for run in self.runs)


@dataclass
class Sweep:
    axes: dict[str, list[Any]]
    """The values of each config key, or set of keys, in which the arms differ."""
    arms: list[Arm]
    merged: dict[str, list[str]]
    """By axis: all keys that change with it, when there are several."""

    def name(self, axis: str) -> str:
        """As short as it can be without meaning two axes."""
        last = axis.rsplit(".", 1)[-1]
        return SHORT.get(axis) or (last if sum(other.rsplit(".", 1)[-1] == last for other in self.axes) == 1 else axis)

    def label(self, arm: Arm, among: list[Arm] | None = None) -> str:
        """The values of an arm on the axes on which those `among` which it stands differ."""
        axes = [axis for axis in self.axes if len({repr(other.values[axis]) for other in among or self.arms}) > 1]
        return ", ".join(f"{self.name(axis)} {shown(arm.values[axis])}" for axis in axes) or "all runs"


def shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


# --- arms and axes -----------------------------------------------------------------------------------------------------


def sweep_of(runs: list[Run]) -> Sweep:
    """Arms and axes of runs whose config is known."""
    columns, merged = _columns(runs)
    arms: dict[str, Arm] = {}
    for number, run in enumerate(runs):
        values = {axis: column[number] for axis, column in columns.items()}
        arms.setdefault(repr(values), Arm(values)).runs.append(run)
    axes = {axis: _ordered(column) for axis, column in columns.items()}
    order = sorted(arms.values(), key=lambda arm: [axes[axis].index(value) for axis, value in arm.values.items()])
    return Sweep(axes, order, merged)


def _columns(runs: list[Run]) -> tuple[dict[str, list], dict[str, list[str]]]:
    keys = {key: None for run in runs for key in run.config if key.split(".")[0] not in OF_NO_EFFECT}
    all_columns = {key: [run.config.get(key, ABSENT) for run in runs] for key in keys}
    columns = {key: column for key, column in all_columns.items() if len(set(map(repr, column))) > 1}
    merged: dict[str, list[str]] = {}
    for group, chosen in _groups_chosen(runs).items():
        inner = [key for key in columns if key.startswith(f"{group}.") and _decides(chosen, columns[key])]
        if len(inner) > 1:
            columns = {group: chosen} | {key: column for key, column in columns.items() if key not in inner}
            merged[group] = inner
    for key, other in combinations(list(columns), 2):
        if key in columns and other in columns and _decides(columns[key], columns[other]) and _decides(columns[other], columns[key]):
            merged[key] = [*merged.get(key, [key]), *merged.pop(other, [other])]
            del columns[other]
    return columns, merged


def _groups_chosen(runs: list[Run]) -> dict[str, list[str]]:
    """Overrides that choose the option of a config group, such as algorithm=dapo: group -> the option of each run."""
    given = [dict(word.lstrip("+").split("=", 1) for word in run.summary.get("overrides") or [] if "=" in word) for run in runs]
    sections = sorted({key.split(".")[0] for run in runs for key in run.config if "." in key})
    return {name: [words.get(name, "default") for words in given] for name in sections if any(name in words for words in given)}


def _decides(column: list, other: list) -> bool:
    """Whether the value in one column always comes with the same value in the other."""
    return len({(repr(a), repr(b)) for a, b in zip(column, other, strict=True)}) == len(set(map(repr, column)))


def _ordered(column: list) -> list:
    distinct = list({repr(value): value for value in column}.values())
    numeric = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in distinct)
    return sorted(distinct) if numeric else distinct


# --- figures of one arm ------------------------------------------------------------------------------------------------


Outcome = tuple[float, dict[str, float] | None]
"""Accuracy, and by problem where that is known."""


def process_figure(run: Run, metric: str) -> float:
    """Mean of a metric over the last part of the run's steps; NaN where it was not measured."""
    steps, values = run.series(metric)
    return float(values[steps > (1 - LAST_PART) * steps[-1]].mean()) if len(steps) else math.nan


def final(run: Run) -> Outcome:
    return run.at("completions", run.spent["completions"][-1])


def table_of(sweep: Sweep, figure) -> np.ndarray:
    """figure(run) of the counted runs, arms x seeds; NaN where there is none."""
    seeds = sorted({seed for arm in sweep.arms for seed in arm.by_seed})
    rows = [[figure(arm.by_seed[seed]) if seed in arm.by_seed else math.nan for seed in seeds] for arm in sweep.arms]
    return np.array(rows, dtype=float).reshape(len(sweep.arms), len(seeds))


def mean_of_arm(outcomes: list[Outcome], table_AS: np.ndarray, row: int) -> Interval:
    """Accuracy of an arm from that of its runs; the seed variance of the other rows of the table steadies its own."""
    others = [values[np.isfinite(values)] for values in np.delete(table_AS, row, axis=0)]
    df = sum(max(0, len(values) - 1) for values in others)
    variance = sum(((values - values.mean()) ** 2).sum() for values in others if len(values)) / df if df else 0.0
    ids = _shared([outcomes])
    values_SP = np.array([[solved[i] for i in ids] for _, solved in outcomes]) if ids else None
    return over_seeds_and_problems(np.array([accuracy for accuracy, _ in outcomes]), values_SP, (variance, df))


def _shared(outcomes: list[list[Outcome]]) -> list[str]:
    """The problems that all outcomes tell of; none when one of them tells of no problem."""
    solved = [by_problem for side in outcomes for _, by_problem in side]
    return sorted(set.intersection(*map(set, solved))) if all(solved) else []


# --- comparisons -------------------------------------------------------------------------------------------------------


@dataclass
class Comparison:
    axis: str
    first: Any
    second: Any
    measure: str = "accuracy"
    refused: str = ""
    """Why there is no difference to tell."""
    difference: Interval | None = None
    """first minus second; of KL the difference of logarithms."""
    means: tuple[float, float] = (math.nan, math.nan)
    adjusted_p: float = 1.0
    """Holm over all comparisons of the same measures."""
    seeds: list[int] = field(default_factory=list)
    problems: int | None = None
    """How many are paired; None where they are not known."""
    budget: float = 0.0
    """Completions of each run."""
    note: str = ""
    contexts: dict[str, float] = field(default_factory=dict)
    """The difference at each setting of the other axes."""
    at_equal: dict[str, Interval] = field(default_factory=dict)
    """The difference at equal tokens and at equal seconds."""

    @property
    def shown(self) -> bool:
        return self.difference is not None and self.adjusted_p < LEVEL


Pair = tuple[str, Any, Any, list[tuple[Arm, Arm]]]
"""Axis, two of its values, and the arms that differ in these alone."""


def compare_all(sweep: Sweep, measures: list[str]) -> list[Comparison]:
    """The values of each axis against each other with the other axes equal, or arm against arm where no two arms differ in one axis."""
    found, tests = [], 0
    for measure in measures:
        table = table_of(sweep, lambda run, measure=measure: _figure(run, measure))
        residual = additive_residual(table)
        pairs = _pairs(sweep)
        tests += len(pairs)
        found += [_compare(sweep, pair, measure, residual) for pair in _worth_telling(pairs, sweep, table)]
    judged = [comparison for comparison in found if comparison.difference]
    adjusted = holm([comparison.difference.p for comparison in judged], tests - (len(found) - len(judged)))
    for comparison, p in zip(judged, adjusted, strict=True):
        comparison.adjusted_p = p
    return found


def _figure(run: Run, measure: str) -> float:
    if measure == "accuracy":
        return final(run)[0]
    value = process_figure(run, measure)
    return (math.log(value) if value > 0 else math.nan) if measure.startswith("kl/") else value


def _pairs(sweep: Sweep) -> list[Pair]:
    found: list[Pair] = []
    for axis, values in sweep.axes.items():
        beside = {}
        for arm in sweep.arms:
            others = repr({name: value for name, value in arm.values.items() if name != axis})
            beside.setdefault(others, {})[repr(arm.values[axis])] = arm
        for first, second in combinations(values, 2):
            keys = repr(first), repr(second)
            if arms := [(found_in[keys[0]], found_in[keys[1]]) for found_in in beside.values() if set(keys) <= found_in.keys()]:
                found.append((axis, first, second, arms))
    return found or [("arm", sweep.label(a), sweep.label(b), [(a, b)]) for a, b in combinations(sweep.arms, 2)]


def _worth_telling(pairs: list[Pair], sweep: Sweep, table: np.ndarray) -> list[Pair]:
    """All pairs of an axis of few values; of many those with its best value."""
    height = {id(arm): np.nanmean(row) if np.isfinite(row).any() else -math.inf for arm, row in zip(sweep.arms, table, strict=True)}
    kept = []
    for axis in dict.fromkeys(pair[0] for pair in pairs):
        of_axis = [pair for pair in pairs if pair[0] == axis]
        heights: dict[str, list[float]] = {}
        for _, first, second, arms in of_axis:
            for value, side in ((first, 0), (second, 1)):
                heights.setdefault(repr(value), []).extend(height[id(arm[side])] for arm in arms)
        best = max(heights, key=lambda value: np.mean(heights[value]))
        kept += [pair for pair in of_axis if len(heights) <= MOST_ALL_PAIRS or best in (repr(pair[1]), repr(pair[2]))]
    return kept


def _compare(sweep: Sweep, pair: Pair, measure: str, residual: tuple[float, int]) -> Comparison:
    axis, first, second, arms = pair
    result = Comparison(axis, first, second, measure)
    arms = [(a, b) for a, b in arms if a.by_seed.keys() & b.by_seed.keys()]
    plans = [max(run.planned for arm in pair for run in arm.by_seed.values()) for pair in arms]
    shorter = len([plan for plan in plans if plan < max(plans)])
    arms = [pair for pair, plan in zip(arms, plans, strict=True) if plan == max(plans)]  # each setting at its own end, not at another's
    result.seeds = sorted(set.intersection(*(a.by_seed.keys() & b.by_seed.keys() for a, b in arms))) if arms else []
    sides = [[[arm.by_seed[seed] for seed in result.seeds] for arm in side] for side in zip(*arms, strict=True)]
    runs = [run for side in sides for arm in side for run in arm]
    result.refused = _unfair(runs) if runs else "no seed that both have finished"
    if result.refused:
        return result
    left_out = sorted({seed for pair in arms for arm in pair for run in arm.runs if (seed := run.config.get("seed")) not in result.seeds})
    notes = [f"seed {', '.join(map(str, left_out))} left out, not finished on both sides"] if left_out else []
    notes += [f"{shorter} settings of a smaller plan left out"] if shorter else []
    result.budget, most = _common(runs, "completions")
    if measure != "accuracy":
        values_2CS = np.array([[[_figure(run, measure) for run in arm] for arm in side] for side in sides])
        if not np.isfinite(values_2CS).all():
            result.refused = "not measured in every run"
            return result
        result.difference = over_seeds_and_problems((values_2CS[0] - values_2CS[1]).mean(axis=0), None, _pooled(values_2CS, residual))
        raw = [float(np.mean([process_figure(run, measure) for arm in side for run in arm])) for side in sides]
        result.means, result.note = (raw[0], raw[1]), "; ".join(notes)
        return result
    if most > result.budget * 1.001:
        notes.append(f"not at the end of every run: at the most that all have spent (the longest spent {most:.0f} completions)")
    result.note = "; ".join(notes)
    result.difference, values_2CS, result.problems = _difference(sides, "completions", result.budget, residual)
    result.means = tuple(values_2CS.mean(axis=(1, 2)).tolist())
    if len(arms) > 1:
        settings = [sweep.label(a, [a for a, _ in arms]) for a, _ in arms]
        result.contexts = dict(zip(settings, (values_2CS[0] - values_2CS[1]).mean(axis=1).tolist(), strict=True))
    for unit in ("tokens", "seconds"):
        if (budget := _common(runs, unit)[0]) > 0:
            result.at_equal[unit] = _difference(sides, unit, budget, residual)[0]
    return result


def _common(runs: list[Run], unit: str) -> tuple[float, float]:
    """What all runs have spent at their last evaluation, and what the longest has."""
    spent = [run.spent[unit][-1] for run in runs]
    return float(min(spent)), float(max(spent))


def _difference(sides: list, unit: str, budget: float, residual: tuple[float, int]) -> tuple[Interval, np.ndarray, int | None]:
    outcomes = [[[run.at(unit, budget) for run in arm] for arm in side] for side in sides]
    values_2CS = np.array([[[accuracy for accuracy, _ in arm] for arm in side] for side in outcomes])
    ids = _shared([arm for side in outcomes for arm in side])
    if ids:
        values_2CSP = np.array([[[[solved[i] for i in ids] for _, solved in arm] for arm in side] for side in outcomes])
        values_2CS = values_2CSP.mean(axis=3)
    d_S = (values_2CS[0] - values_2CS[1]).mean(axis=0)
    if ids:
        return (
            over_seeds_and_problems(d_S, (values_2CSP[0] - values_2CSP[1]).mean(axis=0), _pooled(values_2CS, residual)),
            values_2CS,
            len(ids),
        )
    if len(d_S) == 1:  # what is left are the standard errors over problems, unpaired
        last = [run.evals[-1] for side in sides for arm in side for run in arm]
        variance = sum((row.get("eval/accuracy_se") or 0) ** 2 for row in last) / (len(last) / 2) ** 2
        return interval(float(d_S[0]), [(variance, max(1, last[0].get("eval/accuracy_greedy_n", 2) - 1))]), values_2CS, None
    return over_seeds_and_problems(d_S, None, _pooled(values_2CS, residual)), values_2CS, None


def _pooled(values_2CS: np.ndarray, residual: tuple[float, int]) -> tuple[float, int]:
    """Variance of a seed's difference by the rest of the sweep: what its additive fit leaves, without this pair's own part.

    Of two arms alone it is the variance of their sum: the same when a seed does nothing to both alike, and larger when it does.
    """
    ss, df = residual
    _, C, S = values_2CS.shape
    d_S = (values_2CS[0] - values_2CS[1]).mean(axis=0)
    rest_df = df - (S - 1)
    if rest_df <= 0:
        return (float(values_2CS.mean(axis=1).sum(axis=0).var(ddof=1)), S - 1) if S > 1 else (0.0, 0)
    return max(0.0, ss - C / 2 * ((d_S - d_S.mean()) ** 2).sum()) / rest_df * 2 / C, rest_df


def _unfair(runs: list[Run]) -> str:
    """Why these runs must not be compared; empty when they may be."""

    def differing(*prefixes: str, but: tuple[str, ...] = ()) -> list[str]:
        keys = {key for run in runs for key in run.config if key.startswith(prefixes) and not key.startswith(but or ("?",))}
        return sorted(key for key in keys if len({repr(run.config.get(key)) for run in runs}) > 1)

    judge = f"reward.rules.{runs[0].config.get('reward.accuracy')}."
    if keys := differing("reward.accuracy", f"{judge}fn", f"{judge}args"):
        return f"accuracy is judged by different rules ({keys[0]} differs)"
    solved = [set(run.solved[run.evals[-1]["step"]]) if run.evals[-1]["step"] in run.solved else set() for run in runs]
    if all(solved):
        shared, known = set.intersection(*solved), set.union(*solved)
        if len(shared) < len(known) / 2:
            return f"different held-out problems: {len(shared)} of {len(known)} are shared"
    elif keys := differing("data.", but=("data.train.", "data.difficulty", "data.revisit", "data.prompt.")):
        return f"perhaps different held-out problems ({keys[0]} differs, and not all runs have eval_problems.jsonl)"
    planned = sorted({run.planned for run in runs})
    scheduled = {"optimizer.schedule", "kl.schedule"} & {
        key for run in runs for key in ("optimizer.schedule", "kl.schedule") if run.config.get(key) in ("linear", "cosine")
    }
    advice = "give both the same steps x group_size.completions_per_step"
    if len(planned) > 1 and scheduled:
        return (
            f"unequal budgets: {planned[0]} and {planned[-1]} completions planned, and {min(scheduled)} stretches over the plan: {advice}"
        )
    common, most = _common(runs, "completions")
    if common < LEAST_COMMON * most:
        return f"unequal budgets: {common:.0f} and {most:.0f} completions spent: {advice}"
    return ""
