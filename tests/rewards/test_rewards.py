import math
import threading
from fractions import Fraction

import numpy as np
import pytest

from grpo_cli.config import Control, Gate, GateMode, Reward, Rule, RuleKind
from grpo_cli.records import END, Completion, EncodedProblem, Ended, Group, Problem, Scores
from grpo_cli.rewards import NOT_APPLICABLE, samples_of, tally
from grpo_cli.rewards.calling import LoadedRule, judge, load_rules
from grpo_cli.rewards.rules import numeric

R1 = {"accuracy": {"fn": "numeric", "args": {"extract": "answer_tag"}}, "format": {"fn": "r1_format", "weight": 0.5}}


def group(*texts, gold="12", name="p1") -> Group:
    encoded = EncodedProblem(Problem(name, "7+5=", gold), [1, 2], "7+5=")
    return Group(encoded, [Completion([5, 6, 7], text, [0.0] * 3, Ended.eos) for text in texts])


def section(rules: dict, accuracy: str, **changes) -> Reward:
    values = {"timeout_s": 10.0, "memory_gib": 2.0, "workers": 1, "max_error_frac": 1.0, "gate": Gate(GateMode.off, 1)}
    return Reward(**({"rules": rules, "accuracy": accuracy, "control": Control.none} | values | changes))


def by_text(table, weight=1.0, **settings) -> LoadedRule:
    return LoadedRule(lambda sample: table[sample.text], Rule("table", weight, **settings))


def score(rules: dict[str, LoadedRule], groups: list[Group], accuracy: str) -> Scores:
    """The verdicts reached in this process, so that a rule may be a lambda."""
    samples = samples_of(groups)
    verdicts_B = [dict(judge(rules, sample, {})) for sample in samples]
    return tally({name: loaded.rule for name, loaded in rules.items()}, samples, verdicts_B, accuracy, len(groups))


def test_the_total_is_the_weighted_sum_in_order():
    rules = load_rules(section(R1, "accuracy").rules)
    right, wrong = "<think>a</think><answer>12</answer>", "<think>a</think><answer>13</answer>"
    scores = score(rules, [group(right, wrong, "12"), group(wrong, "<answer>12</answer>", right)], "accuracy")
    assert scores.rule_PG["accuracy"].tolist() == [[1, 0, 0], [0, 1, 1]]
    assert scores.rule_PG["format"].tolist() == [[1, 1, 0], [1, 0, 1]]
    assert scores.total_PG.tolist() == [[1.5, 0.5, 0], [0.5, 1, 1.5]]
    assert scores.right_PG.tolist() == [[True, False, False], [False, True, True]]
    assert scores.not_applicable == {"accuracy": 0, "format": 0}
    assert str(scores.total_PG.dtype) == "torch.float32"


def test_a_rule_that_does_not_apply_is_left_out_and_counted():  # B025
    f1 = by_text({"a": 1, "b": 0, "c": 1, "d": 0})
    f2 = by_text({"a": NOT_APPLICABLE, "b": 1, "c": NOT_APPLICABLE, "d": 0}, weight=0.5)
    scores = score({"f1": f1, "f2": f2}, [group("a", "b", "c", "d")], "f1")
    assert scores.total_PG.tolist() == [[1, 0.5, 1, 0]]
    assert scores.not_applicable == {"f1": 0, "f2": 2}
    assert [math.isnan(value) for value in scores.rule_PG["f2"][0].tolist()] == [True, False, True, False]


def test_a_sample_without_any_rule_gets_nothing_and_is_not_right():  # B026
    rules = {"accuracy": LoadedRule(numeric, Rule("numeric"))}
    scores = score(rules, [group("<answer>12</answer>", "", gold="\\frac{1}{")], "accuracy")
    assert scores.total_PG.tolist() == [[0, 0]] and scores.right_PG.tolist() == [[False, False]]
    assert scores.not_applicable == {"accuracy": 2}


