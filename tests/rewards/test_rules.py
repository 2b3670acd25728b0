import json
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from grpo_cli.records import Ended, Problem, Sample
from grpo_cli.rewards.rules import NOT_APPLICABLE, numeric, overlong, parse_number, r1_format, working_steps

SHARED = Path(__file__).parents[2] / "../shared/cases/math.jsonl"


def sample(text, gold="12", prompt="7+5=", ended=Ended.eos) -> Sample:
    return Sample(Problem("p", prompt, gold), prompt, text, 9, ended)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12),
        (" 12.\n", 12),
        ("+12", 12),
        ("-5", -5),
        ("\u22125", -5),  # the minus sign of typeset text
        ("1,234", 1234),
        ("-1,234,567.50", Fraction("-1234567.5")),
        ("$5", 5),
        ("-$5", -5),
        ("$-5", -5),
        ("€3.50", Fraction(7, 2)),
        (".5", Fraction(1, 2)),
        ("3/4", Fraction(3, 4)),
        ("-3/4", Fraction(-3, 4)),
        ("1e3", 1000),
        ("2.5E-1", Fraction(1, 4)),
        ("007", 7),
        ("51.0", 51),
        ("-0", 0),
    ],
)
def test_plain_numbers_are_read_exactly(text, value):
    assert parse_number(text) == value


NO_NUMBERS = ["", "five", "12 or 13", "1,23", "1,2345", ",123", "5%", "5 km", "1 1/2", "3/0", "1/2/3", "--5", "+-5", "- 5", "1_000", "0x10"]
NO_NUMBERS += ["inf", "nan", "1e9999", "1e999999999", "12..", ".", "-", "$", "١٢", "5²", "½", "x2", "{5}", "3.5/2", "1e", "5 5"]


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_everything_else_is_no_number(text):
    assert parse_number(text) is None


def test_numbers_of_absurd_length_neither_crash_nor_hang():
    begin = time.monotonic()
    for text in ("9" * 100_000, "1," * 50_000, "9" * 5000 + "/7", "1e" + "9" * 5000, "-" * 100_000, "1/" * 50_000):
        assert parse_number(text) is None
        assert numeric(sample(text), "last_number") == 0.0
        assert numeric(sample(f"<answer>{text}</answer>"), "answer_tag") == 0.0
    assert time.monotonic() - begin < 5
    assert parse_number("9" * 3000) == int("9" * 3000)


