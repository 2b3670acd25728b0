"""The shipped models; TINY=FOLDER or TINY_COUNTDOWN=FOLDER measures the start of another one, such as what `make assets` made."""

import hashlib
import json
import os
import re
from functools import partial

import pytest
import torch
from models import model_section, rollout_section

from grpo_cli.assets import make
from grpo_cli.cli import TRAIN
from grpo_cli.compose import Composer, convert
from grpo_cli.data import addition_pairs, addition_question, is_heldout, load_problems
from grpo_cli.policy import Distribution, load_policy
from grpo_cli.randomness import uniforms
from grpo_cli.records import Completion, Ended, Problem, Sample
from grpo_cli.rewards.countdown import countdown
from grpo_cli.rewards.rules import r1_format
from grpo_cli.rollout import sample

SHA256 = {
    "tiny": "fdf645a78aa6db75ff92716572713c7510c477bfe4bbaddba7bc793d1ca23fc0",
    "tiny_countdown": "b16822a6992f51d5754199f0b4f7e2d7f1d5fdc463bf19e75131aab830ab5378",
}
each = pytest.mark.parametrize("name", SHA256)
WHOLE = re.compile(r"<think>[^<>]*</think><answer>(\d+)</answer>")


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(make.SHIPPED / "tiny")


@each
def test_the_shipped_model_is_the_frozen_one(name):
    assert hashlib.sha256((make.SHIPPED / name / "model.safetensors").read_bytes()).hexdigest() == SHA256[name]


@each
def test_the_shipped_folder_is_small(name):
    assert (make.SHIPPED / name / "model.safetensors").stat().st_size <= 1_000_000
    assert sum(file.stat().st_size for file in (make.SHIPPED / name).iterdir()) <= 2_000_000


@each
def test_the_model_loads_in_the_ordinary_way_and_has_its_size(name):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(make.SHIPPED / name, dtype=torch.float32)
    # 61 embeddings of 96, tied; 4 layers of 4 x 96 x 96 attention, 3 x 96 x 256 feed-forward and 2 x 96 norms; a last norm of 96.
    assert sum(p.numel() for p in model.parameters()) == 61 * 96 + 4 * (4 * 96 * 96 + 3 * 96 * 256 + 2 * 96) + 96 == 449_088
    assert json.loads((make.SHIPPED / name / "generation_config.json").read_text()).keys() - {"transformers_version"} == {
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    }


@each
def test_the_shipped_folder_is_what_make_py_makes(name):
    from transformers import AutoConfig, AutoTokenizer

    made, tokenizer = make.tokenizer(), AutoTokenizer.from_pretrained(make.SHIPPED / name)
    assert made.get_vocab() == tokenizer.get_vocab() and made.special_tokens_map == tokenizer.special_tokens_map
    shape = {"dtype": None, "_name_or_path": "", "architectures": None, "transformers_version": None}
    assert make.untrained(made).config.to_dict() | shape == AutoConfig.from_pretrained(make.SHIPPED / name).to_dict() | shape


@each
def test_packing_tells_whether_the_result_is_the_shipped_model(name, tmp_path):
    made = make.tokenizer()
    make.untrained(made).save_pretrained(tmp_path / "untrained")
    assert f"sha256 {SHA256[name]}, bit for bit" in make.pack(str(make.SHIPPED / name), str(tmp_path / name))
    assert f"{name.upper()}={tmp_path / name}" in (other := make.pack(str(tmp_path / "untrained"), str(tmp_path / name)))
    assert "not bit for bit" in other and "not bit for bit" in make.pack(str(make.SHIPPED / name), str(tmp_path / "another"))


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


def drawn(name: str, problems: list[Problem], draws: int) -> list[tuple[Completion, Problem]]:
    """Completions of the shipped model, or of the one that a variable of its name in capitals names."""
    policy = load_policy(model_section(os.environ.get(name.upper(), f"asset:{name}"), lora=None), torch.device("cpu"), 0, Distribution(1.0))
    table = uniforms(0, "test", 0, len(problems), draws, 64)
    groups = sample(policy, policy.encode(problems, 64, 64)[0], draws, rollout_section(max_new_tokens=64), table)
    return [(completion, group.encoded.problem) for group in groups for completion in group.completions]


def test_the_start_leaves_room_to_learn_and_the_working_is_sound():
    pairs = [pair for pair, _ in zip(addition_pairs([2, 3]), range(3000), strict=False) if is_heldout(addition_question(*pair), 0.1)][:250]
    problems = [Problem(f"{a}+{b}", addition_question(a, b), str(a + b)) for a, b in pairs]
    completions = [(completion, problem.answer) for completion, problem in drawn("tiny", problems, 4)]
    whole = [WHOLE.fullmatch(c.text) if c.ended is Ended.eos else None for c, _ in completions]
    right = [bool(found) and found.group(1) == answer for found, (_, answer) in zip(whole, completions, strict=True)]
    worked = [correct for correct, found in zip(right, whole, strict=True) if found and "?" not in found.group()]
    accuracy, form, working = sum(right) / len(right), sum(map(bool, whole)) / len(whole), sum(worked) / len(worked)
    tokens = sum(len(c.token_ids) for c, _ in completions) / len(completions)
    figures = f"{len(right)} samples: accuracy {accuracy:.3f}, format {form:.3f}, {tokens:.1f} tokens, working right {working:.3f}"
    print(figures)
    assert len(right) == 1000 and 0.2 <= accuracy <= 0.4, figures
    assert working >= 0.8, figures


def test_the_start_of_the_second_model_is_blind_trials_with_mostly_sound_marks():
    with Composer(TRAIN, None, None) as composer:
        section = convert(composer.compose(["data=sign_countdown", "reward=sign_countdown"]), []).data
    completions = drawn("tiny_countdown", load_problems(section)[1][:128], 4)
    samples = [Sample(problem, problem.prompt, c.text, len(c.token_ids), c.ended) for c, problem in completions]
    accuracy, form = (sum(map(rule, samples)) / len(samples) for rule in (partial(countdown, operators="+-"), r1_format))
    trials = [(trial, s.problem) for s in samples for trial in re.findall(r"(\d+[+-]\d+[+-]\d+)=(\d+)([yn])", s.text)]
    values = sum(sum(map(int, re.findall(r"[+-]?\d+", text))) == int(value) for (text, value, _), _ in trials) / len(trials)
    marks = sum((value == problem.answer) == (mark == "y") for (_, value, mark), problem in trials) / len(trials)
    tokens = sum(sample.tokens for sample in samples) / len(samples)
    figures = (
        f"{len(samples)} samples: accuracy {accuracy:.3f}, format {form:.3f}, {tokens:.1f} tokens, values {values:.3f}, marks {marks:.3f}"
    )
    print(figures)
    assert len(samples) == 512 and 0.25 <= accuracy <= 0.4 and form >= 0.85, figures
    assert values >= 0.5 and marks >= 0.75, figures
