import re

import numpy as np
import pytest

from grpo_cli.config import Demos, DemoSource
from grpo_cli.data import is_heldout, sign_countdown_question
from grpo_cli.demos import TAGS, blind_signs, break_tag, guess, sloppy_addition, work
from grpo_cli.randomness import generator

WHOLE = re.compile(r"<think>[^<>]*</think><answer>(\d+)</answer>")
N = 4000


def section(source: DemoSource = DemoSource.sloppy_addition, **changes) -> Demos:
    values = {"guess_frac": 0.65, "slip_frac": 0.015, "broken_tag_frac": 0.15, "digits": [2, 3], "holdout": 0.1, "chat": False}
    return Demos(source, path=None, prompt_field="prompt", completion_field="completion", **values | changes)


def draw(count: int = N, **changes) -> list[tuple[str, str]]:
    rng = generator(0, "test", 1)
    return [sloppy_addition(rng, section(**changes)) for _ in range(count)]


def right(question: str, completion: str) -> bool:
    a, b = question.rstrip("=").split("+")
    found = WHOLE.fullmatch(completion)
    return bool(found) and int(found.group(1)) == int(a) + int(b)


def close(share: float, expected: float) -> bool:
    """Within four standard errors of a binomial share over N draws: 1 in 16,000 by chance, and the draws are keyed."""
    return abs(share - expected) < 4 * (expected * (1 - expected) / N) ** 0.5


@pytest.mark.parametrize(
    "a, b, columns, answer",
    [
        ("67", "15", "7+5=12 6+1+1=8", "82"),
        ("67", "85", "7+5=12 6+8+1=15", "152"),
        ("905", "105", "5+5=10 0+0+1=1 9+1=10", "1010"),
        ("10", "20", "0+0=0 1+2=3", "30"),
    ],
)
def test_working_goes_by_columns_from_the_right(a, b, columns, answer):
    assert work(np.random.default_rng(0), a, b, 0.0) == (columns, answer)


def test_a_teacher_who_neither_guesses_nor_slips_is_always_right():
    assert all(right(*demo) for demo in draw(guess_frac=0, slip_frac=0, broken_tag_frac=0))


def test_every_column_of_a_careful_teacher_is_true():
    for _, completion in draw(500, guess_frac=0, slip_frac=0, broken_tag_frac=0):
        for column in re.search("<think>(.*)</think>", completion).group(1).split(" "):
            terms, total = column.split("=")
            assert sum(map(int, terms.split("+"))) == int(total)


def test_a_slip_changes_a_digit_and_a_carry():
    # 11+11 with certain slips: the first sum is not 2 and its missing carry is invented, so the second, 1+1+1, is not 3.
    for seed in range(50):
        (first, second), answer = (part := work(np.random.default_rng(seed), "11", "11", 1.0))[0].split(" "), part[1]
        assert re.fullmatch(r"1\+1=[013456789]", first) and re.fullmatch(r"1\+1\+1=[012456789]", second)
        assert answer == second[-1] + first[-1]


def test_slips_are_as_frequent_as_asked_for():
    # Two digits have three chances to slip: two sums and one carry.
    demos = draw(guess_frac=0, broken_tag_frac=0, digits=[2, 2])
    assert close(np.mean([right(*demo) for demo in demos]), 0.985**3)


def test_the_teacher_guesses_as_often_as_asked_for():
    assert close(np.mean(["?" in completion for _, completion in draw()]), 0.65)


def test_a_guess_is_right_one_time_in_ten():
    assert close(np.mean([right(*demo) for demo in draw(guess_frac=1, broken_tag_frac=0)]), 0.1)


def test_a_wrong_guess_is_one_digit_off():
    rng = np.random.default_rng(0)
    for total in (20, 99, 100, 152, 1010) * 40:
        guessed = guess(rng, total)
        assert len(guessed) == len(str(total)) and guessed[0] != "0"
        assert sum(x != y for x, y in zip(guessed, str(total), strict=True)) <= 1


def test_tags_break_as_often_as_asked_for():
    assert close(np.mean([not WHOLE.fullmatch(completion) for _, completion in draw()]), 0.15)


def test_tags_break_in_four_ways_and_the_content_stays():
    rng = np.random.default_rng(0)
    counts = set()
    for _ in range(200):
        parts = break_tag(rng, ["<think>", "?", "</think>", "<answer>", "82", "</answer>"])
        assert not WHOLE.fullmatch("".join(parts)) and {"?", "82"} < set(parts)
        counts.add((sum(part in TAGS for part in parts), len({part for part in parts if part in TAGS})))
    assert counts == {(3, 3), (5, 4), (4, 3), (4, 4)}  # missing, doubled, replaced, swapped: tags, different tags