@pytest.mark.parametrize(
    ("text", "gold", "right"),
    [
        ("<think>7+5=12</think><answer>12</answer>", "12", True),
        ("<answer> \n12\n </answer>", "12", True),
        ("<answer>12.0</answer>", "12", True),
        ("<answer>1,234</answer>", "1234", True),
        ("<answer>$1,234.</answer>", "1,234", True),
        ("<answer>\u22125</answer>", "-5", True),
        ("<answer>0.75</answer>", "3/4", True),
        ("<answer>-0</answer>", "0", True),
        ("<answer>12</answer> and some words", "12", True),  # the format rule minds
        ("<think>12?</think></think><answer>12</answer>", "12", True),
        ("<answer>13</answer>", "12", False),
        ("<answer>5</answer>", "-5", False),
        ("<answer>12 or 13</answer>", "12", False),
        ("<answer>7+5=12</answer>", "12", False),
        ("<answer>12 apples</answer>", "12", False),
        ("<answer>twelve</answer>", "12", False),
        ("<answer></answer>", "12", False),
        ("", "12", False),
        ("12", "12", False),
        ("<answer>12</answer><answer>12</answer>", "12", False),
        ("<answer>11</answer><answer>12</answer>", "12", False),
        ("<answer>12</answer><answer>13", "12", False),
        ("<answer>12</answer></answer>", "12", False),
        ("<answer><answer>12</answer></answer>", "12", False),
        ("<answer><answer>12</answer>", "12", False),
        ("<think><answer>12</answer></think>", "12", False),
        ("<think><answer>12</answer></think><answer>13</answer>", "12", False),
        ("<think>7+5=12</think><answer>12", "12", False),
        ("<think>7+5=12</think><answer>12</ans", "12", False),
        ("<Answer>12</Answer>", "12", False),
        ("<answer>98765432109876543211</answer>", "98765432109876543210", False),
        ("<answer>98,765,432,109,876,543,210</answer>", "98765432109876543210", True),
        ("<answer>0.30000000000000004</answer>", "0.3", False),
        ("<answer>9007199254740993</answer>", "9007199254740992", False),  # equal as floats
    ],
)
def test_the_answer_tag_must_hold_exactly_the_gold(text, gold, right):
    assert numeric(sample(text, gold), "answer_tag") == float(right)


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("12", "12"),
        ("It is 12.", "12"),
        ("7+5=12", "12"),
        ("7-5", "5"),
        ("a 3-4 vote, or (2)-1", "1"),
        ("x = -5", "-5"),
        ("The answer is \u22125", "-5"),
        ("It costs $1,234.", "1234"),
        ("It costs -$3.50!", "-3.5"),
        ("3/4 of it", "3/4"),
        ("about 1e3", "1000"),
        ("1,2,3", "3"),
        ("12 or 13", "13"),
        ("so...12", "12"),
        ("**12**", "12"),
        ("答案是12。", "12"),
        ("12km", "12"),
        ("12 in terms of x2", "12"),
        ("<think>3</think> 12 <answer></answer>", "12"),
        ("版本 1.2.3", "1.2"),
    ],
)
def test_the_last_number_is_the_one_a_reader_would_take(text, last):
    assert numeric(sample(text, last), "last_number") == 1.0
    assert numeric(sample(text, "77"), "last_number") == 0.0


@pytest.mark.parametrize("text", ["", "no number", "<think>7+5=12</think>", "<think>7+5=12</think> so it is", "1e9999"])
def test_no_stated_number_is_wrong(text):
    assert numeric(sample(text), "last_number") == 0.0


@pytest.mark.parametrize(("text", "right"), [("it is 12", 0.0), ("it is 12.", 0.0), ("it is 12,", 0.0), ("it is 12 ", 1.0), ("12 =", 1.0)])
def test_a_number_cut_off_at_the_token_limit_is_not_taken(text, right):
    assert numeric(sample(text, ended=Ended.length), "last_number") == right
    assert numeric(sample(text, ended=Ended.eos), "last_number") == 1.0


@pytest.mark.parametrize("gold", ["", "\\frac{1}{", "None", "nan", "twelve"])
@pytest.mark.parametrize("text", ["", "<answer></answer>", "<answer>12</answer>", "<answer>\\frac{1}{</answer>", "<answer>nan</answer>"])
def test_an_unusable_gold_is_never_right(gold, text):  # B026
    assert numeric(sample(text, gold), "answer_tag") is NOT_APPLICABLE
    assert numeric(sample(text, gold), "last_number") is NOT_APPLICABLE