def test_weights_may_be_negative_or_zero():
    rules = {"long": by_text({"a": 2.0, "b": 3}, weight=-0.5), "seen": by_text({"a": 7, "b": 8}, weight=0.0)}
    scores = score(rules, [group("a", "b")], "seen")
    assert scores.total_PG.tolist() == [[-1, -1.5]] and scores.rule_PG["seen"].tolist() == [[7, 8]]


@pytest.mark.parametrize("value", [True, 1, 1.0, np.float32(1), np.int64(1), Fraction(1)])
def test_any_real_number_is_a_score(value):
    assert score({"r": by_text({"a": value})}, [group("a")], "r").total_PG.tolist() == [[1.0]]


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf, 1e39, 10**400, [1.0], (1.0, 0.0), [], "1", 1j, {"score": 1}])
def test_a_wrong_score_is_an_error_that_names_rule_problem_and_completion(value):
    scores = score({"mine": by_text({"a": value, "b": 1.0}, on_error=-2.0)}, [group("b", "a", name="train:17")], "mine")
    assert scores.total_PG.tolist() == [[1.0, -2.0]] and scores.errors == {"mine": 1}
    message = scores.examples["mine"]
    assert "'mine' returned" in message and "train:17" in message and "'a'" in message and "NOT_APPLICABLE" in message


def test_a_rule_that_raises_is_an_error_that_shows_a_cut_completion():
    def broken(sample):
        return {}["key"]

    scores = score({"mine": LoadedRule(broken, Rule("broken"))}, [group("begin" + "x" * 9999 + "end")], "mine")
    assert scores.total_PG.tolist() == [[0.0]] and scores.errors == {"mine": 1} and not scores.right_PG.any()
    message = scores.examples["mine"]
    assert "'mine' raised KeyError: 'key'; problem p1, completion 'begin" in message and message.endswith("end'") and len(message) < 500


def test_a_gated_rule_is_called_only_where_its_gate_passes():
    called = []

    def bonus(sample):
        called.append(sample.text)
        return 0.5

    rules = {"right": by_text({"a": 1.0, "b": 0.9, "c": NOT_APPLICABLE, "d": None}), "bonus": LoadedRule(bonus, Rule("b", gate="right"))}
    scores = score(rules, [group("a", "b", "c", "d")], "right")
    assert scores.rule_PG["bonus"].tolist() == [[0.5, 0, 0, 0]] and called == ["a"]
    assert scores.not_applicable == {"right": 1, "bonus": 0} and scores.errors == {"right": 1, "bonus": 0}


def test_totals_beyond_float32_are_refused():
    with pytest.raises(ValueError, match=r"add up to 1e\+40.*problem p1"):
        score({"r": by_text({"a": 1e30}, weight=1e10)}, [group("a")], "r")


def test_scoring_gives_the_same_in_a_thread():  # B027
    found = []
    rules, groups = load_rules(section(R1, "accuracy").rules), [group("<think>a</think><answer>12</answer>")]
    thread = threading.Thread(target=lambda: found.append(score(rules, groups, "accuracy").total_PG.tolist()))
    thread.start()
    thread.join()
    assert found == [[[1.5]]]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A user's folder, with modules of rules in it."""
    (tmp_path / "my_rules_a.py").write_text(
        "def shorter(sample, limit=10):\n    return float(sample.tokens < limit)\n\n\n"
        "def batched(prompts, completions, **kwargs):\n    return [0.0] * len(completions)\n\n\nTHRESHOLD = 3\n"
    )
    (tmp_path / "my_rules_b.py").write_text("import package_that_is_absent\n")
    (tmp_path / "my_rules_c.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nowhere"])


def loaded(**rule) -> LoadedRule:
    return load_rules(section({"mine": rule}, "mine").rules)["mine"]


