import shutil
from pathlib import Path

import pytest
from runs import config, train
from test_rewards import section

from grpo_cli.data import load_problems
from grpo_cli.records import Problem
from grpo_cli.rewards import Rules, gate

SHARED = Path(__file__).parents[2] / "../shared/data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data sets are not beside this checkout")
needs_sandbox = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


def substring(sample, extract=""):
    return float(sample.problem.answer in sample.text)


def always(sample, extract=""):
    return 1.0


def never(sample, extract=""):
    return 0.0


def breaks_on_nothing(sample):
    return float(sample.text.split()[0] == "x")


def pays_length(sample):
    return float(sample.tokens)


def found(*overrides):
    cfg = config(*overrides)
    with Rules(cfg.reward) as rules:
        return gate.check(rules, load_problems(cfg.data)[0][: cfg.reward.gate.problems])


def test_the_r1_rules_pay_the_gold_answer_and_no_trick():
    report = found("reward=r1")
    ok, line = gate.verdict(report)
    assert ok and report["gold_refused"] == report["odd_refused"] == report["tricks_paid"] == 0
    assert report["problems"] == 8 and report["expected_format"] == "<answer> tags" and "tricks paid 0%" in line


@pytest.mark.parametrize(
    ("rule", "kinds"),
    [
        ("substring", {"all candidates listed", "the gold in the thought, another as the answer"}),
        ("always", {"nothing", "the question again", "format only", "a ramble", "an appeal", "a near miss"}),
    ],
)
def test_a_planted_rule_is_found(rule, kinds):
    report = found(f"reward.rules.accuracy.fn=test_gate:{rule}")
    ok, line = gate.verdict(report)
    assert not ok and kinds <= {kind for kind, count in report["paid_by_kind"].items() if count == 8}
    assert "PAID WRONGLY" in line and all(f"{kind} (8 of 8)" in line for kind in kinds) and report["examples"]


def test_a_rule_that_refuses_every_right_answer_is_found():
    report = found("reward.rules.accuracy.fn=test_gate:never")
    assert report["gold_refused"] == 1 and not gate.verdict(report)[0]


def test_a_total_that_pays_a_ramble_more_than_the_answer_is_found():
    report = found("+reward.rules.long.fn=test_gate:pays_length", "+reward.rules.long.weight=0.1")
    assert report["paid_by_kind"]["a ramble"] == 8 and not gate.verdict(report)[0]


def test_a_rule_that_raises_on_a_trick_is_found():
    report = found("+reward.rules.mine.fn=test_gate:breaks_on_nothing")
    ok, line = gate.verdict(report)
    assert not ok and "rule 'mine' raised IndexError" in line


def test_problems_without_gold_answers_are_not_judged():
    with Rules(section({"mine": {"fn": "test_gate:always"}}, "mine")) as rules:
        report = gate.check(rules, [Problem("p", "say something", "")])
    assert report == {} and gate.verdict(report)[0]


def test_texts_of_gold_answers_are_tried_with_another_problems_answer():
    problems = [Problem("p", "which city?", "Rome"), Problem("q", "which sea?", "Baltic")]
    with Rules(section({"mine": {"fn": "test_gate:substring"}}, "mine")) as rules:
        report = gate.check(rules, problems)
    assert report["paid_by_kind"]["a near miss"] == 0 and report["paid_by_kind"]["all candidates listed"] == 2


def test_the_gate_warns_or_refuses_and_is_in_the_summary(tmp_path):
    planted = ["reward.rules.accuracy.fn=test_gate:always", "steps=1"]
    summary = train(tmp_path / "warned", *planted)
    assert summary["status"] == "finished" and summary["gate"]["tricks_paid"] > 0.5
    with pytest.raises(ValueError, match=r"PAID WRONGLY.*reward\.gate\.mode=warn"):
        train(tmp_path / "refused", *planted, "reward.gate.mode=refuse")
    assert "gate" not in train(tmp_path / "off", *planted, "reward.gate.mode=off")


@needs_shared
@pytest.mark.parametrize(
    ("data", "file", "reward"),
    [
        ("gsm8k", "gsm8k/test.jsonl", "r1"),
        ("gsm8k", "gsm8k/test.jsonl", "math"),
        ("svamp", "svamp/SVAMP.json", "r1"),
        ("math", "math500/test.jsonl", "math"),
        ("countdown", "countdown/train.jsonl", "countdown"),
        pytest.param("mbpp", "mbpp/sanitized-mbpp.json", "code", marks=needs_sandbox),
        pytest.param("humaneval", "humaneval/HumanEval.jsonl.gz", "code", marks=needs_sandbox),
    ],
)
def test_the_default_reward_of_a_data_set_pays_its_golds_and_no_trick(data, file, reward):
    report = found(f"data={data}", f"data.path={SHARED / file}", f"reward={reward}", "reward.gate.problems=4", "data.train.limit=40")
    assert report["problems"] == 4 and report["gold_refused"] == 0, report
    assert report["tricks_paid"] == 0 and not report["errors"], report
