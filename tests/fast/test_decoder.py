"""The fast path against the plain transformers forward, which is its oracle."""

from dataclasses import replace

import pytest
import torch
from models import encoded, model_section, random_llama, random_model, rollout_section, shake

from grpo_cli.batch import collate, shared_micro_batches, take
from grpo_cli.config import Dtype, Lora, Truncated
from grpo_cli.fast.ops import Heads, masked_attention, shared_attention
from grpo_cli.fast.packing import pack
from grpo_cli.policy import Distribution, load_policy
from grpo_cli.randomness import uniforms
from grpo_cli.records import Completion, Ended, Group
from grpo_cli.rollout import check_native, sample

CPU = torch.device("cpu")
LORA = Lora(4, 8, "default", None)
KINDS = {
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Llama, rope scaled": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
    "Llama, tied": {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"sliding_window": None},
    "Gemma2": {},
    "GPT2": {},
}
PLAIN = ("Gemma2", "GPT2")


def policy_of(folder, kind="Llama", lora=LORA, **changes):
    random_model(folder, kind.split(",")[0], **KINDS[kind])
    policy = load_policy(model_section(folder, lora=lora, **changes), CPU, 1, Distribution(1.0))
    policy.eos_ids = [2, 10, 30]  # often enough that completions are of many lengths
    shake(policy)
    return policy


def rolled_out(policy, G=3, **rollout):
    prompts = encoded(policy, "1+1=", "a longer prompt 22+22=", "7=", "12+3=")
    groups = sample(policy, prompts, G, rollout_section(**rollout), uniforms(1, "rollout", 1, len(prompts), G, 12))
    return collate(groups, policy.pad_id, Truncated.keep)


def gradients(policy, batch, weights_BT, entropy=False):
    """Of a weighted sum of the log-probs, and of the entropies if asked for."""
    for parameter in policy.trainable.values():
        parameter.grad = None
    scores = policy.token_logprobs(batch, entropy_gradient=entropy)
    total = (scores.logprobs_BT * weights_BT).sum()
    total = total + (scores.entropy_BT * weights_BT.flip(0)).sum() if entropy else total
    total.backward()
    return {name: parameter.grad.clone() for name, parameter in policy.trainable.items()}


