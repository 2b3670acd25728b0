"""The same small batch through this project and through TRL's GRPOTrainer: one loss and one gradient where both mean the same.

Where the two differ by design, the test says how and by how much. TRL gets the batch by its `rollout_func`, makes its own masks,
old and reference log-probs, and advantages; this project takes TRL's advantages, so that only the objective is compared.
"""

import importlib.util
import itertools
from dataclasses import dataclass

import pytest
import torch
from models import NO_SCHEDULE, Mover, algorithm_section, encoded, kl_section, model_section, shake
from torch import Tensor

from grpo_cli.advantages import group_spread, outcome_advantages, rules_apart
from grpo_cli.batch import collate
from grpo_cli.config import Advantage, Aggregation, Clip, KlGradient, Ratio, Std, Truncated
from grpo_cli.policy import Distribution, load_policy
from grpo_cli.records import Completion, Ended, Group
from grpo_cli.update import improve

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed: try pip install 'grpo-cli[dev]'"),
    pytest.mark.filterwarnings("ignore:You are using 'rollout_func'"),
]

PROMPTS = ("1+1=", "a longer prompt 22+33=")
LENGTHS = ((3, 5, 12, 7), (2, 6, 9, 4))
LIMIT = 12  # the third completion is cut there, without an end token
REWARDS_PG = torch.tensor([[1.0, 0.0, 0.25, 0.5], [0.0, 0.0, 1.5, 1.0]])
FAR = 0.15  # how far the first of two updates moves the weights: some token ratios leave every clip range below
WITH_TRLS_CONSTANT = 1e-4  # TRL divides by std + 1e-4


def token_ids() -> list[list[list[int]]]:
    """(P, G) completions of characters; 2 is the end token."""
    draw = torch.Generator().manual_seed(3)
    ids = [[torch.randint(3, 46, (n,), generator=draw).tolist() for n in lengths] for lengths in LENGTHS]
    return [[row if len(row) == LIMIT else [*row[:-1], 2] for row in group] for group in ids]


def fresh_policy(folder):
    """The same LoRA model at its start. TRL scores pad and begin tokens too, which here are never sampled: both do so in this file."""
    policy = load_policy(model_section(folder, micro_batch_tokens=60), torch.device("cpu"), seed=1, distribution=Distribution(1.0))
    policy._forbidden = policy._forbidden[:0]
    return policy


@dataclass
class Result:
    loss: float
    gradient: list[Tensor]
    metrics: dict[str, float]
    advantages_B: Tensor


def batch_for(policy, advantages_B: Tensor, truncated: Truncated):
    groups = []
    for prompt, group in zip(encoded(policy, *PROMPTS), token_ids(), strict=True):
        ends = [Ended.length if len(ids) == LIMIT else Ended.eos for ids in group]
        groups.append(Group(prompt, [Completion(ids, "", [-1.0] * len(ids), end) for ids, end in zip(group, ends, strict=True)]))
    batch = policy.annotate(collate(groups, policy.pad_id, truncated), reference=True)
    batch.advantages_BT = advantages_B[:, None].expand(batch.completion_ids_BT.shape)
    return batch


def by_us(folder, advantages_B: Tensor, beta: float, off_policy: bool, algorithm: dict, kl: dict) -> Result:
    """Loss and gradient of the last update, whose old log-probs are those of the first."""
    losses = []
    for updates in (1, 2) if off_policy else (1,):
        policy = fresh_policy(folder)
        shake(policy)
        section = algorithm_section(updates_per_rollout=updates, **algorithm)
        batch = batch_for(policy, advantages_B, section.truncated)
        update = improve(policy, Mover(policy, updates, FAR), NO_SCHEDULE, batch, beta, section, kl_section(**kl), 0.0, LIMIT)
        losses.append(update.metrics["loss"] * updates - sum(losses))  # the metric is the mean over the updates
    return Result(losses[-1], [p.grad for p in policy.trainable.values()], update.metrics, advantages_B)