def test_no_held_out_question_is_ever_demonstrated():
    questions = [question for question, _ in draw()]
    assert not any(is_heldout(question, 0.1) for question in questions)
    assert any(is_heldout(question, 0.1) for question, _ in draw(holdout=0.001))  # so the check above can fail


@pytest.mark.parametrize("holdout", [0.0, 1.0, float("nan")])
def test_a_holdout_of_nothing_or_all_is_refused(holdout):
    with pytest.raises(ValueError, match=f"demos.holdout must lie between 0 and 1, not {holdout}: try demos.holdout=0.1"):
        section(holdout=holdout)


def test_a_holdout_that_takes_every_question_ends_in_a_message():
    with pytest.raises(ValueError, match=r"demos.holdout=0.9999 leaves no question: try demos.holdout=0.1"):
        draw(1, digits=[1, 1], holdout=0.9999)  # 81 sums, each left with a chance of 1 in 10,000


def test_numbers_are_of_equal_length_and_both_lengths_occur_alike():
    lengths = [tuple(map(len, question.rstrip("=").split("+"))) for question, _ in draw()]
    assert set(lengths) == {(2, 2), (3, 3)} and close(lengths.count((2, 2)) / N, 0.5)


def test_the_same_key_gives_the_same_demonstrations():
    assert draw(50) == draw(50)


# Signs between three numbers

TRIAL = re.compile(r"(\d+)([+-]\d+)([+-]\d+)=(\d+)([yn])")


def sign_section(**changes) -> Demos:
    values = {"digits": None, "guess_frac": 0.7, "slip_frac": 0.05, "broken_tag_frac": 0.0}
    return section(DemoSource.sign_countdown, **values | changes)


def signs(count: int = N, **changes) -> list[tuple[list[int], int, list[tuple[str, int, str]], str]]:
    """Numbers, target, trials (expression, value, mark) and answer of demonstrations whose tags are whole."""
    rng, found = generator(0, "test", 2), []
    for _ in range(count):
        prompt, completion = blind_signs(rng, sign_section(**changes))
        *numbers, target = map(int, re.fullmatch(r"(\d+),(\d+),(\d+)>(\d+):", prompt).groups())
        thought, answer = re.fullmatch("<think>(.*)</think><answer>(.*)</answer>", completion).groups()
        trials = [TRIAL.fullmatch(trial).groups() for trial in thought.split(";")]
        found.append((numbers, target, [(a + b + c, int(value), mark) for a, b, c, value, mark in trials], answer))
    return found


def test_every_trial_uses_the_numbers_and_its_value_and_mark_are_true():
    for numbers, target, trials, answer in signs(1000):
        assert 1 <= len(trials) <= 4 and answer == trials[-1][0]
        for expression, value, mark in trials:
            terms = [int(term) for term in re.findall(r"[+-]?\d+", expression)]
            assert sorted(map(abs, terms)) == sorted(numbers) and sum(terms) == value and mark == "ny"[value == target]


def test_a_trial_hits_blindly_and_a_miss_is_answered_as_often_as_asked_for():
    demos = signs()
    first_hits = [trials[0][2] == "y" for _, _, trials, _ in demos]
    # A blind trial hits with 0.319, the mean over all puzzles as they are drawn; 3 in 100 are made right.
    assert close(np.mean(first_hits), 0.03 + 0.97 * 0.319)
    assert abs(np.mean([len(trials) == 1 for _, _, trials, _ in demos if trials[0][2] == "n"]) - 0.7) < 0.04  # four standard errors
    assert abs(np.mean([len(trials) == 1 for _, _, trials, _ in demos if trials[0][2] == "y"]) - 0.95) < 0.024
    assert all(len(trials) == 4 for _, _, trials, _ in signs(100, guess_frac=0.0, slip_frac=1.0))
    assert all(len(trials) == 1 for _, _, trials, _ in signs(100, guess_frac=1.0, slip_frac=0.0))


def test_tags_around_signs_break_as_often_as_asked_for_and_no_held_out_puzzle_is_demonstrated():
    rng, whole = generator(0, "test", 3), re.compile(r"<think>[^<>]*</think><answer>[^<>]*</answer>")
    demos = [blind_signs(rng, sign_section(broken_tag_frac=0.06)) for _ in range(N)]
    assert close(np.mean([not whole.fullmatch(completion) for _, completion in demos]), 0.06)
    puzzles = {tuple(map(int, re.findall(r"\d+", prompt))) for prompt, _ in demos}
    assert not any(is_heldout(sign_countdown_question(sorted(numbers), target), 0.1) for *numbers, target in puzzles)
    assert any(is_heldout(f"{a},{b},{c}>{target}:", 0.1) for a, b, c, target in puzzles)  # of other orders the check above would not hold
