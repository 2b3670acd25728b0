"""Groups laid end to end: the tokens of some prompts, then of their completions. Indices only, no model."""

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_cli.fast.ops import Layout
from grpo_cli.records import Batch


@dataclass(frozen=True)
class Packed:
    ids: Tensor
    """(N,) what the model reads: each prompt once, completions without their last token, which predicts nothing that is scored."""
    positions: Tensor
    layout: Layout
    kept: Tensor
    """Rows whose last hidden state is needed: the last of each prompt, then all of the completions."""
    predicts: Tensor
    """Among the kept, the row before each completion token, completion by completion."""


def pack(batch: Batch) -> Packed:
    """Rows with the same prompt (group_B) have to stand side by side in the batch."""
    device = batch.completion_ids_BT.device
    _, inverse, rows_P = torch.unique_consecutive(batch.group_B.cpu(), return_inverse=True, return_counts=True)
    fed_B = batch.completion_lengths_B.cpu() - 1
    first_P = rows_P.cumsum(0) - rows_P
    prompt_lengths_P = batch.prompt_lengths_B.cpu()[first_P]
    S, T = batch.prompt_ids_BS.shape[1], batch.completion_ids_BT.shape[1]

    prompts, shared, begin = _slices(prompt_lengths_P, 0), [], int(prompt_lengths_P.sum())
    per_group = torch.zeros_like(prompt_lengths_P).index_add_(0, inverse, fed_B)
    for prompt, completions in zip(prompts, _slices(per_group, begin), strict=True):
        if completions.stop > completions.start:
            shared.append((prompt, completions))

    place_S, place_T = torch.arange(S), torch.arange(T - 1)
    inside_PS = place_S >= S - prompt_lengths_P[:, None]  # padded on the left
    inside_BT = place_T < fed_B[:, None]
    prompt_ids = batch.prompt_ids_BS[first_P.to(device)][inside_PS.to(device)]
    completion_ids = batch.completion_ids_BT[:, :-1][inside_BT.to(device)]
    start_P = prompt_lengths_P[inverse][:, None]
    positions = torch.cat([(place_S - (S - prompt_lengths_P[:, None]))[inside_PS], (start_P + place_T)[inside_BT]])

    offset_B = fed_B.cumsum(0) - fed_B  # of each completion among the completion tokens
    speaks = fed_B > 0
    own_NT = torch.where(inside_BT, offset_B[:, None] + place_T, offset_B[:, None])[speaks]
    valid_NT = inside_BT[speaks]
    layout = Layout(prompts, shared, begin, own_NT.to(device), valid_NT.to(device), inverse[speaks].to(device), even=bool(valid_NT.all()))
    before_BT = torch.cat([inverse[:, None], len(rows_P) + offset_B[:, None] + place_T], dim=1)
    scored_BT = torch.arange(T) <= fed_B[:, None]
    kept = torch.cat([prompt_lengths_P.cumsum(0) - 1, torch.arange(begin, begin + int(fed_B.sum()))])
    return Packed(torch.cat([prompt_ids, completion_ids]), positions.to(device), layout, kept.to(device), before_BT[scored_BT].to(device))


def _slices(lengths: Tensor, start: int) -> list[slice]:
    ends = (start + lengths.cumsum(0)).tolist()
    return [slice(end - length, end) for end, length in zip(ends, lengths.tolist(), strict=True)]


def pack_prompts(prompts: list[list[int]], device: torch.device) -> Packed:
    """Prompts alone."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    none = torch.zeros(0, dtype=torch.long, device=device)
    layout = Layout(_slices(lengths, 0), [], int(lengths.sum()), none[:, None], none[:, None].bool(), none, even=True)
    ids = torch.tensor([token for prompt in prompts for token in prompt], device=device)
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()]).to(device)
    kept = (lengths.cumsum(0) - 1).to(device)
    return Packed(ids, positions, layout, kept, torch.arange(len(prompts), device=device))
