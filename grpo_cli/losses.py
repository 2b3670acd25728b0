"""The objective's terms per token, and how tokens are weighed into one number. Tensors in, tensors out; everything in float32.

Axes: B completions, T tokens. w is the ratio of the policy to the one that sampled, A the advantage.
"""

import torch
from torch import Tensor

from grpo_cli.config import Aggregation, Clip, Ratio
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


def importance_ratio(logprobs_BT: Tensor, old_BT: Tensor, mask_BT: Tensor, ratio: Ratio) -> Tensor:
    """(B, T) w, exactly 1 where policy and sampling policy agree.

    token: pi / pi_old of each token. sequence: the geometric mean of a completion's token ratios, the same for all its tokens
    (GSPO, arXiv:2507.18071 eq. 7).
    """
    log_ratio_BT = logprobs_BT - old_BT
    if ratio is Ratio.sequence:
        mean_B1 = (log_ratio_BT * mask_BT).sum(dim=1, keepdim=True) / mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
        log_ratio_BT = mean_B1.expand_as(log_ratio_BT)
    return log_ratio_BT.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def ppo_clip(ratio_BT: Tensor, advantages_BT: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None) -> Tensor:
    """-min(w A, clip(w, 1 - clip_low, 1 + clip_high) A) (PPO, arXiv:1707.06347 eq. 7).

    dual_clip c > 1 bounds it from the other side where A < 0: -max(min(...), c A), so a far-off ratio cannot
    explode (arXiv:1912.09729 eq. 5).
    """
    objective_BT = torch.minimum(ratio_BT * advantages_BT, ratio_BT.clamp(1 - clip_low, 1 + clip_high) * advantages_BT)
    if dual_clip is not None:
        objective_BT = torch.where(advantages_BT < 0, torch.maximum(objective_BT, dual_clip * advantages_BT), objective_BT)
    return -objective_BT


def cispo(ratio_BT: Tensor, logprobs_BT: Tensor, advantages_BT: Tensor, clip_high: float) -> Tensor:
    """-sg(min(w, 1 + clip_high)) A log pi: the capped ratio is a weight without gradient, so no token's gradient is cut off
    (CISPO, arXiv:2506.13585 eq. 4-5, with no lower bound as there)."""
    return -ratio_BT.detach().clamp(max=1 + clip_high) * advantages_BT * logprobs_BT


def surrogate(
    ratio_BT: Tensor,
    logprobs_BT: Tensor,
    advantages_BT: Tensor,
    clip: Clip,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> Tensor:
    """(B, T) the policy part of the loss."""
    if clip is Clip.cispo:
        return cispo(ratio_BT, logprobs_BT, advantages_BT, clip_high)
    if clip is Clip.none:
        return -ratio_BT * advantages_BT
    return ppo_clip(ratio_BT, advantages_BT, clip_low, clip_high, dual_clip)


def is_clipped(ratio_BT: Tensor, advantages_BT: Tensor, clip: Clip, clip_low: float, clip_high: float, dual_clip: float | None) -> Tensor:
    """(B, T) bool: the clip changes this token's gradient."""
    if clip is Clip.none:
        return torch.zeros_like(ratio_BT, dtype=torch.bool)
    if clip is Clip.cispo:
        return ratio_BT > 1 + clip_high
    clipped_BT = ((ratio_BT < 1 - clip_low) & (advantages_BT < 0)) | ((ratio_BT > 1 + clip_high) & (advantages_BT > 0))
    return clipped_BT if dual_clip is None else clipped_BT | ((ratio_BT > dual_clip) & (advantages_BT < 0))
