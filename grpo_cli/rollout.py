"""Policy and prompts to groups of completions. One prefill per prompt, its cache shared by the G samples; keyed uniforms.

Knows nothing of rewards. The order of rows, their batching and what finished earlier never change which uniform a token gets.
"""

from bisect import bisect_left
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from grpo_cli.batch import collate, pad, to_device
from grpo_cli.config import Rollout, Truncated
from grpo_cli.fast.decode import DEVICE_CHECK_EVERY, Choose, decode
from grpo_cli.policy import Policy, scored_tokens
from grpo_cli.randomness import uniforms
from grpo_cli.records import END, Completion, EncodedProblem, Ended, Group

CHECKED_SAMPLES, CHECKED_TOKENS = 4, 32
"""Size of the comparison of `check_native`."""
MOST_GAP = 1e-3
"""Nats; float32 leaves about 1e-6 on small models and 1e-4 on large ones."""
MOST_MEAN_GAP_BFLOAT16 = 0.1


def sample(
    policy: Policy, prompts: list[EncodedProblem], samples_per_prompt: int, rollout: Rollout, uniforms_PGT: np.ndarray | None
) -> list[Group]:
    """One group of `samples_per_prompt` completions per prompt; without uniforms of the most likely tokens.

    ValueError when the policy gives no finite probabilities any more.
    """
    ids, G, T = [p.prompt_ids for p in prompts], samples_per_prompt, rollout.max_new_tokens
    uniforms_NT = None
    if uniforms_PGT is not None:
        uniforms_NT = torch.from_numpy(uniforms_PGT.reshape(len(prompts) * G, -1)).to(policy.device)

    def choose(logits_CV: Tensor, row_C: Tensor, t_C: Tensor) -> tuple[Tensor, Tensor]:
        logprobs_CV = policy.next_token_logprobs(logits_CV)
        token_C = logprobs_CV.argmax(dim=1) if uniforms_NT is None else _inverse_cdf(logprobs_CV, uniforms_NT[row_C, t_C])
        return token_C, logprobs_CV.gather(1, token_C[:, None])[:, 0]

    with policy.sampling():
        if policy.native:
            tokens_NT, logprobs_NT = decode(
                policy.native, ids, G, T, rollout.rows_at_once, torch.tensor(policy.eos_ids, device=policy.device), choose
            )
        else:
            at_once = max(1, rollout.rows_at_once // G)
            starts = range(0, len(ids), at_once)
            parts = [_decode(policy, ids[start : start + at_once], G, T, choose, start * G) for start in starts]
            tokens_NT, logprobs_NT = (torch.cat(part) for part in zip(*parts, strict=True))
    if not torch.isfinite(logprobs_NT).all():
        raise ValueError("the policy no longer gives finite probabilities: try a lower optimizer.lr, or optimizer.grad_clip=1")
    return _to_groups(policy, prompts, G, tokens_NT, logprobs_NT)


def check_native(policy: Policy, prompt: EncodedProblem, G: int, rollout: Rollout, seed: int) -> dict:
    """{"engine", "gap" or "why"}: which forward the policy uses from here on, having compared the fast path with the plain one.

    A few real completions are sampled and scored by the fast path and scored by the plain forward; "gap" is the largest difference of a
    token's log-probs (in bfloat16 the mean one, nats). When it is too large the policy goes on without the fast path.
    """
    if policy.native is None:
        return {"engine": "transformers", "why": policy.why_plain or "rollout.engine=transformers"}
    G, rollout = min(G, CHECKED_SAMPLES), replace(rollout, max_new_tokens=min(rollout.max_new_tokens, CHECKED_TOKENS))
    with torch.no_grad(), policy.stirred(0.02):
        groups = sample(policy, [prompt], G, rollout, uniforms(seed, "check", 0, 1, G, rollout.max_new_tokens))
        batch = to_device(collate(groups, policy.pad_id, Truncated.keep), policy.device)
        fast_BT = policy.token_logprobs(batch).logprobs_BT
        with policy.plain():
            plain_BT = policy.token_logprobs(batch).logprobs_BT
    gaps = torch.stack([fast_BT - plain_BT, batch.sampled_logprobs_BT - plain_BT]).abs()[:, scored_tokens(batch)]
    exact = policy.lm.get_output_embeddings().weight.dtype is not torch.bfloat16 and not policy.autocast
    gap, most = (gaps.max().item(), MOST_GAP) if exact else (gaps.mean().item(), MOST_MEAN_GAP_BFLOAT16)
    if gap <= most:
        return {"engine": "native", "gap": gap}
    policy.native, policy.why_plain = None, f"the fast path is {gap:.3g} nats off transformers' own log-probs, more than {most:g}"
    return {"engine": "transformers", "why": policy.why_plain}


def _decode(policy: Policy, prompts: list[list[int]], G: int, T: int, choose: Choose, first_row: int) -> tuple[Tensor, Tensor]:
    """The plain transformers forward: (N, T) token ids and log-probs of N = prompts x G rows, numbered from `first_row`; what stands behind
    a row's end token is meaningless."""
    device = policy.device
    N, S = len(prompts) * G, max(map(len, prompts))
    prompt_ids = pad(prompts, policy.pad_id, left=True).to(device)
    attention = pad([[1] * len(p) for p in prompts], 0, left=True).to(device)
    position = torch.tensor([len(p) for p in prompts], device=device).repeat_interleave(G)
    ends = torch.tensor(policy.eos_ids, device=device)
    tokens_NT = torch.full((N, T), policy.pad_id, device=device)
    logprobs_NT = torch.zeros(N, T, device=device)

    cache = DynamicCache(config=policy.lm.config)
    start = {"position_ids": (attention.cumsum(1) - 1).clamp(min=0)} if policy.takes_positions else {}
    logits = policy.lm(
        input_ids=prompt_ids, attention_mask=attention, past_key_values=cache, use_cache=True, logits_to_keep=1, **start
    ).logits
    logits = logits[:, -1].repeat_interleave(G, dim=0)
    cache.batch_repeat_interleave(G)
    mask = torch.cat([attention.repeat_interleave(G, dim=0), torch.ones(N, T, device=device, dtype=torch.long)], dim=1)

    rows = torch.arange(N, device=device)  # the rows still in the batch
    finished = torch.zeros(N, dtype=torch.bool, device=device)
    for t in range(T):
        token, logprobs_NT[rows, t] = choose(logits, rows + first_row, torch.full_like(rows, t))
        tokens_NT[rows, t] = token
        finished |= torch.isin(token, ends)
        if t + 1 == T:
            break
        if device.type == "cpu" or (t + 1) % DEVICE_CHECK_EVERY == 0:
            running = int((~finished).sum())
            if running == 0:
                break
            if running <= len(rows) // 2:
                kept = (~finished).nonzero()[:, 0]
                rows, token, position, mask, finished = rows[kept], token[kept], position[kept], mask[kept], finished[kept]
                cache.batch_select_indices(kept)
        step = {"position_ids": position[:, None]} if policy.takes_positions else {}
        step["attention_mask"] = mask[:, : S + t + 1]
        logits = policy.lm(input_ids=token[:, None], past_key_values=cache, use_cache=True, **step).logits[:, -1]
        position = position + 1
    return tokens_NT, logprobs_NT


def _inverse_cdf(logprobs_NV: Tensor, uniforms_N: Tensor) -> Tensor:
    """The token at which the cumulative probability passes the uniform: one draw per row, and never a token of probability 0."""
    cumulative_NV = logprobs_NV.exp().cumsum(dim=1)
    total_N = cumulative_NV[:, -1]
    # Rounding may leave the total off 1; staying below it keeps the search inside the row.
    below_N = torch.minimum(uniforms_N * total_N, torch.nextafter(total_N, torch.zeros_like(total_N)))
    token_N = torch.searchsorted(cumulative_NV, below_N[:, None], right=True)[:, 0]
    return token_N.clamp(max=logprobs_NV.shape[1] - 1)  # beyond the end only when a probability is NaN, which the caller refuses


def _to_groups(policy: Policy, prompts: list[EncodedProblem], G: int, tokens_NT: Tensor, logprobs_NT: Tensor) -> list[Group]:
    ends = set(policy.eos_ids)
    completions = []
    for ids, logprobs in zip(tokens_NT.tolist(), logprobs_NT.tolist(), strict=True):
        length = next((t + 1 for t, token in enumerate(ids) if token in ends), None)
        text_ids = ids if length is None else ids[: length - 1]
        text = policy.tokenizer.decode(text_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        completions.append(Completion(ids[:length], text, logprobs[:length], Ended.length if length is None else Ended.eos))
    return [Group(prompt, completions[p * G : (p + 1) * G]) for p, prompt in enumerate(prompts)]


def token_of(policy: Policy, token_ids: list[int], end: int) -> int:
    """Number of the token with which the first `end` characters of the completion's text are complete; END is the last token."""
    if end == END:
        return len(token_ids) - 1
    decode = partial(policy.tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return bisect_left(range(len(token_ids)), end, key=lambda last: len(decode(token_ids[: last + 1])))
