import math

import numpy as np
import pytest
import reported

from grpo_cli.report.arms import compare_all, sweep_of
from grpo_cli.report.stats import additive_residual, holm, interval, over_seeds_and_problems, t_quantile


@pytest.mark.parametrize(
    ("p", "df", "t"), [(0.05, 1, 12.706), (0.05, 2, 4.303), (0.05, 4, 2.776), (0.01, 10, 3.169), (1e-6, 6, 20.048), (0.05, 299, 1.968)]
)
def test_quantiles_are_those_of_the_t_table(p, df, t):
    assert t_quantile(p, df) == pytest.approx(t, rel=1e-3)


def test_of_seeds_alone_it_is_the_paired_t_interval():
    found = over_seeds_and_problems(np.array([0.1, 0.2, 0.3]), None)
    assert found.mean == pytest.approx(0.2) and found.high - found.mean == pytest.approx(4.3027 * 0.1 / math.sqrt(3), rel=1e-3)
    assert found.p == pytest.approx(0.0742, abs=1e-3)  # t = 3.464 with 2 degrees of freedom


def test_one_seed_gives_an_interval_over_problems():
    found = over_seeds_and_problems(np.array([0.5]), np.array([[0.0, 1.0] * 50]))
    assert found.high - 0.5 == pytest.approx(1.984 * math.sqrt(25 / 99) / 10, rel=1e-3)  # variance 25/99 of 100 problems


def test_no_spread_is_no_evidence():
    assert over_seeds_and_problems(np.array([0.1, 0.1]), None).p == 1


def test_the_p_value_is_where_the_interval_touches_zero():
    found = interval(0.3, [(0.01, 2), (0.002, 50)])
    assert math.sqrt(t_quantile(found.p, 2) ** 2 * 0.01 + t_quantile(found.p, 50) ** 2 * 0.002) == pytest.approx(0.3, rel=1e-3)


def test_other_arms_count_at_most_four_degrees_of_freedom():
    own = np.array([0.1, 0.2, 0.3])
    assert over_seeds_and_problems(own, None, (0.01, 4)) == over_seeds_and_problems(own, None, (0.01, 40))
    assert over_seeds_and_problems(own, None, (0.01, 4)).high < over_seeds_and_problems(own, None).high


def test_arm_plus_seed_leaves_no_residual_even_with_a_missing_run():
    table_AS = np.add.outer([0.1, 0.4, 0.5], [0.0, 0.02, 0.05])
    table_AS[1, 2] = math.nan
    ss, df = additive_residual(table_AS)
    assert ss == pytest.approx(0) and df == 3  # 8 runs - 3 arms - 3 seeds + 1


def test_holm_steps_down_and_never_falls():
    assert holm([0.01, 0.04, 0.03], 3) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.01], 10) == pytest.approx([0.1])


def test_of_two_arms_alone_the_seed_variance_is_that_within_them():
    runs = []
    for beta, accuracies in ((0.0, (0.5, 0.6, 0.7)), (0.4, (0.3, 0.5, 0.4))):
        for seed, accuracy in enumerate(accuracies):
            runs.append(reported.run(f"{beta}-{seed}", seed, {"kl.beta": beta}, solved=False, steps=2, problems=5))
            runs[-1].evals[-1]["eval/accuracy"] = accuracy
    found = compare_all(sweep_of(runs), ["accuracy"])[0].difference
    assert found.mean == pytest.approx(0.2)
    assert found.high - found.mean == pytest.approx(2.7764 * math.sqrt((0.01 + 0.01) / 3), rel=1e-3)  # t with 4 degrees of freedom


def outcomes(effect: float, draws: int) -> tuple[float, float]:
    """Shares of comparisons whose interval covers 0, and that claim a difference, of three arms with three seeds, one with an effect."""
    found = []
    for world in range(1, draws + 1):
        arms = [(arm, {"kl.beta": 0.1 * arm}, effect * (arm == 2)) for arm in range(3)]
        runs = [reported.run(f"{n}-{seed}", seed, beta, lift, n, world, steps=2) for n, beta, lift in arms for seed in (1, 2, 3)]
        found += [c for c in compare_all(sweep_of(runs), ["accuracy"]) if 0.2 in (c.first, c.second) or not effect]
    covered = [c.difference.low <= 0 <= c.difference.high for c in found]
    return float(np.mean(covered)), float(np.mean([c.shown for c in found]))


def test_without_an_effect_intervals_cover_zero_in_92_to_98_of_100_and_verdicts_say_so():
    covered, claimed = outcomes(0.0, draws=200)
    assert 0.92 <= covered <= 0.98 and claimed <= 0.05


def test_a_planted_effect_is_found():
    assert outcomes(0.12, draws=20)[1] >= 0.9
