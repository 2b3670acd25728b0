"""The shipped model; TINY=FOLDER measures the start of another one, such as what `make assets` made."""

import hashlib
import json
import os
import re

import pytest
import torch
from models import model_section, rollout_section

from grpo_cli.assets import make
from grpo_cli.data import addition_pairs, addition_question, is_heldout
from grpo_cli.policy import Distribution, load_policy
from grpo_cli.randomness import uniforms
from grpo_cli.records import Ended, Problem
from grpo_cli.rollout import sample

SHA256 = "fdf645a78aa6db75ff92716572713c7510c477bfe4bbaddba7bc793d1ca23fc0"
WHOLE = re.compile(r"<think>[^<>]*</think><answer>(\d+)</answer>")


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(make.SHIPPED)


def test_the_shipped_model_is_the_frozen_one():
    assert hashlib.sha256((make.SHIPPED / "model.safetensors").read_bytes()).hexdigest() == SHA256


def test_the_shipped_folder_is_small():
    assert (make.SHIPPED / "model.safetensors").stat().st_size <= 1_000_000
    assert sum(file.stat().st_size for file in make.SHIPPED.iterdir()) <= 2_000_000


def test_the_model_loads_in_the_ordinary_way_and_has_its_size():
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(make.SHIPPED, dtype=torch.float32)
    # 61 embeddings of 96, tied; 4 layers of 4 x 96 x 96 attention, 3 x 96 x 256 feed-forward and 2 x 96 norms; a last norm of 96.
    assert sum(p.numel() for p in model.parameters()) == 61 * 96 + 4 * (4 * 96 * 96 + 3 * 96 * 256 + 2 * 96) + 96 == 449_088
    assert json.loads((make.SHIPPED / "generation_config.json").read_text()).keys() - {"transformers_version"} == {
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    }


def test_the_shipped_folder_is_what_make_py_makes(tokenizer):
    from transformers import AutoConfig

    made = make.tokenizer()
    assert made.get_vocab() == tokenizer.get_vocab() and made.special_tokens_map == tokenizer.special_tokens_map
    shape = {"dtype": None, "_name_or_path": "", "architectures": None, "transformers_version": None}
    assert make.untrained(made).config.to_dict() | shape == AutoConfig.from_pretrained(make.SHIPPED).to_dict() | shape


def test_packing_tells_whether_the_result_is_the_shipped_model(tmp_path):
    made = make.tokenizer()
    make.untrained(made).save_pretrained(tmp_path / "untrained")
    assert f"sha256 {SHA256}, bit for bit" in make.pack(str(make.SHIPPED), str(tmp_path / "same"))
    assert "not bit for bit" in make.pack(str(tmp_path / "untrained"), str(tmp_path / "other"))


def test_a_prompt_begins_with_bos_and_a_tag_is_one_token(tokenizer):
    assert tokenizer.convert_ids_to_tokens(tokenizer("67+15=")["input_ids"]) == ["<bos>", *"67+15="]
    ids = tokenizer("<think>?</think><answer>82</answer>", add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["<think>", "?", "</think>", "<answer>", "8", "2", "</answer>"]


@pytest.mark.parametrize(
    "text", ["<think>7+5=12 6+1+1=8</think><answer>82</answer>", "6,1,5>2:<think>8+5-1=12n;6+1-5=2y", "a . b , c\n( x ) < 1 /think> %*"]
)
def test_text_survives_encoding_and_decoding_with_its_tags(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == "<bos>" + text
    assert tokenizer.decode([*ids, tokenizer.eos_token_id, tokenizer.pad_token_id], skip_special_tokens=True) == text


def test_an_unknown_character_is_one_unknown_token(tokenizer):
    assert tokenizer.convert_ids_to_tokens(tokenizer("1Ä=")["input_ids"]) == ["<bos>", "1", "<unk>", "="]


def test_the_start_leaves_room_to_learn_and_the_working_is_sound():
    policy = load_policy(model_section(os.environ.get("TINY", "asset:tiny"), lora=None), torch.device("cpu"), 0, Distribution(1.0))
    pairs = [pair for pair, _ in zip(addition_pairs([2, 3]), range(3000), strict=False) if is_heldout(addition_question(*pair), 0.1)][:250]
    problems = [Problem(f"{a}+{b}", addition_question(a, b), str(a + b)) for a, b in pairs]
    groups = sample(policy, policy.encode(problems, 64, 64)[0], 4, rollout_section(max_new_tokens=64), uniforms(0, "test", 0, 250, 4, 64))
    completions = [(completion, group.encoded.problem.answer) for group in groups for completion in group.completions]
    whole = [WHOLE.fullmatch(c.text) if c.ended is Ended.eos else None for c, _ in completions]
    right = [bool(found) and found.group(1) == answer for found, (_, answer) in zip(whole, completions, strict=True)]
    worked = [correct for correct, found in zip(right, whole, strict=True) if found and "?" not in found.group()]
    accuracy, form, working = sum(right) / len(right), sum(map(bool, whole)) / len(whole), sum(worked) / len(worked)
    tokens = sum(len(c.token_ids) for c, _ in completions) / len(completions)
    figures = f"{len(right)} samples: accuracy {accuracy:.3f}, format {form:.3f}, {tokens:.1f} tokens, working right {working:.3f}"
    print(figures)
    assert len(right) == 1000 and 0.2 <= accuracy <= 0.4, figures
    assert working >= 0.8, figures
