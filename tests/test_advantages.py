import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_cli.advantages import OUTCOME, all_equal, group_spread, outcome_advantages
from grpo_cli.config import Advantage, Std


def test_advantages_are_relative_to_the_group_and_not_to_the_batch():
    # Group 1: mean 0.5, sample std 1/sqrt(3), so (1 - 0.5) * sqrt(3) = 0.866. Group 2 is all equal.
    total_PG = torch.tensor([[1.0, 0.0, 1.0, 0.0], [10.0, 10.0, 10.0, 10.0]])
    a = outcome_advantages(total_PG, Advantage.group_std, Std.sample)
    assert a[0].tolist() == pytest.approx([0.8660, -0.8660, 0.8660, -0.8660], abs=1e-4)
    assert a[1].tolist() == [0.0, 0.0, 0.0, 0.0]


def test_population_std_divides_by_g():
    # Deviations +-0.5: population std 0.5, so advantages are +-1.
    a = outcome_advantages(torch.tensor([[1.0, 0.0, 1.0, 0.0]]), Advantage.group_std, Std.population)
    assert a.tolist() == [[1.0, -1.0, 1.0, -1.0]]


def test_group_mean_only_centres():
    total_PG = torch.tensor([[1.0, 0.0], [5.0, 5.0]])
    assert outcome_advantages(total_PG, Advantage.group_mean, Std.sample).tolist() == [[0.5, -0.5], [0.0, 0.0]]


@pytest.mark.parametrize("advantage", OUTCOME)
def test_equal_rewards_give_exactly_zero_although_their_mean_is_rounded(advantage):
    # 0.1 three times has a float32 mean of 0.10000000149, not 0.1; a small epsilon would turn that into a signal.
    assert outcome_advantages(torch.full((1, 3), 0.1), advantage, Std.sample).tolist() == [[0.0, 0.0, 0.0]]


def test_batch_spread_and_group_spread_are_different_things():
    # Two groups [3, 3] and [8, 8]: batch std 2.9, per-group std 0, share of zero spread 1.
    total_PG = torch.tensor([[3.0, 3.0], [8.0, 8.0]])
    assert total_PG.std().item() == pytest.approx(2.887, abs=1e-3)
    assert group_spread(total_PG, Std.sample).tolist() == [0.0, 0.0]
    assert all_equal(total_PG).float().mean().item() == 1.0
    assert outcome_advantages(total_PG, Advantage.group_std, Std.sample).abs().sum().item() == 0.0


rewards = st.lists(st.lists(st.sampled_from([-1.0, 0.0, 0.25, 0.5, 1.0, 1.5]), min_size=4, max_size=4), min_size=1, max_size=5)


WITHIN_THE_GROUP = [advantage for advantage in OUTCOME if advantage is not Advantage.reinforce_pp]  # the one without a group baseline


@given(rewards, st.sampled_from(WITHIN_THE_GROUP), st.sampled_from(list(Std)))
def test_advantages_sum_to_zero_in_each_group_and_keep_the_order(groups, advantage, std):
    total_PG = torch.tensor(groups)
    a = outcome_advantages(total_PG, advantage, std)
    assert a.sum(dim=1).abs().max().item() < 1e-5
    for r, row in zip(total_PG, a, strict=True):
        assert all((row[i] < row[j]) == (r[i] < r[j]) for i in range(4) for j in range(4))


@given(rewards)
def test_one_group_does_not_see_another(groups):
    together = outcome_advantages(torch.tensor(groups), Advantage.group_std, Std.sample)
    alone = [outcome_advantages(torch.tensor([g]), Advantage.group_std, Std.sample)[0] for g in groups]
    assert torch.equal(together, torch.stack(alone))
