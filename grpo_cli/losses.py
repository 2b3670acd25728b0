"""The clipped surrogate and how tokens are weighed into one number. Tensors in, tensors out; everything in float32."""

import torch
from torch import Tensor

from grpo_cli.config import Aggregation
from grpo_cli.kl import LOG_RATIO_BOUND


def length_mask(lengths_B: Tensor, T: int) -> Tensor:
    """(B, T) float: 1 on the first `length` tokens, the end token among them, 0 behind."""
    return (torch.arange(T, device=lengths_B.device)[None, :] < lengths_B[:, None]).float()


def token_weights(lengths_B: Tensor, trained_B: Tensor, T: int, aggregation: Aggregation, max_new_tokens: int) -> Tensor:
    """(B, T) weights by which per-token losses are summed into the loss of one optimizer step.

    They are made once for the whole step, before it is cut into micro-batches, so the cut cannot change the gradient.
    sequence_mean: 1 / (N |o_i|) (GRPO, arXiv:2402.03300 eq. 3); token_mean: 1 / sum |o_i| (DAPO, arXiv:2503.14476 eq. 8);
    constant: 1 / (N max_new_tokens) (Dr. GRPO, arXiv:2503.20783). N counts the completions that are trained on; with none of them
    all weights are 0.
    """
    mask_BT = length_mask(lengths_B, T) * trained_B.float()[:, None]
    count = trained_B.sum().clamp(min=1)
    if aggregation is Aggregation.sequence_mean:
        return mask_BT / (count * lengths_B.clamp(min=1)[:, None])
    if aggregation is Aggregation.token_mean:
        return mask_BT / mask_BT.sum().clamp(min=1)
    return mask_BT / (count * max_new_tokens)


def ratio_to_old(logprobs_BT: Tensor, old_BT: Tensor) -> Tensor:
    """pi / pi_old per token, exactly 1 where the two agree."""
    return (logprobs_BT - old_BT).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def clipped_surrogate(ratio_BT: Tensor, advantages_B: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """(B, T) loss -min(w A, clip(w, 1 - clip_low, 1 + clip_high) A) with w = pi / pi_old (PPO, arXiv:1707.06347 eq. 7)."""
    advantages_B1 = advantages_B[:, None]
    return -torch.minimum(ratio_BT * advantages_B1, ratio_BT.clamp(1 - clip_low, 1 + clip_high) * advantages_B1)


def is_clipped(ratio_BT: Tensor, advantages_B: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """(B, T) bool: the clip holds this token's gradient back."""
    advantages_B1 = advantages_B[:, None]
    return ((ratio_BT < 1 - clip_low) & (advantages_B1 < 0)) | ((ratio_BT > 1 + clip_high) & (advantages_B1 > 0))
