"""Optimizers and their learning-rate schedules by name. Imports torch only to build one, so that a plan can tell the rates."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from grpo_cli.config import LrSchedule, Optimizer, OptimizerName

if TYPE_CHECKING:
    import torch


def lr_factor(index: int, section: Optimizer, total_steps: int) -> float:
    """Share of optimizer.lr at the index-th optimizer step (from 0): linear warm-up, then the schedule, which ends on final_lr_frac."""
    if index < section.warmup_steps:
        return (index + 1) / section.warmup_steps
    progress = min(1.0, (index - section.warmup_steps) / max(1, total_steps - 1 - section.warmup_steps))
    if section.schedule is LrSchedule.linear:
        return 1 - progress * (1 - section.final_lr_frac)
    if section.schedule is LrSchedule.cosine:
        return section.final_lr_frac + (1 - section.final_lr_frac) * (1 + math.cos(math.pi * progress)) / 2
    return 1.0


def build_optimizer(parameters: Iterable[torch.nn.Parameter], section: Optimizer, total_steps: int):
    """The optimizer and its schedule; call `step` on both after each backward pass."""
    import torch

    parameters = list(parameters)
    decay = section.weight_decay
    if section.name is OptimizerName.sgd:
        optimizer = torch.optim.SGD(parameters, lr=section.lr, momentum=section.momentum, weight_decay=decay)
    else:
        kind = torch.optim.AdamW if section.name is OptimizerName.adamw else torch.optim.Adam
        optimizer = kind(parameters, lr=section.lr, betas=tuple(section.betas), weight_decay=decay)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda index: lr_factor(index, section, total_steps))
