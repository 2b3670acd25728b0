"""Makes the embedded model's folder before and after its warm start; `grpo-sft` trains in between (see `make assets`).

    python -m grpo_cli.assets.make untrained FOLDER     tokenizer and random weights
    python -m grpo_cli.assets.make pack TRAINED FOLDER   the trained model in bfloat16, as it is shipped

It never writes to the shipped folder by itself: measurements rest on that one staying as it is.
"""

import hashlib
import string
import sys
from pathlib import Path

SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
CHARACTERS = [*string.digits, *"+-=? */(),.:;><%\n", *string.ascii_lowercase]
SHIPPED = Path(__file__).parent / "tiny"


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
    """Save a trained model in bfloat16; the report compares its checksum with the shipped one's."""
    import torch
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(trained, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    made, shipped = (hashlib.sha256((Path(f) / "model.safetensors").read_bytes()).hexdigest() for f in (folder, SHIPPED))
    verdict = "bit for bit the shipped model" if made == shipped else "not bit for bit the shipped model (other CPUs round differently)"
    return f"{folder}: sha256 {made}, {verdict}\nhow it starts: TINY={folder} python -m pytest -rP tests/test_assets.py -k start"


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
