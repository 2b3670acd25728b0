"""Rollouts until a step has its groups: once, or, under dynamic sampling, again for the groups that carry no signal.

Knows the sampler, the rules and the curriculum, but nothing of losses.
"""

from dataclasses import dataclass, replace

import torch

from grpo_cli.config import Control, Rollout
from grpo_cli.curriculum import Curriculum
from grpo_cli.policy import Policy
from grpo_cli.randomness import uniforms
from grpo_cli.records import EncodedProblem, Group, Scores
from grpo_cli.rewards import Rules, score
from grpo_cli.rewards.control import random_totals
from grpo_cli.rollout import sample
from grpo_cli.runtime import Stopwatch


@dataclass
class Collected:
    groups: list[Group]
    """Those to train on; fewer than asked for, or none, when the tries ran out."""
    scores: Scores | None
    tokens: int
    """Sampled in all, dropped groups included."""
    dropped_tokens: list[int]
    """Tokens of each completion in the dropped groups."""
    metrics: dict[str, float]


def collect(
    policy: Policy,
    prompts: list[EncodedProblem],
    curriculum: Curriculum,
    rules: Rules,
    rollout: Rollout,
    P: int,
    G: int,
    resample_tries: int,
    seed: int,
    step: int,
    clock: Stopwatch,
) -> Collected:
    """P groups of G completions with their scores.

    resample_tries > 0: groups that are all right or all wrong by the accuracy rule itself (not by the shaped reward) are dropped and
    replaced by new problems, in at most so many further rollouts.
    """
    groups, parts, tokens, passed_over, dropped_tokens = [], [], 0, 0, []
    dropped = {"all_right": 0, "all_wrong": 0}
    for attempt in range(1 + resample_tries):
        drawn = [prompts[number] for number in curriculum.draw(P - len(groups))]
        passed_over += curriculum.passed_over
        new = sample(policy, drawn, G, rollout, uniforms(seed, "rollout", step, len(drawn), G, rollout.max_new_tokens, first=attempt * P))
        clock.lap("rollout")
        scores = score(rules, new, training=True)
        if rules.section.control is Control.random:
            scores = random_totals(scores, seed, step, attempt)
        clock.lap("reward")
        tokens += sum(len(c.token_ids) for group in new for c in group.completions)
        for group, right_G in zip(new, scores.right_PG, strict=True):
            curriculum.note(group.encoded.problem.id, int(right_G.sum()), G, step)
        keep_P = torch.ones(len(new), dtype=torch.bool)
        if resample_tries > 0:
            all_right_P, all_wrong_P = scores.right_PG.all(dim=1), ~scores.right_PG.any(dim=1)
            keep_P = ~(all_right_P | all_wrong_P)
            dropped["all_right"] += int(all_right_P.sum())
            dropped["all_wrong"] += int(all_wrong_P.sum())
        for group, keep in zip(new, keep_P.tolist(), strict=True):
            if keep:
                groups.append(group)
            else:
                dropped_tokens += [len(c.token_ids) for c in group.completions]
        parts.append(_kept(scores, keep_P))
        if len(groups) == P:
            break
    metrics = {"group/rollouts": attempt + 1, "data/passed_over": passed_over}
    metrics |= {f"group/dropped_{why}": count for why, count in dropped.items()} if resample_tries else {}
    return Collected(groups, _joined(parts) if groups else None, tokens, dropped_tokens, metrics)


def _kept(scores: Scores, keep_P: torch.Tensor) -> Scores:
    G = scores.total_PG.shape[1]
    rule_PG = {name: values[keep_P] for name, values in scores.rule_PG.items()}
    steps_B = [steps for row, steps in enumerate(scores.steps_B) if keep_P[row // G]]
    kept = {name: getattr(scores, name)[keep_P] for name in ("total_PG", "right_PG", "stand_in_PG")}
    return replace(scores, rule_PG=rule_PG, steps_B=steps_B, **kept)


def _joined(parts: list[Scores]) -> Scores:
    names = parts[0].rule_PG
    return Scores(
        {name: torch.cat([part.rule_PG[name] for part in parts]) for name in names},
        torch.cat([part.total_PG for part in parts]),
        torch.cat([part.right_PG for part in parts]),
        [steps for part in parts for steps in part.steps_B],
        {name: sum(part.not_applicable[name] for part in parts) for name in names},
        {name: sum(part.errors[name] for part in parts) for name in names},
        {name: example for part in reversed(parts) for name, example in part.examples.items()},
        torch.cat([part.stand_in_PG for part in parts]),
    )
