"""The figures of a held-out evaluation where there is little to measure."""

import math

import pytest
import torch
from runs import raw, rows, train

from grpo_cli import cli
from grpo_cli.evaluation import _with_error
from grpo_cli.rewards import NOT_APPLICABLE
from grpo_cli.stages.grpo import Progress, _closing_lines


def silent(sample, extract):
    return NOT_APPLICABLE


def test_the_standard_error_by_hand():
    # Values 0, 0, 1, 1: sample std 0.57735, over sqrt(4) 0.28868.
    metrics = _with_error("eval/accuracy", torch.tensor([0.0, 0.0, 1.0, 1.0]), 8)
    assert metrics == pytest.approx({"eval/accuracy": 0.5, "eval/accuracy_se": 0.288675, "eval/accuracy_n": 8})


def test_one_problem_has_no_standard_error_and_nothing_shows_one():
    metrics = _with_error("eval/accuracy", torch.tensor([0.5]), 2)
    assert metrics["eval/accuracy"] == 0.5 and math.isnan(metrics["eval/accuracy_se"])
    assert list(cli._metric_lines(metrics | {"eval/rule/a": math.nan})) == [
        "eval/accuracy          0.5000  (n=2)",
        "eval/rule/a            -",
    ]


def test_a_run_with_one_held_out_problem_writes_null_and_shows_no_nan(tmp_path, capsys):
    train(tmp_path, "data.eval.limit=1", "steps=1")
    assert [row["eval/accuracy_se"] for row in raw(tmp_path, "eval")] == [None, None]
    shown = capsys.readouterr().out
    assert "nan" not in shown.lower() and "sampled accuracy" in shown and "standard error" not in shown


def test_the_closing_lines_show_an_error_only_where_it_is_known(tmp_path):
    names = ("eval/accuracy", "eval/accuracy_greedy", "eval/reward")
    for error, shown in ((0.25, "(standard error 0.250, n=4)"), (math.nan, "(n=4)"), (None, "(n=4)")):
        entry = {"step": 1} | {key: value for name in names for key, value in ((name, 0.5), (f"{name}_se", error), (f"{name}_n", 4))}
        progress = Progress(evaluations={"first": entry, "best": entry, "last": entry})
        assert _closing_lines(progress, tmp_path, "adapter", "finished")[1].endswith(shown)


def test_an_accuracy_rule_that_judges_nothing_ends_the_run_at_its_first_evaluation(tmp_path):
    with pytest.raises(ValueError, match=r"^the accuracy rule accuracy does not apply .*: try .*reward\.rules\.accuracy\.fn=package"):
        train(tmp_path, "reward.rules.accuracy.fn=test_evaluation:silent")


def test_an_evaluation_keeps_how_often_each_problem_was_solved(tmp_path):
    train(tmp_path, "steps=3", "data.eval.limit=7")
    evaluations, solved = rows(tmp_path, "eval"), rows(tmp_path, "eval_problems")
    assert [row["step"] for row in solved] == [row["step"] for row in evaluations] == [0, 3]
    for figures, row in zip(evaluations, solved, strict=True):
        assert row["samples"] == 2 and len(row["greedy"]) == 7 and list(row["greedy"]) == list(row["sampled"])
        assert set(row["greedy"].values()) <= {0, 1} and set(row["sampled"].values()) <= {0, 1, 2}
        assert sum(row["greedy"].values()) / 7 == pytest.approx(figures["eval/accuracy_greedy"])
        assert sum(row["sampled"].values()) / 14 == pytest.approx(figures["eval/accuracy"])
    assert solved[0]["sampled"].keys() == solved[1]["sampled"].keys() and "eval_problems" not in evaluations[0]
