"""Policy and prompts to groups of completions. One prefill per prompt, its cache shared by the G samples; keyed uniforms.

Knows nothing of rewards. The order of rows, their batching and what finished earlier never change which uniform a token gets.
"""

from bisect import bisect_left
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from grpo_cli.batch import pad
from grpo_cli.config import Rollout
from grpo_cli.policy import Policy
from grpo_cli.records import END, Completion, EncodedProblem, Ended, Group

DEVICE_CHECK_EVERY = 8
"""Tokens between two looks at which rows have finished, on devices where looking makes the host wait."""


def sample(
    policy: Policy, prompts: list[EncodedProblem], samples_per_prompt: int, rollout: Rollout, uniforms_PGT: np.ndarray | None
) -> list[Group]:
    """One group of `samples_per_prompt` completions per prompt, at rollout.temperature; without uniforms the most likely tokens."""
    at_once = max(1, rollout.rows_at_once // samples_per_prompt)
    groups: list[Group] = []
    with policy.sampling():
        for start in range(0, len(prompts), at_once):
            part = prompts[start : start + at_once]
            uniforms_NT = None
            if uniforms_PGT is not None:
                rows = uniforms_PGT[start : start + at_once].reshape(len(part) * samples_per_prompt, -1)
                uniforms_NT = torch.from_numpy(rows).to(policy.device)
            tokens_NT, logprobs_NT = _decode(policy, [p.prompt_ids for p in part], samples_per_prompt, rollout.max_new_tokens, uniforms_NT)
            groups += _to_groups(policy, part, samples_per_prompt, tokens_NT, logprobs_NT)
    return groups


def _decode(policy: Policy, prompts: list[list[int]], G: int, T: int, uniforms_NT: Tensor | None) -> tuple[Tensor, Tensor]:
    """(N, T) token ids and log-probs of N = prompts x G rows; what stands behind a row's end token is meaningless."""
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
        all_logprobs = policy.next_token_logprobs(logits)
        token = all_logprobs.argmax(dim=1) if uniforms_NT is None else _inverse_cdf(all_logprobs, uniforms_NT[rows, t])
        tokens_NT[rows, t] = token
        logprobs_NT[rows, t] = all_logprobs.gather(1, token[:, None])[:, 0]
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
    if not torch.isfinite(logprobs_NT).all():
        raise ValueError("the policy no longer gives finite probabilities: try a lower optimizer.lr, or optimizer.grad_clip=1")
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
