"""A batch to optimizer steps: the one place where advantages, the clip, the KL and beta meet."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_cli.batch import take
from grpo_cli.config import Algorithm, Anchor, Estimator, Kl, Placement
from grpo_cli.kl import LOG_RATIO_BOUND, kl_estimate, kl_penalty
from grpo_cli.losses import importance_ratio, is_clipped, length_mask, surrogate, token_weights
from grpo_cli.policy import Policy
from grpo_cli.records import Batch


@dataclass
class Update:
    """What one step's optimizer steps saw. KL and entropy are those of the policy that sampled, before any of them."""

    metrics: dict[str, float]
    kl_B: Tensor | None
    """KL to the reference of each completion, summed over its tokens (nats); None when it was not measured."""


def improve(
    policy: Policy, optimizer, schedule, batch: Batch, beta: float, algorithm: Algorithm, kl: Kl, grad_clip: float, max_new_tokens: int
) -> Update:
    """algorithm.updates_per_rollout optimizer steps on one batch, each on all of it, summed over micro-batches.

    The loss is sum_t weight_t (policy part + beta KL - entropy_bonus entropy). The log-probs of the sampling policy are those of the
    first pass itself, made before any weight has moved: no extra forward, and the first ratio is exactly 1. Raises ValueError, before
    that gradient is applied, when a gradient is not finite.
    """
    T = batch.completion_ids_BT.shape[1]
    mask_BT = length_mask(batch.completion_lengths_B, T)
    weights_BT = token_weights(batch.completion_lengths_B, batch.trained_B, T, algorithm.aggregation, max_new_tokens)
    clip = (algorithm.clip, algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip)
    penalised = beta > 0 and kl.placement is Placement.loss
    parts = policy.micro_batches(batch)
    old_BT, entropy_BT = torch.zeros_like(weights_BT), torch.zeros_like(weights_BT)
    losses, grad_norms, clipped, ratio_max = [], [], [], 1.0
    for update in range(algorithm.updates_per_rollout):
        optimizer.zero_grad(set_to_none=True)
        loss_sum, clipped_sum = 0.0, 0.0
        for rows in parts:
            part = take(batch, rows)
            width = part.completion_ids_BT.shape[1]
            scores = policy.token_logprobs(part, entropy_gradient=algorithm.entropy_bonus > 0)
            logprobs_BT = scores.logprobs_BT
            if update == 0:
                old_BT[rows, :width] = logprobs_BT.detach()
                entropy_BT[rows, :width] = scores.entropy_BT.detach()
            part_old_BT, part_weights_BT = old_BT[rows, :width], weights_BT[rows, :width]
            ratio_BT = importance_ratio(logprobs_BT, part_old_BT, mask_BT[rows, :width], algorithm.ratio)
            token_loss_BT = surrogate(ratio_BT, logprobs_BT, part.advantages_BT, *clip)
            if penalised:
                anchor_BT = part_old_BT if kl.anchor is Anchor.old else part.reference_logprobs_BT
                exact = kl.estimator is Estimator.exact
                estimate_BT = scores.exact_kl_BT if exact else kl_estimate(logprobs_BT, anchor_BT, kl.estimator)
                token_loss_BT = token_loss_BT + beta * kl_penalty(estimate_BT, logprobs_BT, part_old_BT, kl.gradient)
            if algorithm.entropy_bonus > 0:
                token_loss_BT = token_loss_BT - algorithm.entropy_bonus * scores.entropy_BT
            loss = (part_weights_BT * token_loss_BT).sum()
            loss.backward()
            loss_sum += loss.item()
            trained_BT = part_weights_BT > 0
            ratio_max = max(ratio_max, (ratio_BT.detach() * trained_BT).max().item())
            clipped_sum += (is_clipped(ratio_BT.detach(), part.advantages_BT, *clip) & trained_BT).sum().item()
        grad_norm = torch.nn.utils.clip_grad_norm_(policy.trainable.values(), grad_clip or math.inf).item()
        if not math.isfinite(grad_norm):
            raise ValueError("the gradient is not finite: try a lower optimizer.lr or kl.beta, or model.dtype=float32")
        optimizer.step()
        schedule.step()
        losses.append(loss_sum)
        grad_norms.append(grad_norm)
        clipped.append(clipped_sum)

    tokens = mask_BT.sum()
    metrics = {
        "loss": sum(losses) / len(losses),
        "policy/entropy": ((entropy_BT * mask_BT).sum() / tokens).item(),
        "policy/clip_frac": sum(clipped) / len(clipped) / max(1, int((weights_BT > 0).sum())),
        "policy/ratio_max": ratio_max,
        "policy/sampler_gap": ((old_BT - batch.sampled_logprobs_BT).abs() * mask_BT).max().item(),
        "optim/grad_norm": sum(grad_norms) / len(grad_norms),
        "optim/trained_frac": batch.trained_B.float().mean().item(),
    }
    kl_B = None
    if batch.reference_logprobs_BT is not None:
        kl_BT = kl_estimate(old_BT, batch.reference_logprobs_BT, Estimator.k3) * mask_BT
        kl_B = kl_BT.sum(dim=1)
        bounded = (batch.reference_logprobs_BT - old_BT).abs() > LOG_RATIO_BOUND
        metrics |= {
            "kl/reference": (kl_B.sum() / tokens).item(),
            "kl/sequence": kl_B.mean().item(),
            "kl/bounded_frac": ((bounded * mask_BT).sum() / tokens).item(),
        }
    return Update(metrics, kl_B)
