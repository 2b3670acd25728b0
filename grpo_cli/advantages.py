"""Rewards to advantages, by one small function for each way. Knows nothing of models.

Axes: P prompts, G samples per prompt, B = P*G completions, T tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_cli.config import Advantage, Algorithm, Combine, Kl, Placement, Std
from grpo_cli.kl import kl_estimate
from grpo_cli.losses import length_mask
from grpo_cli.records import Batch, Scores

Steps = Sequence[Sequence[tuple[int, float]]]
"""For each of B completions its step rewards: (number of the step's last token, reward), in order."""


def all_equal(total_PG: Tensor) -> Tensor:
    """(P,) bool: the group's rewards are one value, tested by equality, so rounding of the mean cannot fake a signal."""
    return (total_PG == total_PG[:, :1]).all(dim=1)


def group_spread(total_PG: Tensor, std: Std) -> Tensor:
    """(P,) standard deviation within each group; exactly 0 where all G rewards are equal."""
    spread_P = total_PG.std(dim=1, correction=_correction(std))
    return torch.where(all_equal(total_PG), torch.zeros_like(spread_P), spread_P)


def _correction(std: Std) -> int:
    return 1 if std is Std.sample else 0


def _over(values: Tensor, spread: Tensor) -> Tensor:
    """values / spread, and 0 where there is no spread."""
    return torch.where(spread > 0, values / torch.where(spread > 0, spread, 1), torch.zeros_like(values))


def _centred(total_PG: Tensor) -> Tensor:
    """r - mean of the group, exactly 0 in a group of equal rewards."""
    centred_PG = total_PG - total_PG.mean(dim=1, keepdim=True)
    return torch.where(all_equal(total_PG)[:, None], torch.zeros_like(centred_PG), centred_PG)


def _step_spread(values_PG: Tensor, std: Std) -> Tensor:
    """Standard deviation over all completions of the step; exactly 0 when they are one value."""
    return group_spread(values_PG.reshape(1, -1), std)


def group_std(total_PG: Tensor, std: Std) -> Tensor:
    """(r - mean) / std of the group, no constant added to std (GRPO: DeepSeekMath, arXiv:2402.03300, section 4.1.2)."""
    return _over(_centred(total_PG), group_spread(total_PG, std)[:, None])


def group_mean(total_PG: Tensor, std: Std) -> Tensor:
    """r - mean of the group (Dr. GRPO, arXiv:2503.20783, section 3.2)."""
    return _centred(total_PG)


def leave_one_out(total_PG: Tensor, std: Std) -> Tensor:
    """r - mean of the group's other G-1 rewards = G / (G-1) (r - mean) (RLOO, arXiv:2402.14740, section 3.2)."""
    G = total_PG.shape[1]
    return _centred(total_PG) * (G / (G - 1))


def batch_std(total_PG: Tensor, std: Std) -> Tensor:
    """(r - mean of the group) / std of all rewards of the step."""
    return _over(_centred(total_PG), _step_spread(total_PG, std))


def reinforce_pp(total_PG: Tensor, std: Std) -> Tensor:
    """(r - mean) / std over all completions of the step, no group baseline (REINFORCE++, arXiv:2501.03262)."""
    centred_PG = _centred(total_PG.reshape(1, -1)).view_as(total_PG)
    return _over(centred_PG, _step_spread(total_PG, std))


def reinforce_pp_baseline(total_PG: Tensor, std: Std) -> Tensor:
    """r - mean of the group, then divided by the std of these differences over the step (REINFORCE++-Baseline, arXiv:2501.03262)."""
    centred_PG = _centred(total_PG)
    return _over(centred_PG, _step_spread(centred_PG, std))


def rank(total_PG: Tensor, std: Std) -> Tensor:
    """2 (rank - mean rank) / (G-1), ties sharing their mean rank: in [-1, 1] whatever the scale of the rewards.

    A completion's rank counts the rewards below it and half of those equal, so rank - mean rank = (#below - #above) / 2 and the
    advantage is (#below - #above) / (G-1). With rewards 0 and 1 that is leave-one-out exactly.
    """
    difference_PGG = total_PG[:, :, None] - total_PG[:, None, :]
    return difference_PGG.sign().sum(dim=2) / (total_PG.shape[1] - 1)


OUTCOME = {
    Advantage.group_std: group_std,
    Advantage.group_mean: group_mean,
    Advantage.leave_one_out: leave_one_out,
    Advantage.batch_std: batch_std,
    Advantage.reinforce_pp: reinforce_pp,
    Advantage.reinforce_pp_baseline: reinforce_pp_baseline,
    Advantage.rank: rank,
}


def outcome_advantages(total_PG: Tensor, advantage: Advantage, std: Std) -> Tensor:
    """(P, G) float32 advantages of whole completions."""
    return OUTCOME[advantage](total_PG.float(), std)


def rules_apart(rule_PG: dict[str, Tensor], weights: dict[str, float], advantage: Advantage, std: Std) -> Tensor:
    """Normalise the rewards of each rule by themselves, then add them up by weight, so that no rule's scale drowns another's
    (GDPO, arXiv:2601.05242). A completion to which a rule does not apply (NaN) gets advantage 0 from it, and stands at its group's mean
    while the others are normalised."""
    total_PG = torch.zeros_like(next(iter(rule_PG.values())).float())
    for name, scores_PG in rule_PG.items():
        mean_P1 = scores_PG.nanmean(dim=1, keepdim=True).nan_to_num(0.0)
        filled_PG = torch.where(scores_PG.isnan(), mean_P1, scores_PG)
        advantages_PG = outcome_advantages(filled_PG, advantage, std)
        total_PG = total_PG + weights[name] * torch.where(scores_PG.isnan(), torch.zeros_like(advantages_PG), advantages_PG)
    return total_PG


def process_advantages(steps_B: Steps, G: int, T: int, std: Std) -> Tensor:
    """(B, T) process supervision (DeepSeekMath, arXiv:2402.03300, section 4.1.3).

    The step rewards of a group's G completions form one pool and are normalised by its mean and std; a token's advantage is the sum of
    the normalised rewards of all steps that end at it or later. Steps of a pool of equal rewards count 0.
    """
    advantages_BT = torch.zeros(len(steps_B), T)
    for start in range(0, len(steps_B), G):
        group = steps_B[start : start + G]
        pool = torch.tensor([[reward for steps in group for _, reward in steps]])
        if pool.shape[1] < 2:
            continue
        normalised = iter(group_std(pool, std)[0].tolist())
        for row, steps in enumerate(group, start):
            for last_token, _ in steps:
                advantages_BT[row, : last_token + 1] += next(normalised)
    return advantages_BT


def assign(scores: Scores, weights: dict[str, float], steps_B: Steps, batch: Batch, beta: float, algorithm: Algorithm, kl: Kl) -> Tensor:
    """(B, T) advantages of all tokens: the same for all of a completion, except under process supervision (which alone needs steps_B).

    With kl.placement=reward, beta times the KL of the sampled tokens counts against a completion as a reward would: less its group's mean,
    A_i - beta (KL_i - mean KL); under process supervision it is taken off each token's own sum to the end. It is not divided by the
    group's std: beta keeps its meaning, and a group of equal rewards does not turn a tiny KL into a full-size advantage.
    """
    B, T = batch.completion_ids_BT.shape
    device = batch.completion_ids_BT.device
    P, G = scores.total_PG.shape
    cost_BT = torch.zeros(B, T, device=device)
    if beta > 0 and kl.placement is Placement.reward:
        estimate_BT = kl_estimate(batch.old_logprobs_BT, batch.reference_logprobs_BT, kl.estimator)
        cost_BT = beta * estimate_BT * length_mask(batch.completion_lengths_B, T)
    if algorithm.advantage is Advantage.process:
        to_the_end_BT = cost_BT.flip(1).cumsum(1).flip(1)
        return process_advantages(steps_B, G, T, algorithm.std).to(device) - to_the_end_BT
    if algorithm.combine is Combine.normalise_first:
        advantages_PG = rules_apart(scores.rule_PG, weights, algorithm.advantage, algorithm.std).to(device)
    else:
        advantages_PG = outcome_advantages(scores.total_PG, algorithm.advantage, algorithm.std).to(device)
    advantages_PG = advantages_PG - _centred(cost_BT.sum(dim=1).view(P, G))
    return advantages_PG.reshape(B, 1).expand(B, T)
