"""The least time one step could take: FLOPs over the machine's rate, the bytes of decoding over its memory bandwidth."""

import json
from pathlib import Path

RANK = 16


def cache_bytes() -> int:
    """Size of the last-level cache, 0 when the system does not tell."""
    file = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    return int(file.read_text().strip().removesuffix("K")) * 1024 if file.exists() else 0


def floors(model: Path, P: int, G: int, S: int, T: int, updates: int, machine: dict) -> dict[str, float]:
    """Seconds per optimizer step of the least work known, and the rollout's part of them: P prompts of S tokens, G completions of T each.

    A prompt is read once per group and its prefill serves the first update too. The base is frozen, so a backward pass costs the gradients
    of activations alone; the head makes two products in training. Decoding takes its FLOPs or its bytes, whichever is longer (no bytes when
    all of it fits the cache).
    """
    c = json.loads((model / "config.json").read_text())
    h, i, layers = c["hidden_size"], c["intermediate_size"], c["num_hidden_layers"]
    width = c.get("head_dim") or h // c["num_attention_heads"]
    q, kv = c["num_attention_heads"] * width, c["num_key_value_heads"] * width
    shapes = [(h, q), (h, kv), (h, kv), (q, h), (h, i), (h, i), (i, h)]
    linear, lora = (layers * sum(size(a, b) for a, b in shapes) for size in (lambda a, b: a * b, lambda a, b: RANK * (a + b)))
    head, attention = c["vocab_size"] * h, layers * q  # weights; 4 x attention FLOPs per pair of query and key

    fed = T - 1  # the last completion token is never an input
    prompt_pairs, completion_pairs = S * (S + 1) / 2, fed * S + fed * (fed + 1) / 2

    def forward(weights: int) -> tuple[float, float]:
        """FLOPs of all prompts and of all completions, without the head."""
        return P * (2 * weights * S + 4 * attention * prompt_pairs), P * G * (2 * weights * fed + 4 * attention * completion_pairs)

    prompts, completions = forward(linear + lora)
    first_token, heads = 2 * head * P, 2 * head * P * G * fed
    reference = sum(forward(linear)) + first_token + heads
    backward = P * ((2 * linear + 4 * lora) * (S + G * fed) + 10 * attention * (prompt_pairs + G * completion_pairs))
    train = updates * (completions + backward + 2 * (first_token + heads)) + (updates - 1) * prompts
    cuda = machine["device"] == "cuda"
    element = 2 if cuda else 4
    step_bytes = element * (linear + lora + head + 2 * layers * kv * P * (S + G * T / 2))
    cached = not cuda and step_bytes < cache_bytes()
    rate, bandwidth = machine["gflops"] * 1e9, machine["gbs"] * 1e9
    decode = max((completions + heads) / rate, 0 if cached else fed * step_bytes / bandwidth)
    rollout = (prompts + first_token) / rate + decode
    return {"floor_s": (rollout + (reference + train) / rate) / updates, "rollout_floor_s": rollout / updates}
