"""Every switch of the objective: on paper, by its properties, and against the plain equation in float64."""

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import NO_SCHEDULE, Mover, algorithm_section, encoded, kl_section, model_section, rollout_section, shake
from runs import config
from torch import Tensor

from grpo_cli.advantages import OUTCOME, assign, outcome_advantages, process_advantages, rules_apart
from grpo_cli.batch import collate, micro_batches
from grpo_cli.compose import CONF
from grpo_cli.config import (
    Advantage,
    Aggregation,
    Algorithm,
    Anchor,
    Clip,
    Combine,
    Estimator,
    Kl,
    KlGradient,
    KlSchedule,
    Placement,
    Ratio,
    Std,
)
from grpo_cli.kl import BetaSchedule, exact_kl, kl_estimate
from grpo_cli.losses import importance_ratio, is_clipped, surrogate
from grpo_cli.policy import Distribution, TokenScores, load_policy
from grpo_cli.randomness import uniforms
from grpo_cli.records import Batch, Scores
from grpo_cli.rollout import sample
from grpo_cli.update import Update, improve

# --- advantages on paper: P 1-2, G 2-4


def test_leave_one_out_takes_off_the_mean_of_the_others():
    # 1 - (0 + 0.5) / 2 = 0.75, 0 - (1 + 0.5) / 2 = -0.75, 0.5 - (1 + 0) / 2 = 0.
    total_PG = torch.tensor([[1.0, 0.0, 0.5], [2.0, 2.0, 2.0]])
    assert outcome_advantages(total_PG, Advantage.leave_one_out, Std.sample).tolist() == [[0.75, -0.75, 0.0], [0.0, 0.0, 0.0]]


# Rewards 1, 0 | 3, 0: group means 0.5 and 1.5, mean of the step 1, squared deviations from it 0 + 1 + 4 + 1 = 6.
STEP_PG = torch.tensor([[1.0, 0.0], [3.0, 0.0]])


def test_batch_std_centres_by_the_group_and_scales_by_the_step():
    # std over the step: sample sqrt(6/3) = 1.4142, population sqrt(6/4) = 1.2247.
    sample_std, population = (outcome_advantages(STEP_PG, Advantage.batch_std, std).flatten().tolist() for std in Std)
    assert sample_std == pytest.approx([0.35355, -0.35355, 1.06066, -1.06066], abs=1e-5)
    assert population == pytest.approx([0.40825, -0.40825, 1.22474, -1.22474], abs=1e-5)


def test_reinforce_pp_whitens_over_the_step():
    # (r - 1) / sqrt(2); with the group baseline first: +-0.5, +-1.5 over sqrt((0.25 + 0.25 + 2.25 + 2.25) / 3) = 1.29099.
    plain = outcome_advantages(STEP_PG, Advantage.reinforce_pp, Std.sample).flatten().tolist()
    assert plain == pytest.approx([0.0, -0.70711, 1.41421, -0.70711], abs=1e-5)
    baseline = outcome_advantages(STEP_PG, Advantage.reinforce_pp_baseline, Std.sample).flatten().tolist()
    assert baseline == pytest.approx([0.38730, -0.38730, 1.16190, -1.16190], abs=1e-5)


def test_rank_shares_tied_places_and_ignores_how_far_an_outlier_is():
    # Ranks 3, 1.5, 1.5, 4 with mean 2.5: 2 * 0.5 / 3, 2 * -1 / 3 twice, 2 * 1.5 / 3.
    for outlier in (6.0, 1e6):
        ranks = outcome_advantages(torch.tensor([[5.0, 1.0, 1.0, outlier]]), Advantage.rank, Std.sample)
        assert ranks[0].tolist() == pytest.approx([1 / 3, -2 / 3, -2 / 3, 1.0])


def test_process_supervision_sums_normalised_step_rewards_from_a_token_to_the_end():
    # Pool 1, 4, 1: mean 2, sample std sqrt((1 + 4 + 1) / 2) = sqrt(3), so -1, 2, -1 over it: -0.57735, 1.15470, -0.57735.
    # Completion 1 has steps ending at tokens 0 and 2: token 0 gets both, tokens 1 and 2 the second. Completion 2 ends at token 1.
    steps = [[(0, 1.0), (2, 4.0)], [(1, 1.0)]]
    first, second = process_advantages(steps, 2, 3, Std.sample).tolist()
    assert first == pytest.approx([0.57735, 1.15470, 1.15470], abs=1e-5)
    assert second == pytest.approx([-0.57735, -0.57735, 0.0], abs=1e-5)