def trainer_for(policy, tmp_path, rules_PG: list[Tensor], **options):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def rollout(prompts, trainer):
        ids = [e.prompt_ids for e in encoded(policy, *PROMPTS) for _ in range(4)]
        return {"prompt_ids": ids, "completion_ids": [row for group in token_ids() for row in group], "logprobs": None}

    def rule(rewards_PG):
        return lambda prompts, **_: rewards_PG.flatten().tolist()

    config = GRPOConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=LIMIT,
        **options,
    )
    trainer = GRPOTrainer(
        policy.model,
        [rule(rewards_PG) for rewards_PG in rules_PG],
        config,
        Dataset.from_dict({"prompt": list(PROMPTS)}),
        processing_class=policy.tokenizer,
        rollout_func=rollout,
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


ROWS = [{"prompt": prompt} for prompt in PROMPTS for _ in range(4)]


def by_trl(folder, tmp_path, off_policy: bool, **options) -> Result:
    """The same, by TRL's own loss. The trainer is built before the weights move, so its reference is the start.

    TRL's defaults are those of another algorithm (the unbiased KL, for one), so the plain ones are set here.
    """
    options = {"use_bias_correction_kl": False, "loss_type": "grpo"} | options
    policy = fresh_policy(folder)
    trainer = trainer_for(policy, tmp_path, [REWARDS_PG], num_iterations=2 if off_policy else 1, **options)
    shake(policy)
    inputs = trainer._generate_and_score_completions(ROWS)
    assert ("old_per_token_logps" in inputs) == off_policy
    if off_policy:
        shake(policy, FAR)
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    metrics = {name: values[0] for name, values in trainer._metrics["train"].items()}
    return Result(loss.item(), [p.grad for p in policy.trainable.values()], metrics, inputs["advantages"])


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Largest relative L2 norm of the difference of two gradients, tensor by tensor."""
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(ours, theirs, strict=True))


def assert_agree(ours: Result, theirs: Result, factor: float = 1.0) -> None:
    """ours is theirs times `factor`. On-policy terms cancel in the loss, so its scale is that of the advantages."""
    scale = max(abs(theirs.loss), theirs.advantages_B.abs().mean().item())
    assert abs(ours.loss - factor * theirs.loss) <= 1e-5 * scale
    assert difference(ours.gradient, [factor * g for g in theirs.gradient]) <= 1e-5


NAMED = {
    "grpo": ({}, {"loss_type": "grpo"}),
    "dr_grpo": ({"aggregation": Aggregation.constant}, {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "dapo": ({"aggregation": Aggregation.token_mean, "clip_high": 0.28}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "gspo": (
        {"ratio": Ratio.sequence, "clip_low": 3e-4, "clip_high": 4e-4},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    ),
    # TRL's epsilon_high is the cap itself.
    "cispo": ({"clip": Clip.cispo, "aggregation": Aggregation.token_mean}, {"loss_type": "cispo", "epsilon_high": 1.2}),
    "dual clip": ({"dual_clip": 1.5}, {"loss_type": "grpo", "delta": 1.5}),
}
PENALTIES = {"no KL": (0.0, False), "plain KL": (0.04, False), "unbiased KL": (0.04, True)}
# The unbiased KL under a sequence ratio differs by design: a test of its own, below.
SAME = [pair for pair in itertools.product(NAMED, PENALTIES) if pair != ("gspo", "unbiased KL")]


def kl_of(unbiased: bool) -> dict:
    return {"gradient": KlGradient.unbiased if unbiased else KlGradient.plain}


@pytest.mark.parametrize("off_policy", [False, True], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize(("name", "penalty"), SAME)
def test_loss_and_gradient_agree(model_folder, tmp_path, name, penalty, off_policy):
    (algorithm, options), (beta, unbiased) = NAMED[name], PENALTIES[penalty]
    theirs = by_trl(model_folder, tmp_path, off_policy, beta=beta, use_bias_correction_kl=unbiased, **options)
    ours = by_us(model_folder, theirs.advantages_B, beta, off_policy, algorithm, kl_of(unbiased))
    assert_agree(ours, theirs)
    assert (ours.metrics["policy/clip_frac"] > 0) == off_policy


def test_the_dual_clip_is_at_work_in_the_comparison(model_folder, tmp_path):
    theirs = by_trl(model_folder, tmp_path, True, **NAMED["dual clip"][1])
    plain = by_trl(model_folder, tmp_path, True, **NAMED["grpo"][1])
    assert difference(theirs.gradient, plain.gradient) > 1e-2


def test_the_measured_kl_is_the_same_mean_over_tokens(model_folder, tmp_path):
    theirs = by_trl(model_folder, tmp_path, False, beta=0.04)
    ours = by_us(model_folder, theirs.advantages_B, 0.04, False, {}, {})
    assert ours.metrics["kl/reference"] == pytest.approx(theirs.metrics["kl"], rel=1e-5)
    assert ours.metrics["policy/entropy"] == pytest.approx(theirs.metrics["entropy"], rel=1e-5)


# --- advantages


@pytest.mark.parametrize(
    ("scale", "advantage"), [("group", Advantage.group_std), ("none", Advantage.group_mean), ("batch", Advantage.batch_std)]
)
def test_advantages_agree_with_trls_constant_mapped(model_folder, tmp_path, scale, advantage):
    theirs = by_trl(model_folder, tmp_path, False, scale_rewards=scale).advantages_B.view(2, 4)
    ours = outcome_advantages(REWARDS_PG, advantage, Std.sample)
    spread = {"group": group_spread(REWARDS_PG, Std.sample)[:, None], "batch": REWARDS_PG.std(), "none": None}[scale]
    mapped = ours if spread is None else ours * spread / (spread + WITH_TRLS_CONSTANT)
    assert torch.allclose(mapped, theirs, rtol=1e-5, atol=1e-6)
    # Without the mapping they are apart by 1e-4 / std: here 2e-4, and nearly everything once a group's std is near 1e-4.
    assert ((ours - theirs).abs().max() > 1e-4) == (scale != "none")


def test_rules_normalised_apart_are_whitened_once_more_by_trl(model_folder, tmp_path):
    # TRL's normalize_then_sum divides the sum by its std over the step; here the weights of the rules alone set the scale.
    rules = {"a": 1e4 * REWARDS_PG, "b": 1e4 * torch.tensor([[0.0, 1.0, 1.0, 3.0], [2.0, 0.0, 1.0, 0.0]])}  # 1e4 makes the 1e-4 vanish
    policy = fresh_policy(model_folder)
    options = {"loss_type": "grpo", "multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 0.5]}
    trainer = trainer_for(policy, tmp_path, list(rules.values()), **options)
    theirs = trainer._generate_and_score_completions(ROWS)["advantages"].view(2, 4)
    ours = rules_apart(rules, {"a": 1.0, "b": 0.5}, Advantage.group_std, Std.sample)
    assert torch.allclose(ours / (ours.std() + WITH_TRLS_CONSTANT), theirs, rtol=1e-5, atol=1e-6)
    assert ours.std().item() == pytest.approx(0.7, abs=0.3) and theirs.std().item() == pytest.approx(1.0, abs=1e-3)


# --- where the two differ by design


@pytest.mark.parametrize(("name", "factor"), [("grpo", 8 / 7), ("dr_grpo", 8 / 7), ("dapo", 1.0)])
def test_masked_truncations_leave_the_mean_here_and_count_in_it_in_trl(model_folder, tmp_path, name, factor):
    # One of 8 completions is masked. TRL's mean over completions still divides by 8; the mean over tokens counts the rest in both.
    algorithm, options = NAMED[name]
    theirs = by_trl(model_folder, tmp_path, True, beta=0.04, mask_truncated_completions=True, **options)
    ours = by_us(model_folder, theirs.advantages_B, 0.04, True, algorithm | {"truncated": Truncated.mask}, {})
    assert_agree(ours, theirs, factor)


def test_the_unbiased_kl_takes_the_token_ratio_here_and_the_sequence_ratio_in_trl(model_folder, tmp_path):
    algorithm, options = NAMED["gspo"]
    theirs = by_trl(model_folder, tmp_path, False, beta=0.04, use_bias_correction_kl=True, **options)
    ours = by_us(model_folder, theirs.advantages_B, 0.04, False, algorithm, kl_of(True))
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)  # both ratios are 1
    assert difference(ours.gradient, theirs.gradient) > 1e-2
    # What the ratio adds here is what it adds to TRL's loss at token level.
    added_here = subtract(ours.gradient, by_us(model_folder, theirs.advantages_B, 0.04, False, algorithm, kl_of(False)).gradient)
    token = [by_trl(model_folder, tmp_path, False, beta=0.04, use_bias_correction_kl=unbiased).gradient for unbiased in (True, False)]
    assert difference(added_here, subtract(*token)) <= 1e-4


def subtract(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
    return [x - y for x, y in zip(a, b, strict=True)]


def test_the_entropy_bonus_is_weighed_like_the_rest_here_and_always_a_mean_over_tokens_in_trl(model_folder, tmp_path):
    bonus = 0.1
    for name in ("dapo", "grpo"):
        algorithm, options = NAMED[name]
        theirs = by_trl(model_folder, tmp_path, True, beta=0.04, entropy_coef=bonus, **options)
        ours = by_us(model_folder, theirs.advantages_B, 0.04, True, algorithm | {"entropy_bonus": bonus}, {})
        if name == "dapo":
            assert_agree(ours, theirs)
    policy = fresh_policy(model_folder)
    shake(policy)
    shake(policy, FAR)
    batch = batch_for(policy, theirs.advantages_B, Truncated.keep)
    entropy_BT, lengths_B = policy.token_logprobs(batch).entropy_BT.detach(), batch.completion_lengths_B
    of_completions = (entropy_BT.sum(dim=1) / lengths_B).mean().item()
    of_tokens = (entropy_BT.sum() / lengths_B.sum()).item()
    assert ours.loss - theirs.loss == pytest.approx(-bonus * (of_completions - of_tokens), abs=1e-5)
    assert abs(of_completions - of_tokens) > 1e-2


def test_tokens_that_are_never_sampled_have_no_share_here_and_one_in_trl(model_folder, tmp_path):
    policy = fresh_policy(model_folder)
    trainer = trainer_for(policy, tmp_path, [REWARDS_PG], num_iterations=2)
    theirs_BT = trainer._generate_and_score_completions(ROWS)["old_per_token_logps"]
    batch = batch_for(policy, torch.zeros(8), Truncated.keep)
    with torch.no_grad():
        whole_BT = policy.token_logprobs(batch).logprobs_BT
        policy._forbidden = torch.tensor(policy._never_sampled())
        ours_BT = policy.token_logprobs(batch).logprobs_BT
        logits = policy.lm(torch.tensor([encoded(policy, PROMPTS[0])[0].prompt_ids])).logits[0, -1]
    told_BT = whole_BT != 0
    assert torch.allclose(whole_BT[told_BT], theirs_BT[told_BT], atol=1e-5)
    # Taking pad and begin (ids 0 and 1) out of the softmax raises all others by -log(1 - p(pad) - p(begin)).
    gap = -torch.log(1 - logits.softmax(0)[:2].sum())
    assert (ours_BT - whole_BT)[0, 0].item() == pytest.approx(gap.item(), abs=1e-5) and gap > 1e-3
