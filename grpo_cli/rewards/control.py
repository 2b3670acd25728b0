"""Meaningless rewards to train on for comparison: what a run gains with one of them was not learned from the task."""

from dataclasses import replace

import numpy as np

from grpo_cli.config import Control, Reward, Rule
from grpo_cli.randomness import generator, permutation
from grpo_cli.records import END, Problem, Scores


def training_rules(section: Reward) -> dict[str, Rule]:
    """The rules that a training reward is made of: format_only leaves the accuracy rule out, by weight 0."""
    rules = dict(section.rules)
    if section.control is Control.format_only:
        rules[section.accuracy] = replace(rules[section.accuracy], weight=0.0)
    return rules


def shuffled_golds(problems: list[Problem], seed: int) -> list[Problem]:
    """Each problem with the gold answer and fields of another one."""
    order = permutation(seed, "control", 0, len(problems)).tolist()
    donors = dict(zip(order, [*order[1:], order[0]], strict=True))
    return [replace(p, answer=problems[donors[i]].answer, fields=problems[donors[i]].fields) for i, p in enumerate(problems)]


def random_totals(scores: Scores, seed: int, step: int, attempt: int) -> Scores:
    """Totals of 0 or 1, each with chance 1/2, whatever the completion says."""
    import torch

    P, G = scores.total_PG.shape
    coins_PG = generator(seed, "control", step, attempt).integers(0, 2, (P, G)).astype(np.float32)
    return replace(scores, total_PG=torch.from_numpy(coins_PG), steps_B=[[(END, coin)] for coin in coins_PG.ravel().tolist()])