def test_process_supervision_gives_nothing_for_a_pool_of_equal_rewards_and_keeps_groups_apart():
    equal = [[(0, 0.1), (1, 0.1)], [(2, 0.1)]]
    mixed = [[(2, 1.0)], [(2, 0.0)]]
    advantages = process_advantages(equal + mixed + [[(2, 5.0)], []], 2, 3, Std.population)
    # The second group: +-0.5 over a population std of 0.5; the third has a single step, which has nothing to be compared with.
    assert advantages.tolist() == [[0.0] * 3, [0.0] * 3, [1.0] * 3, [-1.0] * 3, [0.0] * 3, [0.0] * 3]


def test_rules_normalised_apart_are_not_drowned_by_the_scale_of_one():
    # Each rule alone gives +-0.7071. 0.7071 - 0.5 * 0.7071 = 0.35355; of the sum 1, 5 rule b alone would decide.
    rules = {"a": torch.tensor([[1.0, 0.0]]), "b": torch.tensor([[0.0, 10.0]])}
    apart = rules_apart(rules, {"a": 1.0, "b": 0.5}, Advantage.group_std, Std.sample)
    assert apart[0].tolist() == pytest.approx([0.35355, -0.35355], abs=1e-5)
    together = outcome_advantages(rules["a"] + 0.5 * rules["b"], Advantage.group_std, Std.sample)
    assert together[0].tolist() == pytest.approx([-0.70711, 0.70711], abs=1e-5)


def test_a_rule_that_does_not_apply_counts_as_the_mean_when_rules_are_apart():
    # Mean of 1 and 0 is 0.5: advantages 0, 0.5, -0.5; a rule that applies nowhere in a group gives 0.
    rules = {"a": torch.tensor([[math.nan, 1.0, 0.0]]), "b": torch.full((1, 3), math.nan)}
    assert rules_apart(rules, {"a": 1.0, "b": 1.0}, Advantage.group_mean, Std.sample).tolist() == [[0.0, 0.5, -0.5]]


@pytest.mark.parametrize("advantage", OUTCOME)
def test_a_rule_that_does_not_apply_gives_no_advantage_of_any_kind(advantage):
    # In the second group the three others differ from NaN's neighbours' mean, so rank and the step's mean would each see a difference.
    scores_PG = torch.tensor([[math.nan, 1.0, 0.0, 0.0], [5.0, math.nan, 9.0, 9.0], [math.nan] * 4])
    apart = rules_apart({"a": scores_PG}, {"a": 2.0}, advantage, Std.sample)
    assert (apart[scores_PG.isnan()] == 0).all()
    assert (apart[~scores_PG.isnan()] != 0).all()


# --- ratio and clip on paper: T 3


def test_the_sequence_ratio_is_the_geometric_mean_over_the_completion():
    # Ratios 2 and 8: sqrt(16) = 4 on both tokens; what stands behind the end does not count.
    logprobs = torch.tensor([[math.log(2), math.log(8), 5.0]], requires_grad=True)
    mask = torch.tensor([[1.0, 1.0, 0.0]])
    ratio = importance_ratio(logprobs, torch.zeros(1, 3), mask, Ratio.sequence)
    assert ratio[0, :2].tolist() == pytest.approx([4.0, 4.0])
    # d 4 / d logp of a token = 4 / 2, once for each of the two tokens that carry the ratio.
    (ratio * mask).sum().backward()
    assert logprobs.grad[0].tolist() == pytest.approx([4.0, 4.0, 0.0])


def loss_and_gradient(ratios, advantages, clip, dual_clip=None):
    """Loss per token and its gradient in log pi, at log pi_old = -1."""
    logprobs = (torch.tensor([ratios]).log() - 1).requires_grad_()
    ratio = importance_ratio(logprobs, torch.full_like(logprobs, -1.0), torch.ones_like(logprobs), Ratio.token)
    loss = surrogate(ratio, logprobs, torch.tensor([advantages]), clip, 0.2, 0.3, dual_clip)
    return loss[0].tolist(), torch.autograd.grad(loss.sum(), logprobs)[0][0].tolist(), logprobs[0].tolist()


