"""Groups to padded tensors, and their cut into micro-batches. Knows nothing of models or rewards."""

from dataclasses import fields, replace
from itertools import groupby

import torch
from torch import Tensor

from grpo_cli.config import Truncated
from grpo_cli.records import Batch, Ended, Group


def pad(rows: list[list], value, left: bool = False, dtype: torch.dtype = torch.long) -> Tensor:
    """(rows, longest) tensor, filled with `value` on the left or the right."""
    width = max(map(len, rows))
    filler = [[value] * (width - len(row)) for row in rows]
    return torch.tensor([f + list(r) if left else list(r) + f for r, f in zip(rows, filler, strict=True)], dtype=dtype)


def collate(groups: list[Group], pad_id: int, truncated: Truncated) -> Batch:
    """One row per completion, groups in order. Padding is told from tokens by the lengths alone, so pad_id may be any id."""
    prompts = [group.encoded.prompt_ids for group in groups for _ in group.completions]
    completions = [completion for group in groups for completion in group.completions]
    kept = [truncated is Truncated.keep or completion.ended is not Ended.length for completion in completions]
    return Batch(
        group_B=torch.tensor([number for number, group in enumerate(groups) for _ in group.completions]),
        prompt_ids_BS=pad(prompts, pad_id, left=True),
        prompt_lengths_B=torch.tensor([len(p) for p in prompts]),
        completion_ids_BT=pad([c.token_ids for c in completions], pad_id),
        completion_lengths_B=torch.tensor([len(c.token_ids) for c in completions]),
        trained_B=torch.tensor(kept),
        sampled_logprobs_BT=pad([c.logprobs for c in completions], 0.0, dtype=torch.float32),
    )


def to_device(batch: Batch, device: torch.device) -> Batch:
    tensors = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return replace(batch, **{name: value.to(device) for name, value in tensors.items() if value is not None})


def take(batch: Batch, rows_B: Tensor) -> Batch:
    """The given rows, trimmed to the longest prompt and completion among them."""
    picked = {f.name: getattr(batch, f.name)[rows_B] for f in fields(batch) if getattr(batch, f.name) is not None}
    S = int(picked["prompt_lengths_B"].max())
    T = int(picked["completion_lengths_B"].max())
    trim = {name: value[:, :T] for name, value in picked.items() if name.endswith(("_BT", "_BTH"))}
    return replace(batch, **picked | trim | {"prompt_ids_BS": picked["prompt_ids_BS"][:, -S:]})


def shared_micro_batches(batch: Batch, token_budget: int) -> list[Tensor]:
    """Row numbers cut so that their tokens, each group's prompt counted once, stay within the budget.

    Groups stay whole where they fit; a single row over the budget stands alone.
    """
    prompt, completion = batch.prompt_lengths_B.tolist(), batch.completion_lengths_B.tolist()
    parts: list[list[int]] = []
    used = token_budget
    for _, numbered in groupby(enumerate(batch.group_B.tolist()), key=lambda pair: pair[1]):
        rows = [row for row, _ in numbered]
        whole = prompt[rows[0]] + sum(completion[row] for row in rows)
        if used + whole <= token_budget:
            parts[-1] += rows
            used += whole
            continue
        used = token_budget
        for row in rows:
            if used + completion[row] > token_budget:
                parts.append([])
                used = prompt[row]
            parts[-1].append(row)
            used += completion[row]
    return [torch.tensor(part, device=batch.completion_lengths_B.device) for part in parts]


def micro_batches(batch: Batch, token_budget: int) -> list[Tensor]:
    """Row numbers cut so that rows x longest row stays within the budget, similar lengths together; a row over it stands alone."""
    order = torch.argsort(batch.completion_lengths_B, stable=True).tolist()
    prompt, completion = batch.prompt_lengths_B.tolist(), batch.completion_lengths_B.tolist()
    parts: list[list[int]] = []
    longest_prompt = longest_completion = 0
    for row in order:
        grown_prompt, grown_completion = max(longest_prompt, prompt[row]), max(longest_completion, completion[row])
        if parts and (len(parts[-1]) + 1) * (grown_prompt + grown_completion) <= token_budget:
            parts[-1].append(row)
            longest_prompt, longest_completion = grown_prompt, grown_completion
        else:
            parts.append([row])
            longest_prompt, longest_completion = prompt[row], completion[row]
    return [torch.tensor(part, device=batch.completion_lengths_B.device) for part in parts]
