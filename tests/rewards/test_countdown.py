import json
import re
import time
from pathlib import Path

import pytest

from grpo_cli.records import Ended, Problem, Sample
from grpo_cli.rewards.countdown import countdown
from grpo_cli.rewards.rules import NOT_APPLICABLE

SHARED = Path(__file__).parents[2] / "../shared/data/countdown"


def judged(text, nums=(6, 4, 3), target="18", ended=Ended.eos):
    return countdown(Sample(Problem("p", "?", target, {"nums": nums}), "?", text, 9, ended))


@pytest.mark.parametrize(
    ("expression", "score"),
    [
        ("(4 * 3) + 6", 1.0),
        ("6+3*4", 1.0),
        (" 6\n+ 3 * 4 ", 1.0),
        ("6 + 3 \u00d7 4", 1.0),
        ("((6)) + ((3) * (4))", 1.0),
        ("-(-6 - 3 * 4)", 1.0),
        ("6 + 4 * 3 = 18", 0.0),
        ("18", 0.0),
        ("6 * 3", 0.0),  # 4 is missing
        ("6 * 3 + 4 - 4", 0.0),  # 4 twice
        ("6 * 3 * 1 + 0 * 4", 0.0),  # 1 and 0 were not given
        ("(6 + 4) * 3", 0.0),  # 30
        ("3 + 4 + 6", 0.0),
        ("6 * 3 ** 4", 0.0),
        ("6 + 36 / 3", 0.0),
        ("64 / 3", 0.0),
        ("6 // 4 * 3 + 15", 0.0),
        ("6 + 4 * 3 # 18", 0.0),
        ("6 + 4 * 3, 18", 0.0),
        ("6 + 4 * 3.0", 0.0),
        ("6 + 4 * 0x3", 0.0),
        ("6 + 4 * 3e0", 0.0),
        ("6 + 4 * 03", 0.0),
        ("6 + 4 * ٣", 0.0),
        ("6 4 3", 0.0),
        ("6(3)+4", 0.0),
        ("6 + 4 * 3)", 0.0),
        ("+6 + 4 * 3", 0.0),
        ("(6 4) * 3", 0.0),
        ("6 / (4 - 4) * 3", 0.0),
        ("__import__('os').getpid()", 0.0),
        ("[6 + 4 * 3][0]", 0.0),
        ("x", 0.0),
        ("True", 0.0),
        ("", 0.0),
        ("99**99**99", 0.0),  # hangs a reward that evaluates it
        ("9" * 200, 0.0),
        ("9" * 100_000, 0.0),
        ("(" * 99 + "6" + ")" * 99, 0.0),
        ("(" * 100_000, 0.0),
        ("-" * 190 + "6", 0.0),
        ("6" + "\t" * 100_000 + "+ 4 * 3", 1.0),
    ],
)
def test_an_expression_uses_each_number_once_and_makes_the_target(expression, score):
    begin = time.monotonic()
    assert judged(f"<think>?</think><answer>{expression}</answer>") == score
    assert time.monotonic() - begin < 1


@pytest.mark.parametrize(
    ("expression", "score"), [("4+6-8", 1.0), ("6 \u2212 8 + 4", 1.0), ("8*6/24", 0.0), ("8-6*4/4", 0.0), ("8/4*(6-5)", 0.0)]
)
def test_only_the_operators_asked_for_are_paid(expression, score):
    numbers = tuple(map(int, re.findall("[0-9]+", expression)))
    text = f"<answer>{expression}</answer>"
    assert countdown(Sample(Problem("p", "?", "2", {"nums": numbers}), "?", text, 9, Ended.eos)) == 1.0
    assert countdown(Sample(Problem("p", "?", "2", {"nums": numbers}), "?", text, 9, Ended.eos), operators="+-") == score


@pytest.mark.parametrize(
    "text",
    [
        "6 + 4 * 3",
        "<think><answer>6 + 4 * 3</answer></think>",
        "<answer>6 + 4 * 3</answer><answer>6 + 4 * 3</answer>",
        "<answer>6 + 4 * 3",
        "6 + 4 * 3</answer>",
        "<answer><answer>6 + 4 * 3</answer>",
        "<answer>6</answer> + 4 * 3",
        r"\boxed{6 + 4 * 3}",
    ],
)
def test_an_expression_outside_of_one_answer_tag_is_not_paid(text):
    assert judged(text) == 0.0


@pytest.mark.parametrize(
    ("expression", "nums", "target", "score"),
    [
        ("8 / (3 - 8 / 3)", [8, 3, 8, 3], "24", 1.0),  # 8 / (1/3): a float gives 23.999999999999989
        ("8 / (3 - 8 / 3)", [8, 3, 3], "24", 0.0),
        ("29 - 49 / 49", (49, 29, 49), "28", 1.0),
        ("29 - 49 / 49", (49, 29), "28", 0.0),
        ("1 / 3", (1, 3), "1/3", 1.0),
        ("1 / 3", (1, 3), "0.3333333333333333", 0.0),
        ("99999999999999999 + 1", (99999999999999999, 1), "100000000000000000", 1.0),
        ("99999999999999999 + 1", (99999999999999999, 1), "100000000000000001", 0.0),
    ],
)
def test_values_are_exact_and_repeated_numbers_count(expression, nums, target, score):
    assert judged(f"<answer>{expression}</answer>", nums, target) == score


def test_a_row_without_numbers_or_target_does_not_apply():
    assert judged("<answer>6</answer>", ()) is NOT_APPLICABLE
    assert judged("<answer>6</answer>", (6,), "") is NOT_APPLICABLE
    assert countdown(Sample(Problem("p", "?", "6"), "?", "<answer>6</answer>", 9, Ended.eos)) is NOT_APPLICABLE


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data sets are not beside this checkout")
def test_every_shared_solution_is_paid_and_never_for_another_target():
    for row in map(json.loads, (SHARED / "test.jsonl").read_text().splitlines()):
        text = f"<think>?</think>\n<answer>{row['solution']}</answer>"
        assert judged(text, row["nums"], str(row["target"])) == 1.0, row
        assert judged(text, row["nums"], str(row["target"] + 1)) == 0.0, row
        assert judged(text, row["nums"][1:], str(row["target"])) == 0.0, row