def test_dual_clip_bounds_the_loss_of_bad_tokens_only():
    # A = -1: -max(min(-w, -clip w), -3) = 2 at w = 2, 3 at w = 5, where the gradient ends. A = +1, w = 5: -1.3.
    loss, gradient, _ = loss_and_gradient([2.0, 5.0, 5.0], [-1.0, -1.0, 1.0], Clip.ppo, 3.0)
    assert loss == pytest.approx([2.0, 3.0, -1.3]) and gradient == pytest.approx([2.0, 0.0, 0.0])
    clipped = is_clipped(torch.tensor([[2.0, 5.0, 5.0]]), torch.tensor([[-1.0, -1.0, 1.0]]), Clip.ppo, 0.2, 0.3, 3.0)
    assert clipped.tolist() == [[False, True, True]]


def test_cispo_caps_the_weight_and_keeps_every_tokens_gradient():
    # -min(w, 1.3) * 2 * log pi, gradient -min(w, 1.3) * 2.
    loss, gradient, logprobs = loss_and_gradient([0.5, 1.0, 2.0], [2.0, 2.0, 2.0], Clip.cispo)
    assert gradient == pytest.approx([-1.0, -2.0, -2.6])
    assert loss == pytest.approx([g * logp for g, logp in zip(gradient, logprobs, strict=True)])
    assert is_clipped(torch.tensor([[0.5, 1.0, 2.0]]), torch.ones(1, 3), Clip.cispo, 0.2, 0.3, None).tolist() == [[False, False, True]]


def test_no_clip_is_the_plain_weighted_advantage():
    loss, gradient, _ = loss_and_gradient([0.5, 1.0, 9.0], [2.0, -1.0, 1.0], Clip.none)
    assert loss == pytest.approx([-1.0, 1.0, -9.0]) and gradient == pytest.approx([-1.0, 1.0, -9.0])
    assert not is_clipped(torch.tensor([[0.5, 9.0]]), torch.ones(1, 2), Clip.none, 0.2, 0.3, None).any()


# --- KL on paper


def test_the_symmetric_estimate_averages_to_the_mean_of_both_kls():
    # pi = 1/2, pi_ref = 1/4: (1/2 - 1) * -0.6931 / 2 = 0.17329.
    half, quarter = torch.tensor([[0.5]]).log(), torch.tensor([[0.25]]).log()
    assert kl_estimate(half, quarter, Estimator.symmetric).item() == pytest.approx(0.17329, abs=1e-5)
    pi, ref = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    both = ((pi * (pi / ref).log()).sum() + (ref * (ref / pi).log()).sum()) / 2
    mean = (pi * kl_estimate(pi.log()[None], ref.log()[None], Estimator.symmetric)[0]).sum()
    assert mean.item() == pytest.approx(both.item(), abs=1e-6)


def test_the_exact_kl_by_hand_with_a_token_that_is_never_sampled():
    # (1/2, 1/4, 1/4) against (1/4, 1/2, 1/4): ln 2 / 2 - ln 2 / 4 = 0.17329; a fourth token has probability 0 in both.
    pi, ref = torch.tensor([[0.5, 0.25, 0.25, 0.0]]).log(), torch.tensor([[0.25, 0.5, 0.25, 0.0]]).log()
    pi.requires_grad_()
    value = exact_kl(pi, ref)
    assert value.item() == pytest.approx(0.17329, abs=1e-5)
    assert torch.isfinite(torch.autograd.grad(value.sum(), pi)[0]).all()


def paper_batch(**changes) -> Batch:
    """One prompt, two completions of 2 and 3 tokens. Sampled and reference log-probs make k1 0.5, 0.5 | 0, 1, 1; junk behind the end."""
    values = {
        "group_B": torch.tensor([0, 1]),
        "prompt_ids_BS": torch.tensor([[0], [1]]),
        "prompt_lengths_B": torch.tensor([1, 1]),
        "completion_ids_BT": torch.tensor([[0, 1, 0], [1, 0, 1]]),
        "completion_lengths_B": torch.tensor([2, 3]),
        "trained_B": torch.tensor([True, True]),
        "sampled_logprobs_BT": torch.zeros(2, 3),
        "old_logprobs_BT": torch.tensor([[-1.0, -1.0, 0.0], [-1.0, -1.0, -1.0]]),
        "reference_logprobs_BT": torch.tensor([[-1.5, -1.5, 9.0], [-1.0, -2.0, -2.0]]),
    }
    return Batch(**values | changes)


def scores_of(total_PG: Tensor) -> Scores:
    return Scores({"a": total_PG}, total_PG, total_PG >= 1, [], {"a": 0}, {"a": 0}, {}, total_PG.isnan())


IN_REWARD = kl_section(placement=Placement.reward, estimator=Estimator.k1)


