"""The KL to the reference: estimators per token, and the schedule of its weight beta. Knows nothing of models."""

import math

import torch
from torch import Tensor

from grpo_cli.config import Estimator, Kl, KlGradient, KlSchedule

LOG_RATIO_BOUND = 20.0
"""exp of a log-ratio beyond this overflows float32 sums long before it means anything."""


def bounded_log_ratio(logprobs_BT: Tensor, reference_BT: Tensor) -> Tensor:
    """log pi_ref - log pi in float32, cut to +-20 so that one drifted token cannot make the loss infinite."""
    return (reference_BT.float() - logprobs_BT.float()).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _k1(log_ratio: Tensor) -> Tensor:
    return -log_ratio


def _k2(log_ratio: Tensor) -> Tensor:
    return log_ratio.square() / 2


def _k3(log_ratio: Tensor) -> Tensor:
    return torch.expm1(log_ratio) - log_ratio


def _symmetric(log_ratio: Tensor) -> Tensor:
    return torch.expm1(log_ratio) * log_ratio / 2


ESTIMATORS = {Estimator.k1: _k1, Estimator.k2: _k2, Estimator.k3: _k3, Estimator.symmetric: _symmetric}


def kl_estimate(logprobs_BT: Tensor, reference_BT: Tensor, estimator: Estimator) -> Tensor:
    """Per-token estimate of KL(pi || pi_ref) in nats, for tokens drawn from pi. With l = log pi_ref - log pi:

    k1 = -l, k2 = l^2 / 2, k3 = exp(l) - 1 - l (Schulman, "Approximating KL Divergence"; k3 is GRPO's, arXiv:2402.03300 eq. 4).
    symmetric = (exp(l) - 1) l / 2 estimates the mean of KL(pi || pi_ref) and KL(pi_ref || pi), the latter by importance weights.
    """
    return ESTIMATORS[estimator](bounded_log_ratio(logprobs_BT, reference_BT))


def exact_kl(logprobs_NV: Tensor, reference_NV: Tensor) -> Tensor:
    """(N,) KL(pi || pi_ref) = sum_v pi(v) (log pi(v) - log pi_ref(v)) of N whole next-token distributions (log-probs)."""
    difference_NV = (logprobs_NV - reference_NV).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    # A token that is never sampled has log-prob -inf on both sides; its share is 0.
    share_NV = logprobs_NV.exp()
    return (share_NV * torch.where(share_NV > 0, difference_NV, torch.zeros_like(difference_NV))).sum(dim=1)


def kl_penalty(penalty_BT: Tensor, logprobs_BT: Tensor, old_BT: Tensor, gradient: KlGradient) -> Tensor:
    """The differentiable KL term per token, from the estimate of each token.

    plain: the estimate as it stands, so only its own derivative counts (DeepSeekMath). unbiased, for k1 and k3: the estimate times
    pi / pi_old, whose gradient on on-policy samples is that of the KL itself, the score-function part included. (The plain gradient of k2
    and of the exact KL is that of the KL already.)
    """
    if gradient is KlGradient.unbiased:
        penalty_BT = penalty_BT * (logprobs_BT - old_BT).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    return penalty_BT


class BetaSchedule:
    """The weight of the KL at each step: a warm-up from 0 over kl.warmup_steps, then the schedule; adaptive ones follow the KL shown."""

    def __init__(self, section: Kl, steps: int):
        self._section = section
        self._steps = steps
        self._log_beta = math.log(section.beta) if section.beta > 0 else -math.inf

    def at(self, step: int) -> float:
        """beta of `step`, counted from 1; the linear and cosine schedules reach end_beta exactly at the last step."""
        kl = self._section
        if step <= kl.warmup_steps:
            return kl.beta * step / (kl.warmup_steps + 1)
        first = kl.warmup_steps + 1
        progress = 1.0 if step >= self._steps else (step - first) / max(1, self._steps - first)
        if kl.schedule is KlSchedule.adaptive:
            return math.exp(self._log_beta)
        if kl.schedule is KlSchedule.linear:
            return (1 - progress) * kl.beta + progress * kl.end_beta
        if kl.schedule is KlSchedule.cosine:
            cosine = 1.0 if progress == 1 else (1 - math.cos(math.pi * progress)) / 2
            return (1 - cosine) * kl.beta + cosine * kl.end_beta
        return kl.beta

    def observe(self, step: int, kl_B: Tensor | None) -> None:
        """Adaptive, behind the warm-up: log beta moves by gain times the relative error of the mean KL per completion (k3, to the
        reference), which counts for at most 100 % either way."""
        kl = self._section
        if kl.schedule is KlSchedule.adaptive and kl_B is not None and step > kl.warmup_steps:
            error = max(-1.0, min(1.0, kl_B.mean().item() / kl.target - 1))
            self._log_beta = max(math.log(kl.min_beta), min(math.log(kl.max_beta), self._log_beta + kl.gain * error))

    def state(self) -> dict:
        return {"log_beta": self._log_beta}

    def load_state(self, state: dict) -> None:
        self._log_beta = state["log_beta"]
