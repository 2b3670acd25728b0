"""Makes the folder of an embedded model before and after its warm start; `grpo-sft` trains in between (see `make assets`).

    python -m grpo_cli.assets.make untrained FOLDER     tokenizer and random weights
    python -m grpo_cli.assets.make pack TRAINED FOLDER   the trained model in bfloat16, as it is shipped under the name of FOLDER

It never writes to a shipped folder by itself: measurements rest on those staying as they are.
"""

import hashlib
import string
import sys
from pathlib import Path

SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
CHARACTERS = [*string.digits, *"+-=? */(),.:;><%\n", *string.ascii_lowercase]
SHIPPED = Path(__file__).parent


def tokenizer():
    """One token per character and per tag. Decoding keeps the tags: reward rules read them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(SPECIAL + TAGS + CHARACTERS)}
    fast = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    fast.decoder = decoders.Fuse()
    fast.add_special_tokens(SPECIAL)
    fast.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    fast.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=fast,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )


def untrained(tokenizer, seed: int = 0):
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=True,
        initializer_range=0.05,
        **ids,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**ids)
    return model


def pack(trained: str, folder: str) -> str:
    """Save a trained model in bfloat16; the report compares its checksum with that of the shipped one of this name."""
    import torch
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(trained, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    name, made = Path(folder).name, (Path(folder) / "model.safetensors").read_bytes()
    shipped = SHIPPED / name / "model.safetensors"
    same = shipped.is_file() and shipped.read_bytes() == made
    verdict = "bit for bit the shipped model" if same else "not bit for bit the shipped model (other CPUs round differently)"
    how = f"how it starts: {name.upper()}={folder} python -m pytest -rP tests/test_assets.py -k start"
    return f"{folder}: sha256 {hashlib.sha256(made).hexdigest()}, {verdict}\n{how}"


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["untrained", folder]:
            made = tokenizer()
            untrained(made).save_pretrained(folder)
            made.save_pretrained(folder)
        case ["pack", trained, folder]:
            print(pack(trained, folder))
        case _:
            sys.exit(__doc__)
