import subprocess
import sys

import numpy as np

from grpo_cli.randomness import generator, permutation, uniforms


def test_a_uniform_depends_on_its_own_place_only():
    small, large = uniforms(3, "rollout", 7, 2, 2, 5), uniforms(3, "rollout", 7, 4, 8, 64)
    assert np.array_equal(small, large[:2, :2, :5])


def test_seed_purpose_step_group_and_sample_each_make_other_numbers():
    base = uniforms(1, "rollout", 1, 2, 2, 8)
    rows = [base[0, 0], base[0, 1], base[1, 0], uniforms(2, "rollout", 1, 1, 1, 8)[0, 0]]
    rows += [uniforms(1, "evaluation", 1, 1, 1, 8)[0, 0], uniforms(1, "rollout", 2, 1, 1, 8)[0, 0]]
    assert len({row.tobytes() for row in rows}) == len(rows)


def test_uniforms_are_below_one_and_uniform():
    draws = uniforms(1, "x", 0, 50, 10, 40)
    assert draws.min() >= 0 and draws.max() < 1
    # 20,000 draws: the mean has a standard deviation of 0.289 / sqrt(20000) = 0.002; five of them.
    assert abs(draws.mean() - 0.5) < 0.0102


def test_numbers_are_the_same_in_another_process_with_another_hash_seed():
    code = "from grpo_cli.randomness import *; print(permutation(1, 'order', 0, 9).tolist(), generator(5, 'a', 1, 2).random())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONHASHSEED": "77"}, check=True)
    assert other.stdout.strip() == f"{permutation(1, 'order', 0, 9).tolist()} {generator(5, 'a', 1, 2).random()}"
