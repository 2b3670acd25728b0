"""A random two-layer Llama with one token per character, and the sections that describe it."""

from pathlib import Path
from types import SimpleNamespace

import torch

from grpo_cli.config import (
    Advantage,
    Aggregation,
    Algorithm,
    Anchor,
    Clip,
    Combine,
    Dtype,
    Engine,
    Estimator,
    Kl,
    KlGradient,
    KlSchedule,
    Lora,
    Model,
    Placement,
    Ratio,
    Rollout,
    Std,
    Truncated,
)
from grpo_cli.records import EncodedProblem, Problem

CHARACTERS = "0123456789+-=? abcdefghijklmnopqrstuvwxyz<>/"


def character_tokenizer():
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", *CHARACTERS])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def random_llama(folder: Path, vocabulary: int | None = None, **changes) -> Path:
    """A random model with its tokenizer in `folder`; `vocabulary` may be wider than the tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = character_tokenizer()
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    config = LlamaConfig(
        vocab_size=vocabulary or len(tokenizer),
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,
        **sizes | changes,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def random_model(folder: Path, kind: str, **changes) -> Path:
    """A random two-layer model of another architecture, such as Qwen3, with its tokenizer in `folder`."""
    import transformers

    tokenizer = character_tokenizer()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"max_position_embeddings": 128}
    if kind == "GPT2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
    elif kind.startswith(("Gemma", "Mistral")):
        sizes["sliding_window"] = 6
    if kind == "Granite":
        sizes["logits_scaling"] = 8.0
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(tokenizer) + 8, pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.2, **sizes | changes
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def model_section(path, lora: Lora | None = Lora(4, 8, "default", None), **changes) -> Model:  # noqa: B008
    values = {"gguf_file": None, "dtype": Dtype.float32, "micro_batch_tokens": 4096, "gradient_checkpointing": False} | changes
    return Model(path=str(path), lora=lora, **values)


def rollout_section(temperature: float = 1.0, max_new_tokens: int = 12, rows_at_once: int = 64) -> Rollout:
    return Rollout(Engine.native, temperature, 0, 1.0, max_new_tokens, rows_at_once)


def algorithm_section(**changes) -> Algorithm:
    """GRPO, on-policy, but for the changes."""
    values = {
        "advantage": Advantage.group_std,
        "std": Std.sample,
        "combine": Combine.weigh_first,
        "ratio": Ratio.token,
        "clip": Clip.ppo,
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": None,
        "aggregation": Aggregation.sequence_mean,
        "updates_per_rollout": 1,
        "truncated": Truncated.keep,
        "entropy_bonus": 0.0,
        "resample_tries": 0,
    }
    return Algorithm(**values | changes)


def kl_section(**changes) -> Kl:
    """A constant beta on k3 in the loss, but for the changes."""
    values = {
        "schedule": KlSchedule.constant,
        "beta": 0.04,
        "warmup_steps": 0,
        "end_beta": None,
        "target": None,
        "gain": 0.1,
        "min_beta": 1e-4,
        "max_beta": 10.0,
        "estimator": Estimator.k3,
        "anchor": Anchor.reference,
        "placement": Placement.loss,
        "gradient": KlGradient.plain,
        "measure_every": 5,
        "sync_every": None,
        "sync_alpha": 1.0,
    }
    return Kl(**values | changes)


def encoded(policy, *questions: str) -> list[EncodedProblem]:
    problems = [Problem(f"p{i}", question, "0") for i, question in enumerate(questions)]
    return policy.encode(problems, 64, 12)[0]


def shake(policy, scale: float = 0.3) -> None:
    """Move the trained weights, so that policy and reference differ."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        for parameter in policy.trainable.values():
            parameter.add_(scale * torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)


class Mover:
    """In place of an optimizer: every step but the last moves the weights by a fixed amount, so that gradients are taken off-policy."""

    def __init__(self, policy, updates: int, scale: float):
        self.policy, self.steps, self.scale = policy, updates, scale

    def zero_grad(self, set_to_none: bool) -> None:
        for parameter in self.policy.trainable.values():
            parameter.grad = None

    def step(self) -> None:
        self.steps -= 1
        if self.steps > 0:
            shake(self.policy, self.scale)


NO_SCHEDULE = SimpleNamespace(step=lambda: None)