@pytest.mark.skipif(not SHARED.exists(), reason="the shared cases are not beside this checkout")
def test_shared_math_cases_with_answer_tags_and_number_golds():
    cases = [json.loads(line) for line in SHARED.read_text().splitlines()]
    seen = []
    for case in cases:
        gold = case["gold"].rpartition("####")[2]
        verdict = numeric(sample(case["completion"], gold), "answer_tag")
        if verdict is not NOT_APPLICABLE and "<answer>" in case["completion"] and "\\boxed" not in case["completion"]:
            assert verdict == float(case["correct"]), case
            seen.append(case["correct"])
        assert not (verdict == 1.0 and not case["correct"]), case
    assert len(seen) >= 3 and set(seen) == {True, False}


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>7+5=12</think><answer>12</answer>", 1.0),
        ("<think>?</think><answer>x</answer>", 1.0),
        ("<think>a\nb</think>\n\n<answer>3</answer>", 1.0),  # B044
        ("\n <think>a</think> <answer>3\n</answer> \n", 1.0),
        ("<think>1 < 2 > 0 <b></think><answer>3</answer>", 1.0),
        ("<think></think><answer>12</answer>", 0.0),
        ("<think>a</think><answer> </answer>", 0.0),
        ("so <think>a</think><answer>12</answer>", 0.0),
        ("<think>a</think> so <answer>12</answer>", 0.0),
        ("<think>a</think><answer>12</answer>.", 0.0),
        ("<answer>12</answer><think>a</think>", 0.0),
        ("<think>a<answer>12</answer></think>", 0.0),
        ("<think>a</think><answer>12", 0.0),
        ("<think>a<answer>12</answer>", 0.0),
        ("a</think><answer>12</answer>", 0.0),
        ("<think>a</think><think>b</think><answer>12</answer>", 0.0),
        ("<think>a</think><answer>1</answer><answer>12</answer>", 0.0),
        ("<think><think>a</think><answer>12</answer>", 0.0),
        ("<THINK>a</THINK><answer>12</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_the_r1_format_is_the_whole_completion(text, score):
    assert r1_format(sample(text)) == score
    assert r1_format(sample(text, ended=Ended.length)) == 0.0


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("sum is 9\n</think>\n<answer>9</answer>", 1.0),  # B043
        ("<think>sum is 9</think><answer>9</answer>", 0.0),
        ("</think><answer>9</answer>", 0.0),
        ("sum is 9 <answer>9</answer>", 0.0),
    ],
)
def test_a_think_tag_opened_by_the_prompt_begins_the_completion(text, score):
    assert r1_format(sample(text, prompt="<|assistant|><think>\n")) == score
    assert r1_format(sample("a</think><answer>9</answer>", prompt="Write <think> first.")) == 0.0


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("7+5=12 6+1+1=9", [(6, 1.0), (14, 0.0)]),
        ("7+5=12</think>1+1=3", [(6, 1.0)]),
        ("007+5=12", [(8, 1.0)]),
        ("no sum, 12=12", NOT_APPLICABLE),
        ("0+" + "9" * 4300 + "=" + "9" * 4300, [(8603, 1.0)]),
        ("0+" + "9" * 4301 + "=" + "9" * 4301 + " 1+1=2", [(8605, 0.0), (8611, 1.0)]),
        ("1+1=" + "2" * 5000, [(5004, 0.0)]),
    ],
    ids=lambda value: str(value)[:30],
)
def test_every_sum_of_the_thought_is_a_step(text, steps):
    assert working_steps(sample(text)) == steps


# Allowed 64, the last 16 of them with a growing penalty: 48 is free, and each token beyond costs 1/16 until 64.
@pytest.mark.parametrize(
    ("tokens", "score"), [(1, 0.0), (48, 0.0), (49, -0.0625), (52, -0.25), (56, -0.5), (63, -0.9375), (64, -1.0), (65, -1.0), (1000, -1.0)]
)
def test_overlong_falls_in_a_line_over_the_buffer(tokens, score):
    assert overlong(replace(sample("a"), tokens=tokens), max_tokens=64, buffer=16) == score


def test_overlong_with_a_buffer_of_all_tokens_falls_from_the_first():
    assert overlong(replace(sample("a"), tokens=3), max_tokens=4, buffer=4) == -0.75


def test_rules_hold_in_linear_time_on_hostile_texts():
    begin = time.monotonic()
    for text in ("<think>" * 20_000, "<answer>" * 20_000, "<think>" + " " * 200_000, "</think>" * 20_000 + "<answer>" * 20_000):
        assert r1_format(sample(text)) == numeric(sample(text)) == 0.0
    assert time.monotonic() - begin < 5
