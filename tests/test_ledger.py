"""Where the completions went. That every run adds up, step by step, is checked by runs.train itself."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runs import config, raw, rows, train

from grpo_cli.advantages import outcome_advantages
from grpo_cli.config import Advantage, Std
from grpo_cli.ledger import MEASURES, PARTS, book, opened, partition, sentence
from grpo_cli.records import Scores


def scores_of(total_PG, right_PG, stand_in_PG) -> Scores:
    return Scores({}, torch.tensor(total_PG), torch.tensor(right_PG), [], {}, {}, {}, torch.tensor(stand_in_PG))


def rewarded(scores: Scores, advantage: Advantage) -> torch.Tensor:
    return outcome_advantages(scores.total_PG, advantage, Std.sample).reshape(-1, 1).expand(-1, 3)


def test_every_part_has_its_completions():
    # Groups of two: mixed, all right, all wrong, paid alike, then one with a masked and one with an unjudged completion.
    right_PG = [[True, False], [True, True], [False, False], [True, False], [True, False], [False, False]]
    total_PG = [[1.0, 0.0], [1.5, 1.5], [0.0, 0.0], [0.5, 0.5], [1.0, 0.0], [0.0, 0.5]]
    scores = scores_of(total_PG, right_PG, [[False, False]] * 4 + [[True, False], [False, True]])
    in_loss_B = torch.tensor([True] * 8 + [False, True, True, True])
    parts_B = partition(scores, rewarded(scores, Advantage.group_std), in_loss_B)
    assert parts_B == [
        *("trained", "trained", "all_right", "all_right", "all_wrong", "all_wrong", "tied", "tied"),
        *("truncated", "trained", "trained", "unscored"),
    ]
    # Under a baseline of the whole step the groups of equal rewards have a gradient as well.
    assert set(partition(scores, rewarded(scores, Advantage.reinforce_pp), in_loss_B)) == {"trained", "truncated", "unscored"}


@st.composite
def steps(draw):
    """One step: scores, what is in the loss, lengths, and the lengths of what was filtered."""
    P, G = draw(st.integers(1, 4)), draw(st.integers(2, 4))
    grid = lambda cell: draw(st.lists(st.lists(cell, min_size=G, max_size=G), min_size=P, max_size=P))  # noqa: E731
    scores = scores_of(grid(st.sampled_from([0.0, 0.5, 1.0])), grid(st.booleans()), grid(st.booleans()))
    lengths_B = draw(st.lists(st.integers(1, 50), min_size=P * G, max_size=P * G))
    in_loss_B = torch.tensor(draw(st.lists(st.booleans(), min_size=P * G, max_size=P * G)))
    return scores, in_loss_B, lengths_B, draw(st.lists(st.integers(1, 50), max_size=8))


@given(st.lists(steps(), min_size=1, max_size=3), st.sampled_from(list(set(Advantage) - {Advantage.process})))
def test_the_parts_add_up_to_the_whole_and_each_completion_is_in_one(drawn, advantage):
    totals, everything = opened(), dict.fromkeys(MEASURES, 0)
    for scores, in_loss_B, lengths_B, filtered in drawn:
        rewarded_BT = rewarded(scores, advantage)
        parts_B = partition(scores, rewarded_BT, in_loss_B)
        row = book(totals, parts_B, lengths_B, filtered, {"rollout": 2.0, "update": 3.0})
        for measure, size in zip(MEASURES, (len(lengths_B + filtered), sum(lengths_B + filtered), 2.0, 3.0), strict=True):
            everything[measure] += size
            assert sum(row[f"ledger/{measure}/{part}"] for part in PARTS) == pytest.approx(everything[measure])
        assert row["ledger/update_s/filtered"] == 0
        G = scores.total_PG.shape[1]
        for number, part in enumerate(parts_B):
            group = slice(number - number % G, number - number % G + G)
            right_G = scores.right_PG[number // G]
            meets = {
                "truncated": not in_loss_B[number],
                "unscored": bool(scores.stand_in_PG.flatten()[number]),
                "trained": bool((rewarded_BT[group] != 0).any()),
                "all_right": bool(right_G.all()),
                "all_wrong": not right_G.any(),
                "tied": True,
            }
            assert part == next(name for name, met in meets.items() if met)


def failing(sample):
    """Raises on some of the completions."""
    return 1.0 / (len(sample.text) % 3)


def opposite(sample):
    """Pays a wrong answer what the accuracy rule pays a right one."""
    return 0.0 if f"<answer>{sample.problem.answer}</answer>" in sample.text else 1.0


ALIKE = ["+reward.rules.opposite.fn=test_ledger:opposite", "reward.rules.format.weight=0"]
RUNS = {
    "dynamic sampling": (["algorithm.resample_tries=4"], {"trained", "filtered"}),
    "a mask": (["algorithm.truncated=mask", "rollout.max_new_tokens=14"], {"trained", "truncated"}),
    "a rule that fails": (["+reward.rules.failing.fn=test_ledger:failing", "reward.max_error_frac=1"], {"trained", "unscored"}),
    "right and wrong paid alike": ([*ALIKE, "kl.placement=reward", "kl.estimator=k1"], {"tied", "all_wrong"}),
    "no weights": (["reward.rules.accuracy.weight=0", "reward.rules.format.weight=0"], {"unscored"}),
    "a control": (["reward.control=random"], {"trained"}),
    "process": (["algorithm.advantage=process", "+reward.rules.working={fn: working_steps, kind: process}"], {"trained"}),
}


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_fills_the_parts_that_its_config_makes(tmp_path, kind):
    words, expected = RUNS[kind]
    train(tmp_path, *words, "steps=3", "eval_every=3", "save_every=3")
    last = raw(tmp_path, "metrics")[-1]
    assert expected <= {part for part in PARTS if last[f"ledger/completions/{part}"]}
    if kind in ("right and wrong paid alike", "no weights"):
        assert last["ledger/completions/trained"] == 0 == last["reward/signal_frac"]


def test_the_parts_agree_with_the_verdicts_on_the_groups(tmp_path, capsys):
    train(tmp_path)
    groups = rows(tmp_path, "groups")
    for row in rows(tmp_path, "metrics"):
        past = [g for g in groups if g["step"] <= row["step"]]
        for part in ("all_right", "all_wrong", "tied"):
            assert row[f"ledger/completions/{part}"] == 4 * sum(g["reward_std"] == 0 and g["verdict"] == part for g in past)
        own = [g["reward_std"] > 0 for g in past if g["step"] == row["step"]]
        assert row["reward/signal_frac"] == sum(own) / len(own)
    assert "\nsignal             " in capsys.readouterr().out


def metrics_of(*counts: dict[str, int]) -> list[dict]:
    """Rows of running totals from what each step had."""
    totals, found = dict.fromkeys(PARTS, 0), []
    for step, of_step in enumerate(counts, 1):
        totals = {part: total + of_step.get(part, 0) for part, total in totals.items()}
        found.append({"step": step} | {f"ledger/completions/{part}": total for part, total in totals.items()})
    return found


def said(*counts: dict[str, int]) -> str:
    return sentence(metrics_of(*counts), Path("outputs/grpo/1"), config().reward, 8, 64)


BAND = "'data.difficulty=[0.2,0.8]' data.difficulty_map=outputs/grpo/1"


def test_the_sentence_says_from_which_step_on_most_completions_taught_nothing_and_what_to_do():
    # 4 steps with 1 of 10 all right, 6 with 8 of 10: 52 of 100, and 48 of 60 from step 5 on.
    text = said(*[{"trained": 8, "all_right": 1, "tied": 1}] * 4, *[{"trained": 2, "all_right": 8}] * 6)
    advice = f"raise the difficulty ({BAND}) or stop earlier (steps=5)"
    assert text == f"56 % of completions gave no reward gradient: 52 % all right (80 % from step 5 on), 4 % tied; {advice}"


def test_the_sentence_names_no_step_where_the_numbers_show_none():
    text, advice = said(*[{"trained": 3, "all_right": 7}] * 10), f"raise the difficulty ({BAND}) or stop earlier (stop.patience=2)"
    assert text == f"70 % of completions gave no reward gradient: 70 % all right; {advice}"
    noisy = [{"trained": 5 + k, "all_wrong": 5 - k} for k in (1, -1, 1, -1, 1, -1, 1, -1, -1)]
    assert "from step" not in said(*noisy) and "group_size.samples_per_prompt=16" in said(*noisy)
    assert "from step" not in said({"trained": 7, "all_right": 1, "tied": 2}, {"trained": 5, "all_right": 5})  # half is not most
    assert "from step" not in said(*[{"trained": 10}] * 6, *[{"trained": 2, "all_right": 8}] * 3, *[{"trained": 10}] * 11, *[{"tied": 20}])


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("tied", "30 % of completions gave no reward gradient: 30 % tied; let .* (reward.rules.accuracy.weight=2)"),
        ("truncated", "30 % of completions gave no reward gradient: 30 % truncated; .*(rollout.max_new_tokens=128)"),
        ("filtered", "30 % of completions gave no reward gradient: 30 % filtered; pass .*"),
        ("unscored", "30 % of completions gave no sound reward gradient: 30 % unscored; mend .*"),
    ],
)
def test_each_part_has_its_own_remedy(part, words):
    before, _, after = words.partition(".*")
    text = said({"trained": 7, part: 3})
    assert text.startswith(before) and text.endswith(after)


def test_a_run_that_wasted_little_says_so():
    assert said({"trained": 9, "all_wrong": 1}) == "little was wasted: 90 % of completions gave a reward gradient"
