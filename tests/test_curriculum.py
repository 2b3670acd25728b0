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
    for _ in range(3):
        assert sorted(c.draw(3)) == [7, 8, 9]
    assert c.passed_over > 0


def test_problems_outside_the_band_come_back_now_and_then():
    c = curriculum(band=[0.2, 0.8], revisit=0.25, rates={f"p{i}": rate(1.0) for i in range(5)})
    drawn = [c.draw(1)[0] for _ in range(200)]
    # The standard deviation of the share over 200 draws is 0.03.
    assert 0.13 < sum(number < 5 for number in drawn) / 200 < 0.37


def test_a_band_that_holds_too_few_draws_the_nearest_to_it_and_no_problem_twice():
    rates = {"p0": rate(0.5), "p1": rate(0.1), "p2": rate(0.85), "p3": rate(0.0), "p4": rate(1.0)}
    c = curriculum(n=5, band=[0.2, 0.8], rates=rates)
    assert sorted(c.draw(1)) == [0]
    assert sorted(c.draw(3)) == [0, 1, 2]
    assert sorted(set(c.draw(7))) == [0, 1, 2, 3, 4]  # more than there are: then some come twice


def test_pass_rates_follow_the_newest_groups():
    c = curriculum()
    c.note("p1", right=2, tried=8, step=3)
    assert c.pass_rates["p1"] == {"rate": 0.25, "tried": 8, "step": 3}
    c.note("p1", right=8, tried=8, step=9)  # half of the new, half of the old
    assert c.pass_rates["p1"] == {"rate": 0.625, "tried": 16, "step": 9}


NO_MAPS = ["", "[]", "3", "null", "{}", '{"p": {}}', '{"p": 1}', '{"p": [0.5, 8, 1]}', "[" * 100_000]
NO_MAPS += [f'{{"p": {{"rate": {rate}, "tried": 8, "step": 1}}}}' for rate in ("2", "-0.1", "NaN", "Infinity", '"0.5"', "true", "null")]
COUNTS = [("-1", "1"), ("8.5", "1"), ("true", "1"), ("8", '"1"')]
NO_MAPS += [f'{{"p": {{"rate": 0.5, "tried": {tried}, "step": {step}}}}}' for tried, step in COUNTS]
NO_MAPS += ['{"p": {"rate": 0.5, "tried": 8}}', '{"p": {"rate": 0.5, "step": 8}}', '{"q": {"rate": 0.5, "tried": 8, "step": 1}, "p": null}']


@pytest.mark.parametrize("content", NO_MAPS, ids=lambda text: text[:50])
def test_a_file_that_is_no_map_is_refused(tmp_path, content):
    (tmp_path / "difficulty.json").write_text(content)
    with pytest.raises(ValueError, match=r"^data\.difficulty_map=.*: not the .*: try data\.difficulty_map=RUN_FOLDER$") as caught:
        load_pass_rates(str(tmp_path))
    assert "Error(" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"No such file or directory.*try data\.difficulty_map=RUN_FOLDER"):
        load_pass_rates(str(tmp_path / "nowhere"))


def test_a_map_of_other_problems_is_refused_and_one_known_problem_is_enough():
    with pytest.raises(ValueError, match=r"data\.difficulty_map: none of its 2 problems is among this run's 10 training problems"):
        curriculum(rates={"q1": rate(0.5), "q2": rate(0.5)})
    assert curriculum(rates={"q1": rate(0.5), "p9": rate(0.5)}).pass_rates["p9"] == rate(0.5)


def test_a_map_is_read_from_its_file_or_its_run_folder(tmp_path):
    (tmp_path / "difficulty.json").write_text(json.dumps({"p": rate(0.5)}))
    assert load_pass_rates(str(tmp_path)) == load_pass_rates(str(tmp_path / "difficulty.json")) == {"p": rate(0.5)}