def test_the_kl_in_the_reward_counts_for_the_whole_completion():
    # KL 1 and 2, beta 0.1: rewards 1 - 0.1 = 0.9 and 0 - 0.2 = -0.2 with mean 0.35, so +-0.55 on every token.
    algorithm, scores = algorithm_section(advantage=Advantage.group_mean), scores_of(torch.tensor([[1.0, 0.0]]))
    advantages = assign(scores, {"a": 1.0}, [], paper_batch(), 0.1, algorithm, IN_REWARD)
    assert advantages.tolist() == [pytest.approx([0.55] * 3), pytest.approx([-0.55] * 3)]
    for beta, kl in ((0.0, IN_REWARD), (0.1, kl_section())):
        untouched = assign(scores, {"a": 1.0}, [], paper_batch(), beta, algorithm, kl)
        assert untouched.tolist() == [[0.5] * 3, [-0.5] * 3]


@pytest.mark.parametrize(("rewards", "expected"), [([1.0, 0.0], [0.75711, -0.75711]), ([0.5, 0.5], [0.05, -0.05])])
@pytest.mark.parametrize("combine", Combine)
def test_the_kl_in_the_reward_is_not_blown_up_by_the_groups_std(rewards, expected, combine):
    # beta x KL is 0.1 and 0.2, so +-0.05 beside +-0.70711, and beside 0 in a group of equal rewards.
    algorithm, scores = algorithm_section(combine=combine), scores_of(torch.tensor([rewards]))
    advantages = assign(scores, {"a": 1.0}, [], paper_batch(), 0.1, algorithm, IN_REWARD)
    assert advantages[:, 0].tolist() == pytest.approx(expected, abs=1e-5)


def test_the_kl_in_the_reward_of_process_supervision_is_each_tokens_own_to_the_end():
    # Advantages +-1 (population std of 1, 0), less 0.1 x the k1 from here to the end: 1, 0.5 | 2, 2, 1.
    algorithm, scores = algorithm_section(advantage=Advantage.process, std=Std.population), scores_of(torch.tensor([[1.0, 0.0]]))
    first, second = assign(scores, {}, [[(1, 1.0)], [(2, 0.0)]], paper_batch(), 0.1, algorithm, IN_REWARD).tolist()
    assert first[:2] == pytest.approx([0.9, 0.95])
    assert second == pytest.approx([-1.2, -1.2, -1.1])


def test_assign_normalises_rules_apart_when_asked():
    rules = {"a": torch.tensor([[1.0, 0.0]]), "b": torch.tensor([[0.0, 10.0]])}
    scores = Scores(rules, rules["a"] + 0.5 * rules["b"], rules["a"] >= 1, [], {}, {}, {}, rules["a"].isnan())
    algorithm = algorithm_section(combine=Combine.normalise_first)
    advantages = assign(scores, {"a": 1.0, "b": 0.5}, [], paper_batch(), 0.0, algorithm, kl_section())
    assert advantages[:, 0].tolist() == pytest.approx([0.35355, -0.35355], abs=1e-5)


def test_beta_warms_up_from_zero_and_the_schedule_begins_behind_it():
    # Three steps of warm-up: 0.1, 0.2, 0.3, then 0.4 at step 4, from where a line of 6 steps falls to 0.1 at step 10: 0.25 half way.
    constant = BetaSchedule(kl_section(beta=0.4, warmup_steps=3), 10)
    assert [constant.at(step) for step in (1, 2, 3, 4, 10)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])
    for schedule in (KlSchedule.linear, KlSchedule.cosine):
        moving = BetaSchedule(kl_section(schedule=schedule, beta=0.4, end_beta=0.1, warmup_steps=3), 10)
        assert [moving.at(step) for step in (1, 4, 7, 10)] == pytest.approx([0.1, 0.4, 0.25, 0.1])
        assert moving.at(10) == 0.1


# --- a policy that is a table of logits, so that `improve` itself can be checked against the plain equation


