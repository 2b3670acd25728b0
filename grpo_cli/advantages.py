"""Rewards of groups to advantages. Tensors in, tensors out; knows nothing of models."""

import torch
from torch import Tensor

from grpo_cli.config import Advantage, Std


def group_spread(total_PG: Tensor, std: Std) -> Tensor:
    """(P,) standard deviation within each group; exactly 0 where all G rewards are equal."""
    spread_P = total_PG.std(dim=1, correction=1 if std is Std.sample else 0)
    return torch.where(all_equal(total_PG), torch.zeros_like(spread_P), spread_P)


def all_equal(total_PG: Tensor) -> Tensor:
    """(P,) bool: the group's rewards are one value, tested by equality, so rounding of the mean cannot fake a signal."""
    return (total_PG == total_PG[:, :1]).all(dim=1)


def group_relative(total_PG: Tensor, advantage: Advantage, std: Std) -> Tensor:
    """(P, G) advantages relative to the group's own mean; a group of equal rewards gets exactly 0.

    group_std: A_i = (r_i - mean) / std (DeepSeekMath, arXiv:2402.03300, eq. 3 outcome supervision), with no constant added to std.
    group_mean: A_i = r_i - mean (Dr. GRPO, arXiv:2503.20783).
    """
    total_PG = total_PG.float()
    centred_PG = total_PG - total_PG.mean(dim=1, keepdim=True)
    if advantage is Advantage.group_std:
        spread_P1 = group_spread(total_PG, std)[:, None]
        centred_PG = centred_PG / torch.where(spread_P1 > 0, spread_P1, 1)
    return torch.where(all_equal(total_PG)[:, None], torch.zeros_like(centred_PG), centred_PG)
