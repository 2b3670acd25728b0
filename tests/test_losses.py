import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_cli.config import Aggregation, Clip, Ratio
from grpo_cli.losses import importance_ratio, is_clipped, length_mask, ppo_clip, token_weights


def surrogate_value(lengths, advantages, aggregation, T=6, limit=10):
    lengths_B, trained_B = torch.tensor(lengths), torch.ones(len(lengths), dtype=torch.bool)
    weights_BT = token_weights(lengths_B, trained_B, T, aggregation, limit)
    loss_BT = ppo_clip(torch.ones(len(lengths), T), torch.tensor(advantages)[:, None], 0.2, 0.2)
    return (weights_BT * loss_BT).sum().item()


def test_aggregations_by_hand():
    # Two completions of 2 and 6 tokens, advantages +1 and -1, ratio 1.
    # Per-sequence mean: (-1 + 1) / 2 = 0. Token mean: (2 * -1 + 6 * 1) / 8 = 0.5. Constant 10: (-2 + 6) / (2 * 10) = 0.2.
    values = [surrogate_value([2, 6], [1.0, -1.0], a) for a in (Aggregation.sequence_mean, Aggregation.token_mean, Aggregation.constant)]
    assert values == pytest.approx([0.0, 0.5, 0.2], abs=1e-6)


def test_token_mean_divides_by_the_tokens_of_the_whole_step():
    # 3 tokens of loss 1 and 9 of loss 0: 0.25 over the step, not 0.5 as the mean of two micro-batch means.
    weights_BT = token_weights(torch.tensor([3, 9]), torch.tensor([True, True]), 9, Aggregation.token_mean, 9)
    loss_BT = torch.tensor([[1.0] * 9, [0.0] * 9])
    assert (weights_BT * loss_BT).sum().item() == pytest.approx(0.25)


@pytest.mark.parametrize("aggregation", Aggregation)
def test_with_every_completion_masked_the_weights_are_zero_and_finite(aggregation):
    weights_BT = token_weights(torch.tensor([5, 5, 5, 5]), torch.zeros(4, dtype=torch.bool), 5, aggregation, 5)
    assert weights_BT.abs().sum().item() == 0.0


@pytest.mark.parametrize("aggregation", [Aggregation.sequence_mean, Aggregation.token_mean])
def test_masked_completions_leave_the_others_weighed_as_if_alone(aggregation):
    both = token_weights(torch.tensor([2, 4]), torch.tensor([True, False]), 4, aggregation, 9)
    alone = token_weights(torch.tensor([2]), torch.tensor([True]), 4, aggregation, 9)
    assert torch.equal(both[0], alone[0]) and both[1].sum() == 0


def test_mask_comes_from_lengths_so_the_end_token_counts():
    # Completion [5, 9, EOS] padded to 5 with pad == eos: 1 1 1 0 0.
    assert length_mask(torch.tensor([3]), 5).tolist() == [[1, 1, 1, 0, 0]]


def test_clip_by_hand():
    # Ratios 0.5, 1, 1.5 at clip 0.2 / 0.3. A = +1: min(w, clipped) = 0.5, 1, 1.3. A = -1: -max(w, clipped) = -0.8, -1, -1.5.
    ratio = torch.tensor([[0.5, 1.0, 1.5]] * 2)
    advantages = torch.tensor([[1.0], [-1.0]])
    loss = ppo_clip(ratio, advantages, 0.2, 0.3)
    assert loss.tolist() == [pytest.approx([-0.5, -1.0, -1.3]), pytest.approx([0.8, 1.0, 1.5])]
    assert is_clipped(ratio, advantages, Clip.ppo, 0.2, 0.3, None).tolist() == [[False, False, True], [True, False, False]]


def test_clipped_tokens_have_no_gradient_and_the_rest_that_of_the_policy_gradient():
    # d/dlogp of -w A is -w A: at w = 1, A = 2 it is -2; at w = 1.5 > 1.2 it is 0.
    logp = torch.tensor([[0.0, 0.405465]], requires_grad=True)
    ppo_clip(importance_ratio(logp, torch.zeros(1, 2), torch.ones(1, 2), Ratio.token), torch.tensor([[2.0]]), 0.2, 0.2).sum().backward()
    assert logp.grad.tolist() == [pytest.approx([-2.0, 0.0])]


def test_ratio_is_exactly_one_for_equal_log_probs_and_finite_for_far_ones():
    logp = torch.tensor([[-3.3, -0.1, 500.0]])
    assert importance_ratio(logp, torch.tensor([[-3.3, -0.1, 0.0]]), torch.ones(1, 3), Ratio.token)[0, :2].tolist() == [1.0, 1.0]
    assert torch.isfinite(importance_ratio(logp, torch.zeros(1, 3), torch.ones(1, 3), Ratio.token)).all()


@given(st.lists(st.integers(1, 7), min_size=1, max_size=6), st.integers(0, 5), st.sampled_from(list(Aggregation)))
def test_padding_never_matters(lengths, extra, aggregation):
    trained_B = torch.ones(len(lengths), dtype=torch.bool)
    tight = token_weights(torch.tensor(lengths), trained_B, max(lengths), aggregation, 9)
    loose = token_weights(torch.tensor(lengths), trained_B, max(lengths) + extra, aggregation, 9)
    assert torch.equal(loose[:, : max(lengths)], tight) and loose[:, max(lengths) :].sum() == 0