class Table:
    """Logits of every token of every completion, free parameters all; row numbers travel as prompts."""

    def __init__(self, lengths: list[int], T: int, V: int = 5, seed: int = 0, budget: int = 10**6):
        draw = torch.Generator().manual_seed(seed)
        B = len(lengths)
        self.logits_BTV = torch.nn.Parameter(torch.randn(B, T, V, generator=draw))
        self.reference_BTV = torch.randn(B, T, V, generator=draw)
        self.advantages_BT = torch.randn(B, T, generator=draw)
        self.ids_BT = torch.randint(V, (B, T), generator=draw)
        self.lengths, self.budget = lengths, budget
        self.trainable = {"logits": self.logits_BTV}

    def batch(self, trained: list[bool] | None = None, padding: int = 0) -> Batch:
        B, T, _ = self.logits_BTV.shape
        reference_BTV = self.reference_BTV.log_softmax(dim=2)

        def padded(values_BT: Tensor, junk: float) -> Tensor:
            return torch.cat([values_BT, torch.full((B, padding), junk, dtype=values_BT.dtype)], dim=1)

        return Batch(
            group_B=torch.arange(B),
            prompt_ids_BS=torch.arange(B)[:, None],
            prompt_lengths_B=torch.ones(B, dtype=torch.long),
            completion_ids_BT=padded(self.ids_BT, 0),
            completion_lengths_B=torch.tensor(self.lengths),
            trained_B=torch.tensor(trained or [True] * B),
            sampled_logprobs_BT=torch.zeros(B, T + padding),
            reference_logprobs_BT=padded(reference_BTV.gather(2, self.ids_BT[:, :, None])[:, :, 0], -3.0),
            advantages_BT=padded(self.advantages_BT, 7.0),
        )

    def micro_batches(self, batch: Batch) -> list[Tensor]:
        return micro_batches(batch, self.budget)

    def token_logprobs(self, batch: Batch, entropy_gradient: bool = False) -> TokenScores:
        rows, width = batch.prompt_ids_BS[:, -1], batch.completion_ids_BT.shape[1]
        extra = max(0, width - self.logits_BTV.shape[1])
        logits, reference = (
            torch.nn.functional.pad(values[rows, :width], (0, 0, 0, extra)).log_softmax(dim=2)
            for values in (self.logits_BTV, self.reference_BTV)
        )
        mask = (torch.arange(width)[None] < batch.completion_lengths_B[:, None]).float()
        logprobs = logits.gather(2, batch.completion_ids_BT[:, :, None])[:, :, 0]
        entropy = -(logits.exp() * logits).sum(dim=2)
        kl = exact_kl(logits.flatten(0, 1), reference.flatten(0, 1)).view_as(logprobs)
        return TokenScores(logprobs * mask, (entropy if entropy_gradient else entropy.detach()) * mask, kl * mask)


LIMIT = 9


def improved(table: Table, batch: Batch, algorithm: Algorithm, kl: Kl, beta: float) -> tuple[Update, Tensor]:
    """The update, and the gradient of its last optimizer step."""
    updates = algorithm.updates_per_rollout
    update = improve(table, Mover(table, updates, 1.5), NO_SCHEDULE, batch, beta, algorithm, kl, 0.0, LIMIT)
    return update, table.logits_BTV.grad.clone()


@dataclass
class Plain:
    """The objective in float64, token by token, as the papers write it."""

    table: Table
    old_BTV: Tensor
    algorithm: Algorithm
    kl: Kl
    beta: float

    def gradient(self) -> Tensor:
        now_BTV = self.table.logits_BTV.detach().double().requires_grad_()
        return torch.autograd.grad(self.loss(now_BTV), now_BTV)[0]

    def loss(self, now_BTV: Tensor) -> Tensor:
        lengths = self.table.lengths
        sums, total = [], 0.0
        for i, n in enumerate(lengths):
            now, old, ref = (
                torch.log_softmax(values[i, :n].double(), dim=1) for values in (now_BTV, self.old_BTV, self.table.reference_BTV)
            )
            chosen = self.table.ids_BT[i, :n].tolist()
            sums.append([self.token(now, old, ref, chosen, t, self.table.advantages_BT[i, t].item()) for t in range(n)])
        for terms in sums:
            if self.algorithm.aggregation is Aggregation.sequence_mean:
                total = total + sum(terms) / len(terms) / len(lengths)
            elif self.algorithm.aggregation is Aggregation.token_mean:
                total = total + sum(terms) / sum(lengths)
            else:
                total = total + sum(terms) / (len(lengths) * LIMIT)
        return total

    def token(self, now: Tensor, old: Tensor, ref: Tensor, chosen: list[int], t: int, advantage: float) -> Tensor:
        algorithm, kl = self.algorithm, self.kl
        ratios = [now[s, token].exp() / old[s, token].exp() for s, token in enumerate(chosen)]
        logp = now[t, chosen[t]]
        w = ratios[t] if algorithm.ratio is Ratio.token else math.prod(ratios) ** (1 / len(ratios))
        loss = self.policy_part(w, logp, advantage)
        if self.beta > 0:
            anchor = (old if kl.anchor is Anchor.old else ref)[t]
            r = anchor[chosen[t]].exp() / logp.exp()
            estimate = {
                Estimator.k1: -r.log(),
                Estimator.k2: r.log() ** 2 / 2,
                Estimator.k3: r - 1 - r.log(),
                Estimator.symmetric: (r - 1) * r.log() / 2,
                Estimator.exact: (now[t].exp() * (now[t] - anchor)).sum(),
            }[kl.estimator]
            loss = loss + self.beta * estimate * (ratios[t] if kl.gradient is KlGradient.unbiased else 1)
        return loss + algorithm.entropy_bonus * (now[t].exp() * now[t]).sum()

    def policy_part(self, w: Tensor, logp: Tensor, advantage: float) -> Tensor:
        algorithm = self.algorithm
        low, high, dual = 1 - algorithm.clip_low, 1 + algorithm.clip_high, algorithm.dual_clip
        if algorithm.clip is Clip.none:
            return -w * advantage
        if algorithm.clip is Clip.cispo:
            return -min(w.item(), high) * advantage * logp
        # Without the min: a good token stops counting above the range, a bad one below it, and above the dual clip.
        if advantage > 0:
            return -advantage * (w if w < high else torch.tensor(high))
        if dual is not None and w > dual:
            return torch.tensor(-advantage * dual)
        return -advantage * (w if w > low else torch.tensor(low))


