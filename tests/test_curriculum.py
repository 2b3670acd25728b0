import json

import pytest

from grpo_cli.curriculum import Curriculum, load_pass_rates


def curriculum(n=10, band=None, revisit=0.0, rates=None):
    return Curriculum([f"p{i}" for i in range(n)], seed=1, band=band, revisit=revisit, pass_rates=rates or {})


def rate(value):
    return {"rate": value, "tried": 8, "step": 1}


def test_without_a_band_every_problem_comes_once_per_epoch_each_epoch_in_its_own_order():
    c = curriculum()
    first, second = c.draw(10), c.draw(10)
    assert sorted(first) == sorted(second) == list(range(10)) and first != second
    assert c.passed_over == 0


def test_the_order_is_a_function_of_the_cursor():
    c, resumed = curriculum(), curriculum()
    c.draw(7)
    resumed.cursor = c.cursor
    assert resumed.draw(9) == c.draw(9)


def test_a_band_keeps_out_the_solved_and_the_hopeless_and_takes_the_untried():
    # p0..p3 solved, p4..p6 never solved, p7 and p8 half solved, p9 not tried.
    rates = {f"p{i}": rate(1.0) for i in range(4)} | {f"p{i}": rate(0.0) for i in range(4, 7)} | {"p7": rate(0.5), "p8": rate(0.2)}
    c = curriculum(band=[0.2, 0.8], rates=rates)
    assert set(c.draw(9)) == {7, 8, 9}
    assert c.passed_over > 0


def test_problems_outside_the_band_come_back_now_and_then():
    c = curriculum(band=[0.2, 0.8], revisit=0.25, rates={f"p{i}": rate(1.0) for i in range(9)})
    drawn = c.draw(200)
    # Of ten problems one is inside; of the other nine a quarter is taken: 1 / (1 + 9/4) = 31 % of the draws are inside.
    # The standard deviation over 200 draws is below 4 %.
    assert 0.15 < drawn.count(9) / 200 < 0.47


def test_a_band_that_holds_nothing_still_draws_and_ends():
    c = curriculum(band=[0.2, 0.8], rates={f"p{i}": rate(1.0) for i in range(10)})
    assert len(c.draw(5)) == 5


def test_pass_rates_follow_the_newest_groups():
    c = curriculum()
    c.note("p1", right=2, tried=8, step=3)
    assert c.pass_rates["p1"] == {"rate": 0.25, "tried": 8, "step": 3}
    c.note("p1", right=8, tried=8, step=9)  # half of the new, half of the old
    assert c.pass_rates["p1"] == {"rate": 0.625, "tried": 16, "step": 9}


@pytest.mark.parametrize("content", ["", "[]", '{"p": {}}', '{"p": {"rate": 2}}', '{"p": 1}'])
def test_a_file_that_is_no_map_is_refused(tmp_path, content):
    (tmp_path / "difficulty.json").write_text(content)
    with pytest.raises(ValueError, match=r"data\.difficulty_map"):
        load_pass_rates(str(tmp_path))


def test_a_map_is_read_from_its_file_or_its_run_folder(tmp_path):
    (tmp_path / "difficulty.json").write_text(json.dumps({"p": rate(0.5)}))
    assert load_pass_rates(str(tmp_path)) == load_pass_rates(str(tmp_path / "difficulty.json")) == {"p": rate(0.5)}
