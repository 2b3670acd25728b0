"""Intervals for means and differences over few seeds and many problems. Arithmetic on arrays only.

A difference between two arms d_SP (S seeds, P problems, paired in both) varies by seed, by problem, and by the draws of an evaluation.
Its interval is m +- sqrt(sum of t(df)^2 * variance) over two parts: seeds (the draws with them) and problems, where the latter is the
between-problem component of a two-way analysis of variance. Resampling three seeds would give an interval that is far too narrow.
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

POOLED_DF = 4
"""Most degrees of freedom that the other arms' seed variance counts beside a pair's own: it steadies three seeds, and a pair that is
noisier than the rest of the sweep is still judged by itself."""

LEVEL = 0.05


@dataclass(frozen=True)
class Interval:
    mean: float
    low: float
    high: float
    p: float
    """Two-sided, for a mean of 0; 1 where no spread was measured, so that nothing is claimed."""


@cache
def _t_table(df: int) -> tuple[np.ndarray, np.ndarray]:
    angle = np.linspace(0, math.pi / 2, 20001)  # t = sqrt(df) tan(angle) has the density cos(angle)^(df - 1)
    density = np.cos(angle) ** (df - 1)
    tail = np.concatenate([np.cumsum(((density[1:] + density[:-1]) / 2)[::-1])[::-1], [0.0]])
    return angle[::-1], (tail / tail[0])[::-1]


def t_quantile(p: float, df: int) -> float:
    """The t that |T| exceeds with probability p."""
    angle, tail = _t_table(df)
    return math.sqrt(df) * math.tan(np.interp(p, tail, angle))


def interval(mean: float, parts: list[tuple[float, int]]) -> Interval:
    """Around a mean whose variance is the sum of `parts`, each (variance, degrees of freedom)."""
    parts = [(variance, df) for variance, df in parts if variance > 0]
    if not parts:
        return Interval(mean, mean, mean, 1.0)

    def half(p: float) -> float:
        return math.sqrt(sum(t_quantile(p, df) ** 2 * variance for variance, df in parts))

    low, high = -40.0, 0.0  # log p, by bisection
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if half(math.exp(middle)) < abs(mean) else (middle, high)
    return Interval(mean, mean - half(LEVEL), mean + half(LEVEL), math.exp(high))


def over_seeds_and_problems(values_S: np.ndarray, values_SP: np.ndarray | None, pooled: tuple[float, int] = (0.0, 0)) -> Interval:
    """The mean of one value per seed, or of a value per seed and problem (values_S are then its means over problems).

    `pooled` is a variance between seeds known from elsewhere, with its degrees of freedom. Of one seed only problems are covered.
    """
    S, parts = len(values_S), []
    if S > 1:
        variance, df = pooled[0], min(pooled[1], POOLED_DF)
        parts.append((((S - 1) * values_S.var(ddof=1) + df * variance) / (S - 1 + df) / S, S - 1 + df))
    if values_SP is not None and values_SP.shape[1] > 1:
        P = values_SP.shape[1]
        between = values_SP.mean(axis=0).var(ddof=1) / P
        if S > 1:
            rest_SP = values_SP - values_SP.mean(axis=0) - values_SP.mean(axis=1, keepdims=True) + values_SP.mean()
            between -= (rest_SP**2).sum() / ((S - 1) * (P - 1)) / (S * P)
        parts.append((between, P - 1))
    return interval(float(values_S.mean()), parts)


def additive_residual(table_AS: np.ndarray) -> tuple[float, int]:
    """(sum of squares, degrees of freedom) of arms x seeds about arm + seed; NaN where a run is missing."""
    arms, seeds = np.nonzero(~np.isnan(table_AS))
    A, S = table_AS.shape
    if not len(arms):
        return 0.0, 0
    design = np.hstack([np.eye(A)[arms], np.eye(S)[seeds]])
    observed = table_AS[arms, seeds]
    fitted = design @ np.linalg.lstsq(design, observed, rcond=None)[0]
    return float(((observed - fitted) ** 2).sum()), int(len(arms) - np.linalg.matrix_rank(design))


def holm(p: list[float], tests: int) -> list[float]:
    """p-values adjusted for `tests` comparisons, of which these are some (Holm, 1979)."""
    adjusted, largest = [0.0] * len(p), 0.0
    for rank, index in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        largest = max(largest, min(1.0, p[index] * (tests - rank)))
        adjusted[index] = largest
    return adjusted