CLIPS = {
    "ppo": {"clip_low": 0.1, "clip_high": 0.3},
    "dual": {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.6},
    "cispo": {"clip": Clip.cispo, "clip_high": 0.3},
    "none": {"clip": Clip.none},
}
PENALTIES = [None, *((e, KlGradient.plain) for e in Estimator), (Estimator.k1, KlGradient.unbiased), (Estimator.k3, KlGradient.unbiased)]


def assert_plain_equation(algorithm: Algorithm, kl: Kl, beta: float) -> None:
    table = Table([3, 1, 2, 3], 3)
    old_BTV = table.logits_BTV.detach().clone()
    _, gradient = improved(table, table.batch(), algorithm, kl, beta)
    expected = Plain(table, old_BTV, algorithm, kl, beta).gradient()
    assert expected.norm() > 1e-3
    assert (gradient - expected).norm() <= 2e-6 * expected.norm()


@pytest.mark.parametrize("penalty", PENALTIES, ids=lambda p: "-".join(x.name for x in p) if p else "no KL")
@pytest.mark.parametrize("ratio", Ratio)
@pytest.mark.parametrize("clip", CLIPS)
def test_the_gradient_is_that_of_the_plain_equation(clip, ratio, penalty):
    # The second update of a rollout, after a move that takes ratios out of every clip range; the third has moved on again.
    kl = kl_section(estimator=penalty[0], gradient=penalty[1]) if penalty else kl_section()
    for aggregation, updates in zip(Aggregation, (1, 2, 3), strict=True):
        algorithm = algorithm_section(ratio=ratio, aggregation=aggregation, updates_per_rollout=updates, **CLIPS[clip])
        assert_plain_equation(algorithm, kl, 0.3 if penalty else 0.0)


@pytest.mark.parametrize("estimator", [e for e in Estimator if e is not Estimator.exact])
def test_the_penalty_against_the_old_policy_is_that_of_the_plain_equation(estimator):
    algorithm = algorithm_section(clip=Clip.none, updates_per_rollout=2)
    assert_plain_equation(algorithm, kl_section(estimator=estimator, anchor=Anchor.old), 0.3)


@pytest.mark.parametrize("aggregation", Aggregation)
def test_the_entropy_bonus_is_that_of_the_plain_equation(aggregation):
    assert_plain_equation(algorithm_section(aggregation=aggregation, entropy_bonus=0.1), kl_section(), 0.0)


def test_the_entropy_bonus_by_hand():
    # Two equal logits have entropy ln 2; without any advantage the loss is minus 0.1 times it.
    table = Table([2, 3], 3, V=2)
    table.logits_BTV.data.zero_()
    table.advantages_BT.zero_()
    update, gradient = improved(table, table.batch(), algorithm_section(entropy_bonus=0.1), kl_section(), 0.0)
    assert update.metrics["loss"] == pytest.approx(-0.069315, abs=1e-6)
    assert gradient.abs().max() < 1e-7  # and it is the largest entropy there is


