import torch
from runs import config, rows, train

from grpo_cli.records import Problem, Scores
from grpo_cli.rewards.control import random_totals, shuffled_golds, training_rules


def test_format_only_takes_the_accuracy_rule_out_of_training_alone():
    section = config("reward.control=format_only").reward
    assert {name: rule.weight for name, rule in training_rules(section).items()} == {"accuracy": 0.0, "format": 0.5}
    assert section.rules["accuracy"].weight == 1.0


def test_shuffled_golds_are_all_there_and_none_is_its_own():
    problems = [Problem(f"p{i}", f"{i}+0=", str(i), {"a": i}) for i in range(10)]
    shuffled = shuffled_golds(problems, seed=1)
    assert sorted(p.answer for p in shuffled) == sorted(p.answer for p in problems)
    assert all(new.answer != old.answer and new.answer == str(new.fields["a"]) for new, old in zip(shuffled, problems, strict=True))
    assert [(p.id, p.prompt) for p in shuffled] == [(p.id, p.prompt) for p in problems]
    assert shuffled == shuffled_golds(problems, seed=1) != shuffled_golds(problems, seed=2)


def test_random_totals_are_coins_that_steps_and_attempts_do_not_share():
    zeros = torch.zeros(50, 8)
    scores = Scores({"r": zeros}, zeros, zeros >= 1, [], {}, {}, {}, zeros > 0)
    coins = [random_totals(scores, 1, step, attempt).total_PG for step, attempt in ((1, 0), (1, 1), (2, 0))]
    # 400 coins: the standard deviation of their mean is 0.025
    assert all(set(c.unique().tolist()) == {0, 1} and 0.4 < c.mean() < 0.6 for c in coins)
    assert not coins[0].equal(coins[1]) and not coins[0].equal(coins[2])
    assert coins[0].equal(random_totals(scores, 1, 1, 0).total_PG)


def test_a_control_changes_the_training_reward_and_not_the_evaluation(tmp_path):
    train(tmp_path / "real", "steps=2")
    for control in ("random", "format_only", "shuffled_gold"):
        summary = train(tmp_path / control, "steps=2", f"reward.control={control}")
        assert summary["status"] == "finished"
        assert rows(tmp_path / control, "eval")[0] == rows(tmp_path / "real", "eval")[0]
        assert rows(tmp_path / control, "groups")[0]["rewards"] != rows(tmp_path / "real", "groups")[0]["rewards"]
