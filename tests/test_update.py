import math
from dataclasses import replace

import pytest
import torch
from models import algorithm_section, encoded, kl_section, model_section, rollout_section, shake

from grpo_cli.advantages import outcome_advantages
from grpo_cli.batch import collate
from grpo_cli.config import Advantage, Aggregation, LrSchedule, Optimizer, OptimizerName, Std, Truncated
from grpo_cli.optim import build_optimizer, lr_factor
from grpo_cli.policy import Distribution, load_policy
from grpo_cli.randomness import uniforms
from grpo_cli.rollout import sample
from grpo_cli.update import improve


def optimizer_section(lr=0.01, schedule=LrSchedule.constant, warmup_steps=0, **changes):
    values = {"betas": [0.9, 0.95], "momentum": 0.0, "weight_decay": 0.0, "grad_clip": 1.0, "final_lr_frac": 0.1} | changes
    return Optimizer(OptimizerName.adamw, lr, schedule=schedule, warmup_steps=warmup_steps, **values)


def with_advantages(batch, advantages_PG):
    """The batch with each completion's advantage on all of its tokens."""
    return replace(batch, advantages_BT=advantages_PG.reshape(-1, 1).expand(batch.completion_ids_BT.shape))


def set_up(model_folder, budget=4096, advantages_PG=None, truncated=Truncated.keep, limit=12, shaken=True):
    policy = load_policy(
        model_section(model_folder, micro_batch_tokens=budget), torch.device("cpu"), seed=1, distribution=Distribution(1.0)
    )
    if shaken:
        shake(policy)
    prompts = encoded(policy, "1+1=", "a longer prompt 22+33=", "7=")
    groups = sample(policy, prompts, 4, rollout_section(max_new_tokens=limit), uniforms(1, "rollout", 1, 3, 4, limit))
    if advantages_PG is None:
        advantages_PG = torch.tensor([[1.0, -1.0, 0.5, -0.5], [1.5, -0.5, -0.5, -0.5], [0.0, 0.0, 0.0, 0.0]])
    batch = with_advantages(collate(groups, policy.pad_id, truncated), advantages_PG)
    optimizer, schedule = build_optimizer(policy.trainable.values(), optimizer_section(), 10)
    return policy, optimizer, schedule, policy.annotate(batch, reference=True)


def gradients(policy):
    return [p.grad.clone() for p in policy.trainable.values()]


@pytest.mark.parametrize("aggregation", Aggregation)
def test_the_cut_into_micro_batches_does_not_change_the_gradient(model_folder, aggregation):
    whole = None
    for budget in (100_000, 120, 40, 1):
        policy, optimizer, schedule, batch = set_up(model_folder, budget)
        improve(policy, optimizer, schedule, batch, 0.04, algorithm_section(aggregation=aggregation), kl_section(), 0.0, 12)
        if whole is None:
            whole = gradients(policy)
        for a, b in zip(gradients(policy), whole, strict=True):
            assert (a - b).norm() <= 2e-6 * b.norm() + 1e-12