@pytest.mark.parametrize("aggregation", Aggregation)
def test_masked_completions_leave_the_loss_of_the_others_as_if_alone(aggregation):
    algorithm, kl = algorithm_section(aggregation=aggregation, entropy_bonus=0.1), kl_section()
    table, alone = Table([3, 2, 1], 3), Table([3, 1], 3)
    for name in ("logits_BTV", "reference_BTV", "advantages_BT", "ids_BT"):
        getattr(alone, name).data.copy_(getattr(table, name)[[0, 2]])
    (update, gradient), (expected, its_gradient) = (
        improved(t, batch, algorithm, kl, 0.3) for t, batch in ((table, table.batch([True, False, True])), (alone, alone.batch()))
    )
    assert update.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=1e-6)
    assert torch.allclose(gradient[[0, 2]], its_gradient, rtol=1e-5, atol=1e-8) and not gradient[1].any()


def test_the_kl_in_the_reward_is_no_term_of_the_loss():
    gradients = []
    for kl, beta in ((kl_section(placement=Placement.reward, estimator=Estimator.k1), 0.3), (kl_section(), 0.0)):
        table = Table([3, 2], 3)
        gradients.append(improved(table, table.batch(), algorithm_section(), kl, beta)[1])
    assert torch.equal(*gradients)


# --- properties

quarters = st.integers(-8, 8).map(lambda n: n / 4)
groups = st.integers(2, 4).flatmap(lambda G: st.lists(st.lists(quarters, min_size=G, max_size=G), min_size=1, max_size=3))
GROUP_RELATIVE = [advantage for advantage in OUTCOME if advantage is not Advantage.reinforce_pp]  # that one has no group baseline
SCALE_FREE = {Advantage.group_std, Advantage.batch_std, Advantage.reinforce_pp, Advantage.reinforce_pp_baseline, Advantage.rank}


@given(groups, st.sampled_from(list(OUTCOME)), st.sampled_from(list(Std)), st.randoms())
def test_the_order_within_a_group_permutes_its_advantages(rewards, advantage, std, random):
    total_PG = torch.tensor(rewards)
    order = list(range(total_PG.shape[1]))
    random.shuffle(order)
    moved = outcome_advantages(total_PG[:, order], advantage, std)
    assert torch.allclose(moved, outcome_advantages(total_PG, advantage, std)[:, order], atol=1e-5)


@given(groups, st.sampled_from(list(OUTCOME)), st.sampled_from(list(Std)), quarters)
def test_a_constant_added_to_all_rewards_changes_nothing(rewards, advantage, std, constant):
    total_PG = torch.tensor(rewards)
    shifted = outcome_advantages(total_PG + constant, advantage, std)
    assert torch.allclose(shifted, outcome_advantages(total_PG, advantage, std), atol=1e-5)


@given(groups, st.sampled_from(list(OUTCOME)), st.sampled_from(list(Std)), st.sampled_from([0.125, 0.3, 8.0, 100.0]))
def test_scaled_rewards_scale_the_advantages_or_leave_them_alone(rewards, advantage, std, factor):
    total_PG = torch.tensor(rewards)
    scaled = outcome_advantages(factor * total_PG, advantage, std)
    expected = outcome_advantages(total_PG, advantage, std) * (1 if advantage in SCALE_FREE else factor)
    assert torch.allclose(scaled, expected, rtol=1e-4, atol=1e-4)


@given(st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=4, max_size=4), min_size=1, max_size=3))
def test_on_rewards_of_0_and_1_rank_is_leave_one_out(rewards):
    total_PG = torch.tensor(rewards)
    by_rank, by_others = (outcome_advantages(total_PG, a, Std.sample) for a in (Advantage.rank, Advantage.leave_one_out))
    assert torch.allclose(by_rank, by_others, atol=1e-6)


@given(groups, st.sampled_from(list(Std)), st.randoms())
def test_the_order_within_a_group_permutes_process_advantages(rewards, std, random):
    G = len(rewards[0])
    steps = [[(0, r), (t % 3, r * r)] for t, r in enumerate(itertools.chain(*rewards))]
    order = list(range(G))
    random.shuffle(order)
    moved = process_advantages([steps[p * G + g] for p in range(len(rewards)) for g in order], G, 3, std)
    expected = process_advantages(steps, G, 3, std).view(-1, G, 3)[:, order].reshape(-1, 3)
    assert torch.allclose(moved, expected, atol=1e-4)


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.integers(1, 3),
    st.sampled_from(list(Ratio)),
    st.sampled_from(list(Aggregation)),
    st.sampled_from(list(Estimator)),
)
def test_padding_never_matters(lengths, padding, ratio, aggregation, estimator):
    algorithm = algorithm_section(ratio=ratio, aggregation=aggregation, updates_per_rollout=2, entropy_bonus=0.1)
    results = []
    for extra in (0, padding):
        table = Table(lengths, max(lengths))
        update, gradient = improved(table, table.batch(padding=extra), algorithm, kl_section(estimator=estimator), 0.3)
        results.append((gradient, {name: value for name, value in update.metrics.items() if name != "policy/sampler_gap"}))
    assert torch.allclose(results[0][0], results[1][0], rtol=1e-5, atol=1e-7)
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-5, abs=1e-7)


