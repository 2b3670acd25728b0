import math

import pytest
import torch
from models import kl_section

from grpo_cli.config import Estimator, KlGradient, KlSchedule
from grpo_cli.kl import ESTIMATORS, BetaSchedule, bounded_log_ratio, kl_estimate, kl_penalty


def test_estimators_by_hand():
    # pi = 1/2, pi_ref = 1/4: l = ln(1/2) = -0.6931. k1 = 0.6931, k2 = 0.2402, k3 = 0.5 - 1 + 0.6931 = 0.1931.
    logp, ref = torch.tensor([[math.log(0.5)]]), torch.tensor([[math.log(0.25)]])
    values = {e: kl_estimate(logp, ref, e).item() for e in (Estimator.k1, Estimator.k2, Estimator.k3)}
    assert values == pytest.approx({Estimator.k1: 0.69315, Estimator.k2: 0.24023, Estimator.k3: 0.19315}, abs=1e-5)


def test_k1_and_k3_average_to_the_kl_itself():
    # Exact expectation over pi = (.5, .3, .2) against ref = (.2, .3, .5): sum pi (log pi - log ref).
    pi, ref = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    exact = (pi * (pi.log() - ref.log())).sum()
    for estimator in (Estimator.k1, Estimator.k3):
        mean = (pi * kl_estimate(pi.log()[None], ref.log()[None], estimator)[0]).sum()
        assert mean.item() == pytest.approx(exact.item(), abs=1e-6)


def test_k3_is_never_negative():
    logp, ref = -5 * torch.rand(1000, 1), -5 * torch.rand(1000, 1)
    assert kl_estimate(logp, ref, Estimator.k3).min().item() >= 0


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_drifted_token_leaves_value_and_gradient_finite(estimator):
    # exp(100) is infinite in float32.
    logp = torch.tensor([[-101.0, -1.0]], requires_grad=True)
    penalty = kl_estimate(logp, torch.tensor([[-1.0, -1.0]]), estimator).sum()
    penalty.backward()
    assert math.isfinite(penalty.item()) and torch.isfinite(logp.grad).all()
    assert bounded_log_ratio(logp, torch.tensor([[-1.0, -1.0]])).tolist() == [[20.0, 0.0]]


def test_plain_gradient_is_the_estimators_own_and_unbiased_adds_the_score_function_part():
    # l = ln(1/2); d k3 / d logp = 1 - exp(l) = 0.5. Unbiased: d(ratio * k3) = k3 + 0.5 at ratio 1 = 0.1931 + 0.5.
    ref = torch.tensor([[math.log(0.25)]])
    gradients = []
    for kind in (KlGradient.plain, KlGradient.unbiased):
        logp = torch.tensor([[math.log(0.5)]], requires_grad=True)
        kl_penalty(kl_estimate(logp, ref, Estimator.k3), logp, logp.detach(), kind).sum().backward()
        gradients.append(logp.grad.item())
    assert gradients == pytest.approx([0.5, 0.69315], abs=1e-5)


def test_unbiased_gradient_is_that_of_the_exact_kl():
    # Sum over all tokens weighted by their probability against autograd of the exact KL, in float64.
    logits = torch.tensor([0.3, -0.2, 1.1], dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64), 0)
    logp = torch.log_softmax(logits, 0)
    exact = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), logits, retain_graph=True)[0]
    pi = logp.detach().exp()
    penalty = kl_penalty(kl_estimate(logp, ref, Estimator.k3), logp, logp.detach(), KlGradient.unbiased)
    estimated = torch.autograd.grad((pi * penalty).sum(), logits)[0]
    assert torch.allclose(estimated, exact, atol=1e-6)


@pytest.mark.parametrize("schedule", [KlSchedule.linear, KlSchedule.cosine])
def test_moving_schedules_start_and_end_exactly(schedule):
    beta = BetaSchedule(kl_section(schedule=schedule, beta=0.3, end_beta=0.07), steps=50)
    assert (beta.at(1), beta.at(50), beta.at(60)) == (0.3, 0.07, 0.07)
    values = [beta.at(s) for s in range(1, 51)]
    assert values == sorted(values, reverse=True)


def test_linear_and_cosine_half_way():
    # Step 3 of 5 is half way: both stand at the mean of 0.4 and 0.
    assert BetaSchedule(kl_section(schedule=KlSchedule.linear, beta=0.4, end_beta=0.0), 5).at(3) == pytest.approx(0.2)
    assert BetaSchedule(kl_section(schedule=KlSchedule.cosine, beta=0.4, end_beta=0.0), 5).at(3) == pytest.approx(0.2)
    # Step 2 of 5 is a quarter: linear 0.3, cosine 0.4 * (1 + cos(pi/4)) / 2 = 0.3414.
    assert BetaSchedule(kl_section(schedule=KlSchedule.linear, beta=0.4, end_beta=0.0), 5).at(2) == pytest.approx(0.3)
    assert BetaSchedule(kl_section(schedule=KlSchedule.cosine, beta=0.4, end_beta=0.0), 5).at(2) == pytest.approx(0.34142, abs=1e-5)


def test_adaptive_beta_moves_in_log_space_towards_the_target_and_stays_in_bounds():
    beta = BetaSchedule(kl_section(schedule=KlSchedule.adaptive, beta=1.0, target=2.0, gain=0.5), steps=10)
    beta.observe(1, torch.tensor([3.0]))  # error +50 %: log beta rises by 0.25
    assert beta.at(2) == pytest.approx(math.exp(0.25))
    beta.observe(2, torch.tensor([100.0]))  # errors count for at most 100 %
    assert beta.at(3) == pytest.approx(math.exp(0.75))
    for step in range(3, 53):
        beta.observe(step, torch.tensor([0.0]))
    assert beta.at(50) == pytest.approx(1e-4)


@pytest.mark.parametrize(
    ("kl_B", "moved"),
    [
        ([0.5, 0.5], 0.0),  # at the target
        ([0.25, 0.25], -0.05),  # half of it: gain 0.1 times -50 %
        ([1.0, 0.0, 0.5, 1.1], 0.03),  # a mean of 0.65: +30 %
        ([1.0, 1.0], 0.1),
        ([20.0, 0.0], 0.1),
        ([0.0, 0.0], -0.1),
    ],
)
def test_log_beta_moves_by_gain_times_the_relative_error_of_the_mean(kl_B, moved):
    beta = BetaSchedule(kl_section(schedule=KlSchedule.adaptive, beta=1.0, target=0.5, gain=0.1), steps=10)
    beta.observe(1, torch.tensor(kl_B))
    assert math.log(beta.at(2)) == pytest.approx(moved, abs=1e-6)


def test_adaptive_state_continues_exactly():
    one, two = (BetaSchedule(kl_section(schedule=KlSchedule.adaptive, target=1.0), 10) for _ in range(2))
    one.observe(1, torch.tensor([0.3]))
    two.load_state(one.state())
    one.observe(2, torch.tensor([1.7]))
    two.observe(2, torch.tensor([1.7]))
    assert one.at(3) == two.at(3)


def test_adaptive_beta_does_not_move_while_it_warms_up():
    # The KL is near 0 then, which is no news: beta would have fallen by the time it counts.
    beta = BetaSchedule(kl_section(schedule=KlSchedule.adaptive, beta=1.0, target=1.0, gain=0.5, warmup_steps=3), 10)
    for step in (1, 2, 3):
        beta.observe(step, torch.tensor([0.0]))
    assert [beta.at(step) for step in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]
    beta.observe(4, torch.tensor([0.0]))
    assert beta.at(5) == pytest.approx(math.exp(-0.5))