def assert_equal_gradients(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= tolerance * gradient.norm(), name
    assert any(gradient.abs().max() > 0.01 for gradient in expected.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("G", [1, 2, 5, 16])
def test_log_probs_and_gradients_are_those_of_the_plain_forward(tmp_path, kind, G):
    policy = policy_of(tmp_path, kind)
    assert (policy.native is None) == (kind in PLAIN)
    batch = rolled_out(policy, G)
    assert batch.completion_lengths_B.min() < batch.completion_lengths_B.max() == 12 or G < 5
    weights_BT = torch.randn(batch.completion_ids_BT.shape, generator=torch.Generator().manual_seed(1))
    fast_BT = policy.token_logprobs(batch).logprobs_BT
    fast_reference_BT = policy.annotate(batch, True).reference_logprobs_BT
    fast = gradients(policy, batch, weights_BT)
    with policy.plain():
        plain_BT = policy.token_logprobs(batch).logprobs_BT
        assert (policy.annotate(batch, True).reference_logprobs_BT - fast_reference_BT).abs().max() < 1e-5
        assert_equal_gradients(fast, gradients(policy, batch, weights_BT), 1e-4)
    assert (fast_BT - plain_BT).abs().max() < 1e-5
    assert (batch.sampled_logprobs_BT - plain_BT).abs().max() < 1e-5


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lora", [LORA, None])
def test_in_float64_nothing_but_the_last_digits_differs(tmp_path, lora, checkpointing):
    policy = policy_of(tmp_path, "Qwen3", lora=lora, gradient_checkpointing=checkpointing)
    policy.model.double()
    batch = rolled_out(policy, 5)
    weights_BT = torch.randn(batch.completion_ids_BT.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    # The head is scored in float32.
    fast = gradients(policy, batch, weights_BT, entropy=True)
    with policy.plain():
        assert_equal_gradients(fast, gradients(policy, batch, weights_BT, entropy=True), 1e-6)


def test_the_exact_kl_has_the_gradient_of_the_plain_forward(tmp_path):
    policy = policy_of(tmp_path)
    batch = policy.annotate(rolled_out(policy), True, exact=True)

    def gradient():
        for parameter in policy.trainable.values():
            parameter.grad = None
        policy.token_logprobs(batch).exact_kl_BT.sum().backward()
        return {name: parameter.grad.clone() for name, parameter in policy.trainable.items()}

    fast = gradient()
    with policy.plain():
        policy.lm.get_output_embeddings().weight.requires_grad_(True)  # the head by automatic differentiation
        assert_equal_gradients(fast, gradient(), 1e-4)


def test_an_adapter_on_some_layers_only_and_its_frozen_copy_as_reference_are_read(tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    random_llama(tmp_path / "model")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    config = LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"], rank_pattern={"v_proj": 2}, use_rslora=True)
    get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    policy = load_policy(
        model_section(tmp_path / "model", lora=Lora(4, 8, "default", str(tmp_path / "adapter"))), CPU, 1, Distribution(1.0)
    )
    shake(policy)
    batch = rolled_out(policy)
    fast = policy.annotate(batch, True, old=True)
    with policy.plain():
        plain = policy.annotate(replace(batch, sampled_logprobs_BT=policy.token_logprobs(batch).logprobs_BT.detach()), True, old=True)
    assert (fast.reference_logprobs_BT - plain.reference_logprobs_BT).abs().max() < 1e-5
    assert (fast.old_logprobs_BT - plain.old_logprobs_BT).abs().max() < 1e-5
    assert (fast.old_logprobs_BT - fast.reference_logprobs_BT).abs().max() > 0.01


def test_bfloat16_differs_by_its_own_rounding_only(tmp_path):
    policy = policy_of(tmp_path, dtype=Dtype.bfloat16)
    batch = rolled_out(policy, 8)
    fast_BT = policy.token_logprobs(batch).logprobs_BT
    with policy.plain():
        plain_BT = policy.token_logprobs(batch).logprobs_BT
    scored_BT = plain_BT != 0
    assert (fast_BT - plain_BT).abs()[scored_BT].mean() < 0.03
    assert (batch.sampled_logprobs_BT - plain_BT).abs()[scored_BT].mean() < 0.03


@pytest.mark.parametrize("lengths", [[3, 3, 3, 3], [1, 4, 2, 1], [1, 1, 1, 1]])
def test_the_attention_of_other_devices_is_that_of_the_cpu(model_folder, lengths):
    policy = load_policy(model_section(model_folder), CPU, 1, Distribution(1.0))
    prompts = encoded(policy, "1+1=", "a longer prompt=")
    completions = [Completion([5] * n, "", [0.0] * n, Ended.length) for n in lengths]
    packed = pack(collate([Group(prompts[0], completions[:3]), Group(prompts[1], completions[3:])], 0, Truncated.keep))
    draw = torch.Generator().manual_seed(0)
    heads = Heads(queries=4, keys=2, scale=0.3)
    inputs = torch.randn(len(packed.ids), 8, 6, dtype=torch.float64, generator=draw, requires_grad=True)
    cos, half = (torch.randn(len(packed.ids), 1, width, dtype=torch.float64, generator=draw) for width in (6, 3))
    sin = torch.cat([-half, half], dim=-1)
    weights = torch.randn(len(packed.ids), 24, dtype=torch.float64, generator=draw)
    found = [attention(inputs, cos, sin, heads, packed.layout) for attention in (shared_attention, masked_attention)]
    slopes = [torch.autograd.grad((out * weights).sum(), inputs)[0] for out in found]
    assert (found[0] - found[1]).abs().max() < 1e-12
    assert (slopes[0] - slopes[1]).abs().max() < 1e-12


def test_a_group_is_cut_only_when_it_does_not_fit(model_folder):
    policy = load_policy(model_section(model_folder), CPU, 1, Distribution(1.0))
    prompts = encoded(policy, "1+1=", "2+2=", "a longer prompt=")
    groups = [Group(p, [Completion([5] * n, "", [0.0] * n, Ended.length) for n in (4, 6)]) for p in prompts]
    batch = collate(groups, 0, Truncated.keep)
    prompt, longer = len(prompts[0].prompt_ids), len(prompts[2].prompt_ids)
    rows = [part.tolist() for part in shared_micro_batches(batch, 2 * (prompt + 10))]
    assert rows == [[0, 1, 2, 3], [4, 5]]
    assert [part.tolist() for part in shared_micro_batches(batch, longer + 6)] == [[0, 1], [2, 3], [4], [5]]
    assert [part.tolist() for part in shared_micro_batches(batch, 1)] == [[0], [1], [2], [3], [4], [5]]
    cut = take(batch, torch.tensor([2, 3]))
    assert cut.group_B.tolist() == [1, 1]


def test_the_base_weights_are_the_same_to_the_last_bit_behind_rollouts_and_updates(tmp_path):
    policy = policy_of(tmp_path)
    with policy.plain():
        before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    batch = rolled_out(policy)
    gradients(policy, batch, torch.ones(batch.completion_ids_BT.shape))
    policy.annotate(batch, True)
    for name, parameter in policy.model.named_parameters():
        assert torch.equal(parameter, before[name]), name


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_a_start_compares_both_forwards_and_says_which_one_is_used(tmp_path, kind):
    policy = load_policy(model_section(random_model(tmp_path, kind)), CPU, 1, Distribution(1.0))
    checked = check_native(policy, encoded(policy, "1+1=")[0], 8, rollout_section(), 1)
    if kind == "Llama":
        assert checked["engine"] == "native" and 0 < checked["gap"] < 1e-5
    else:
        assert checked == {"engine": "transformers", "why": "gpt2 is none of llama, mistral, qwen2, qwen3"}
    assert not any(p.any() for name, p in policy.trainable.items() if "lora_B" in name)


def test_one_token_alone_can_be_drawn_and_compared(model_folder):
    policy = load_policy(model_section(model_folder), CPU, 1, Distribution(1.0, top_k=1))
    assert check_native(policy, encoded(policy, "1+1=")[0], 8, rollout_section(), 1) == {"engine": "native", "gap": 0.0}


def test_a_fast_path_that_is_off_is_not_used(model_folder):
    policy = load_policy(model_section(model_folder), CPU, 1, Distribution(1.0))
    policy.native.heads = policy.native.heads._replace(scale=0.9 * policy.native.heads.scale)
    prompt = encoded(policy, "12+34=")[0]
    checked = check_native(policy, prompt, 8, rollout_section(), 1)
    assert checked["engine"] == "transformers" and "nats off" in checked["why"]
    assert policy.native is None
    sample(policy, [prompt], 2, rollout_section(), None)


@pytest.mark.parametrize(
    ("kind", "changes", "why"),
    [
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}, "full attention"),
        ("Mistral", {"sliding_window": 6}, "sliding window"),
        ("Llama", {"hidden_act": "gelu"}, "activation"),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}}, "rotary"),
    ],
)
def test_what_the_decoder_does_not_know_runs_on_the_plain_forward(tmp_path, kind, changes, why):
    policy = load_policy(model_section(random_model(tmp_path, kind, **changes)), CPU, 1, Distribution(1.0))
    assert policy.native is None and why in policy.why_plain
    batch = rolled_out(policy)
    assert (policy.token_logprobs(batch).logprobs_BT - batch.sampled_logprobs_BT).abs().max() < 1e-4