@given(
    st.lists(quarters, min_size=1, max_size=3),
    st.sampled_from([*itertools.product(GROUP_RELATIVE, Ratio), (Advantage.process, Ratio.token)]),
    st.sampled_from(list(CLIPS)),
)
def test_groups_of_equal_rewards_have_no_gradient_without_kl(rewards, weighing, clip):
    advantage, ratio = weighing
    table = Table([1, 3] * len(rewards), 3)
    batch, scores = table.batch(), scores_of(torch.tensor([[r, r] for r in rewards]))
    algorithm = algorithm_section(advantage=advantage, ratio=ratio, updates_per_rollout=2, **CLIPS[clip])
    steps = [[(n - 1, r)] for r in rewards for n in (1, 3)]
    batch.advantages_BT = assign(scores, {"a": 1.0}, steps, batch, 0.0, algorithm, kl_section())
    _, gradient = improved(table, batch, algorithm, kl_section(), 0.0)
    assert not gradient.any()


def test_without_a_group_baseline_equal_groups_may_have_a_gradient():
    equal_PG = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    assert outcome_advantages(equal_PG, Advantage.reinforce_pp, Std.population).tolist() == [[1.0, 1.0], [-1.0, -1.0]]


# --- micro-batches

PRESETS = sorted(path.stem for path in CONF.glob("algorithm/[!_]*.yaml"))
REWARDS_PG = torch.tensor([[1.0, 0.0, 0.25, 0.5], [0.0, 0.0, 1.5, 1.0], [0.5, 0.5, 0.5, 0.5]])


def gradients_by_budget(folder, *overrides: str) -> list[list[Tensor]]:
    """Gradients of the second update of a rollout under four budgets.

    The forward is in float64: in float32 the order of its sums alone makes 1e-6, and only the cut is to be seen here.
    """
    cfg = config("algorithm.updates_per_rollout=2", *overrides)
    found = []
    for budget in (100_000, 120, 40, 1):
        policy = load_policy(model_section(folder, micro_batch_tokens=budget), torch.device("cpu"), seed=1, distribution=Distribution(1.0))
        policy.model.double()
        shake(policy)
        prompts = encoded(policy, "1+1=", "a longer prompt 22+33=", "7=")
        sampled = sample(policy, prompts, 4, rollout_section(), uniforms(1, "rollout", 1, 3, 4, 12))
        batch = collate(sampled, policy.pad_id, cfg.algorithm.truncated)
        batch = policy.annotate(batch, reference=True, exact=cfg.kl.estimator is Estimator.exact, old=True)
        batch.advantages_BT = assign(scores_of(REWARDS_PG), {"a": 1.0}, [], batch, 0.04, cfg.algorithm, cfg.kl)
        improve(policy, Mover(policy, 2, 0.1), NO_SCHEDULE, batch, 0.04, cfg.algorithm, cfg.kl, 0.0, 12)
        found.append([p.grad for p in policy.trainable.values()])
    return found


def assert_the_cut_changes_nothing(folder, *overrides: str) -> None:
    whole, *cut = gradients_by_budget(folder, *overrides)
    assert all(g.norm() > 0 for g in whole)
    for gradient in cut:
        assert all((a - b).norm() <= 1e-6 * b.norm() for a, b in zip(gradient, whole, strict=True))


@pytest.mark.parametrize("preset", PRESETS)
def test_the_cut_into_micro_batches_changes_no_presets_gradient(model_folder, preset):
    assert_the_cut_changes_nothing(model_folder, f"algorithm={preset}")


@pytest.mark.parametrize(
    "overrides",
    [
        ["kl.estimator=exact", "algorithm.entropy_bonus=0.1"],
        ["kl.anchor=old"],
        ["kl.gradient=unbiased"],
        ["kl.placement=reward", "kl.estimator=k1"],
        ["algorithm.truncated=mask", "algorithm.aggregation=token_mean"],
    ],
)
def test_nor_that_of_any_kind_of_kl_or_mask(model_folder, overrides):
    assert_the_cut_changes_nothing(model_folder, *overrides)
