"""Run by `make gpu-check` on a machine with CUDA: the same code on another device."""

import pytest
import torch
from models import encoded, model_section, rollout_section
from runs import rows, train

from grpo_cli.batch import collate, to_device
from grpo_cli.config import Dtype, Lora, Truncated
from grpo_cli.policy import Distribution, load_policy
from grpo_cli.randomness import uniforms
from grpo_cli.rollout import sample

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def log_probs(folder, device: str, dtype: Dtype):
    policy = load_policy(model_section(folder, dtype=dtype), torch.device(device), seed=1, distribution=Distribution(1.0))
    prompts = encoded(policy, "1+1=", "a longer prompt 22+33=")
    groups = sample(policy, prompts, 4, rollout_section(), uniforms(1, "rollout", 1, 2, 4, 12))
    batch = to_device(collate(groups, policy.pad_id, Truncated.keep), policy.device)
    scored_BT = policy.token_logprobs(batch).logprobs_BT
    return groups, (scored_BT - batch.sampled_logprobs_BT).abs().max().item()


def test_sampler_and_training_forward_agree(model_folder):
    assert log_probs(model_folder, "cuda", Dtype.float32)[1] < 1e-3
    assert log_probs(model_folder, "cuda", Dtype.bfloat16)[1] < 0.3


def test_the_same_uniforms_give_mostly_the_same_tokens_on_both_devices(model_folder):
    on_gpu, on_cpu = (log_probs(model_folder, device, Dtype.float32)[0] for device in ("cuda", "cpu"))
    firsts = [[c.token_ids[0] for group in groups for c in group.completions] for groups in (on_gpu, on_cpu)]
    assert firsts[0] == firsts[1]


@pytest.mark.parametrize("changes", [{}, {"lora": None}, {"gradient_checkpointing": True}])
def test_bfloat16_training_keeps_its_weights_and_gradients_in_float32(model_folder, changes):
    section = model_section(model_folder, **{"lora": Lora(4, 8, "default", None), "dtype": Dtype.auto} | changes)
    policy = load_policy(section, torch.device("cuda"), seed=1, distribution=Distribution(1.0))
    groups = sample(policy, encoded(policy, "1+1="), 4, rollout_section(), uniforms(1, "rollout", 1, 1, 4, 12))
    batch = to_device(collate(groups, policy.pad_id, Truncated.keep), policy.device)
    policy.token_logprobs(batch).logprobs_BT.sum().backward()
    assert all(p.dtype is torch.float32 and torch.isfinite(p.grad).all() for p in policy.trainable.values())


def test_a_small_run_trains_and_resumes(tmp_path):
    train(tmp_path, "device=cuda", "steps=4")
    train(tmp_path, "device=cuda", "steps=9", "resume=auto")
    assert [row["step"] for row in rows(tmp_path, "metrics")] == list(range(1, 10))