def test_the_gradient_is_that_of_the_plain_equation(model_folder):
    # The whole objective written out on one padded batch, against what improve leaves in .grad.
    policy, optimizer, schedule, batch = set_up(model_folder)
    logp_BT = policy.token_logprobs(batch).logprobs_BT
    ref_BT, lengths = batch.reference_logprobs_BT, batch.completion_lengths_B
    total = 0.0
    for i in range(12):
        n = int(lengths[i])
        logp, ref = logp_BT[i, :n], ref_BT[i, :n]
        ratio = (logp - logp.detach()).exp()
        k3 = (ref - logp).exp() - (ref - logp) - 1
        total = total + (-(ratio * batch.advantages_BT[i, :n]) + 0.04 * k3).mean() / 12
    expected = torch.autograd.grad(total, list(policy.trainable.values()))
    update = improve(policy, optimizer, schedule, batch, 0.04, algorithm_section(), kl_section(), 0.0, 12)
    for a, b in zip(gradients(policy), expected, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm() + 1e-9
    assert update.metrics["loss"] == pytest.approx(total.item(), abs=1e-6)


def test_on_policy_the_ratio_is_exactly_one_and_nothing_is_clipped(model_folder):
    policy, optimizer, schedule, batch = set_up(model_folder)
    metrics = improve(policy, optimizer, schedule, batch, 0.04, algorithm_section(), kl_section(), 1.0, 12).metrics
    assert metrics["policy/ratio_max"] == 1.0 and metrics["policy/clip_frac"] == 0.0
    assert metrics["policy/sampler_gap"] < 1e-4


def test_several_updates_leave_the_sampling_policy_behind(model_folder):
    policy, optimizer, schedule, batch = set_up(model_folder)
    metrics = improve(policy, optimizer, schedule, batch, 0.04, algorithm_section(updates_per_rollout=3), kl_section(), 1.0, 12).metrics
    assert metrics["policy/ratio_max"] > 1.0
    assert schedule.last_epoch == 3


def test_kl_is_zero_at_the_start_and_its_metrics_agree(model_folder):
    policy, optimizer, schedule, batch = set_up(model_folder, shaken=False)
    update = improve(policy, optimizer, schedule, batch, 0.04, algorithm_section(), kl_section(), 1.0, 12)
    assert update.metrics["kl/reference"] == 0.0 and update.kl_B.abs().max() == 0.0
    policy, optimizer, schedule, batch = set_up(model_folder)
    update = improve(policy, optimizer, schedule, batch, 0.04, algorithm_section(), kl_section(), 1.0, 12)
    assert update.metrics["kl/sequence"] == pytest.approx(update.kl_B.mean().item())
    assert update.metrics["kl/reference"] == pytest.approx((update.kl_B.sum() / batch.completion_lengths_B.sum()).item(), rel=1e-5)


def test_all_equal_groups_at_beta_zero_move_nothing(model_folder):
    policy, optimizer, schedule, batch = set_up(model_folder, advantages_PG=torch.zeros(3, 4))
    before = policy.weights()["trained"]
    before = {name: tensor.clone() for name, tensor in before.items()}
    metrics = improve(policy, optimizer, schedule, batch, 0.0, algorithm_section(), kl_section(), 1.0, 12).metrics
    assert metrics["optim/grad_norm"] == 0.0
    assert all(torch.equal(p, before[name]) for name, p in policy.trainable.items())


def test_a_step_of_only_masked_truncations_is_finite_and_counted(model_folder):
    policy, optimizer, schedule, batch = set_up(model_folder, truncated=Truncated.mask, limit=1)
    assert not batch.trained_B.all()
    batch.trained_B[:] = False
    metrics = improve(policy, optimizer, schedule, batch, 0.04, algorithm_section(truncated=Truncated.mask), kl_section(), 1.0, 1).metrics
    assert metrics["loss"] == 0.0 and metrics["optim/trained_frac"] == 0.0
    assert all(torch.isfinite(value).all() for state in optimizer.state.values() for value in state.values())


def test_a_gradient_that_is_not_finite_stops_before_the_weights_change(model_folder):
    advantages = torch.full((3, 4), math.inf)
    policy, optimizer, schedule, batch = set_up(model_folder, advantages_PG=advantages)
    before = {name: p.detach().clone() for name, p in policy.trainable.items()}
    with pytest.raises(ValueError, match=r"optimizer\.lr"):
        improve(policy, optimizer, schedule, batch, 0.04, algorithm_section(), kl_section(), 1.0, 12)
    assert all(torch.equal(p, before[name]) for name, p in policy.trainable.items())


def test_a_tiny_policy_learns_a_toy_reward(model_folder):
    # Reward: the share of the completion that is the character 7. A sign error anywhere makes this fall instead of rise.
    policy = load_policy(model_section(model_folder), torch.device("cpu"), seed=1, distribution=Distribution(1.0))
    optimizer, schedule = build_optimizer(policy.trainable.values(), optimizer_section(lr=0.03), 30)
    prompts = encoded(policy, "1+1=", "22+33=")
    means = []
    for step in range(30):
        groups = sample(policy, prompts, 8, rollout_section(), uniforms(1, "rollout", step, 2, 8, 12))
        rewards_PG = torch.tensor([[c.text.count("7") / len(c.token_ids) for c in g.completions] for g in groups])
        advantages_PG = outcome_advantages(rewards_PG, Advantage.group_std, Std.sample)
        batch = policy.annotate(with_advantages(collate(groups, policy.pad_id, Truncated.keep), advantages_PG), reference=True)
        improve(policy, optimizer, schedule, batch, 0.01, algorithm_section(), kl_section(), 1.0, 12)
        means.append(rewards_PG.mean().item())
    assert sum(means[:5]) / 5 < 0.15
    assert sum(means[-5:]) / 5 > 0.6


def test_learning_rate_warms_up_and_ends_on_its_final_share():
    linear = optimizer_section(schedule=LrSchedule.linear, warmup_steps=5)
    assert [lr_factor(i, linear, 100) for i in (0, 4, 5, 99)] == pytest.approx([0.2, 1.0, 1.0, 0.1])
    assert lr_factor(52, linear, 100) == pytest.approx(1 - 0.9 * 47 / 94)
    cosine = optimizer_section(schedule=LrSchedule.cosine)
    assert [lr_factor(i, cosine, 101) for i in (0, 50, 100)] == pytest.approx([1.0, 0.55, 0.1])
    assert lr_factor(70, optimizer_section(), 100) == 1.0


@pytest.mark.parametrize("name", OptimizerName)
def test_every_optimizer_goes_downhill(name):
    x = torch.nn.Parameter(torch.tensor([3.0]))
    section = optimizer_section(lr=0.1)
    section.name, section.momentum = name, 0.5 if name is OptimizerName.sgd else 0.0
    optimizer, schedule = build_optimizer([x], section, 50)
    for _ in range(50):
        optimizer.zero_grad()
        (x**2).sum().backward()
        optimizer.step()
        schedule.step()
    assert abs(x.item()) < 1.0