def test_a_rule_of_the_users_own_is_found_in_the_current_folder(here):
    rule = loaded(fn="my_rules_a:shorter", weight=2, args={"limit": 4})
    assert score({"mine": rule}, [group("a")], "mine").total_PG.tolist() == [[2.0]]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"fn": "numerics"}, r"reward\.rules\.mine\.fn=numerics is not a rule \(there are: numeric, math, .*classifier\).*fn=numeric$"),
        ({"fn": "my_rules_a.shorter"}, r"is not a rule .*package\.module:function"),
        ({"fn": "my_rules_z:shorter"}, "there is no module my_rules_z"),
        ({"fn": "my_rules_a.sub:shorter"}, "importing my_rules_a.sub failed|there is no module my_rules_a.sub"),
        ({"fn": "my_rules_b:shorter"}, "importing my_rules_b failed: ModuleNotFoundError: No module named 'package_that_is_absent'"),
        ({"fn": "my_rules_c:shorter"}, "importing my_rules_c failed: ZeroDivisionError"),
        ({"fn": "my_rules_a:short"}, r"my_rules_a\.py has no 'short'; did you mean shorter"),
        ({"fn": "my_rules_a:"}, "has no ''"),
        ({"fn": ":shorter"}, "importing  failed"),
        ({"fn": "my_rules_a.py:shorter"}, r"try reward\.rules\.mine\.fn=my_rules_a:shorter$"),
        ({"fn": "./rules/mine.py:shorter"}, r"try reward\.rules\.mine\.fn=rules\.mine:shorter$"),
        (
            {"fn": "overlong", "args": {"max_tokens": "abc", "buffer": 5}},
            r"^reward\.rules\.mine\.args: .* not max_tokens=abc, buffer=5: try",
        ),
        ({"fn": "overlong", "args": {"max_tokens": None, "buffer": 5}}, "not max_tokens=None, buffer=5: try"),
        ({"fn": "overlong", "args": {"max_tokens": 9, "buffer": 0}}, "not max_tokens=9, buffer=0: try"),
        ({"fn": "overlong", "args": {"max_tokens": 9, "buffer": -1}}, "not max_tokens=9, buffer=-1: try"),
        ({"fn": "overlong", "args": {"max_tokens": 9, "buffer": 10}}, "not max_tokens=9, buffer=10: try"),
        ({"fn": "overlong", "args": {"max_tokens": 9, "buffer": True}}, "not max_tokens=9, buffer=True: try"),
        ({"fn": "overlong", "args": {"max_tokens": 9, "buffer": math.nan}}, "not max_tokens=9, buffer=nan: try"),
        ({"fn": "my_rules_a:THRESHOLD"}, "is a int, not a function"),
        ({"fn": "my_rules_a:batched"}, r"batched\(prompts, completions, \*\*kwargs\) cannot be called with one sample"),
        ({"fn": "my_rules_a:shorter", "args": {"limt": 3}}, "unexpected keyword argument 'limt'"),
        ({"fn": "numeric", "args": {"extract": "boxed"}}, r"args\.extract=boxed is none of answer_tag, last_number: try"),
    ],
)
def test_a_rule_that_cannot_be_loaded_is_refused_at_once(here, rule, message):
    with pytest.raises(ValueError, match=message):
        loaded(**rule)


def test_a_rule_for_outcomes_judges_each_step_of_a_split_completion():
    def has_digit(sample):
        return NOT_APPLICABLE if sample.text == "skip" else float(any(c.isdigit() for c in sample.text))

    always = LoadedRule(lambda sample: 1.0, Rule("right"))
    rules = {"right": always, "steps": LoadedRule(has_digit, Rule("steps", 0.5, kind=RuleKind.process, split=r"\n+"))}
    scores = score(rules, [group("a1\n\nb\n \nskip\nc3", "\n\n")], "right")
    # steps: a1 ends at 2, b at 5, skip does not apply, c3 ends at 15; the second completion has no step at all
    assert scores.steps_B == [[(2, 0.5), (5, 0.0), (15, 0.5), (END, 1.0)], [(END, 1.0)]]
    assert scores.rule_PG["steps"][0, 0].item() == pytest.approx(2 / 3) and scores.not_applicable["steps"] == 1
