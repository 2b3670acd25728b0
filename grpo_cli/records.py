"""What flows through a run: Problem -> Group of Completions -> Scores -> Batch.

Plain records, no arithmetic. Axes: P prompts, G samples per prompt, B = P*G sequences, T completion tokens.
This module must not import torch at run time: reward rules see these records in processes without it.
"""

from __future__ import annotations

import copyreg
import re
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def frozen(value: Any) -> Any:
    """Read-only through and through: a rule that kept something in a problem's fields would score differently after a resume."""
    if isinstance(value, dict):
        return MappingProxyType({key: frozen(inner) for key, inner in value.items()})
    return tuple(frozen(inner) for inner in value) if isinstance(value, list) else value


copyreg.pickle(MappingProxyType, lambda mapping: (frozen, (dict(mapping),)))  # the fields of problems travel to worker processes


class Ended(Enum):
    """Why a completion ended."""

    eos = "eos"
    length = "length"


@dataclass(frozen=True)
class Problem:
    id: str
    """Stable across runs: the same problem has the same id in every run on this data."""
    prompt: str | list[dict[str, str]]
    """Plain text, or the messages of a chat."""
    answer: str
    """The gold answer."""
    fields: dict[str, Any] = field(default_factory=dict)
    """The row's other fields, for reward rules."""


@dataclass(frozen=True)
class EncodedProblem:
    """A problem as the policy reads it."""

    problem: Problem
    prompt_ids: list[int]
    prompt_text: str
    """What prompt_ids say, markers included."""


@dataclass(frozen=True)
class Completion:
    token_ids: list[int]
    """What the policy emitted, the end token included when it ended by one."""
    text: str
    """Decoded without the end token."""
    logprobs: list[float]
    """Log-probability of each token under the distribution it was drawn from (nats)."""
    ended: Ended


@dataclass(frozen=True)
class Group:
    """G completions of one prompt. It stays a group until `collate`."""

    encoded: EncodedProblem
    completions: list[Completion]


_TAG = {name: re.compile(rf"<{name}>(.*?)</{name}>", re.DOTALL) for name in ("think", "answer")}


@dataclass(frozen=True)
class Sample:
    """What a reward rule sees of one completion."""

    problem: Problem
    prompt_text: str
    text: str
    tokens: int
    """Length of the completion in tokens, the end token included."""
    ended: Ended

    @property
    def thought(self) -> str | None:
        """Content of the first <think> part, None without one."""
        match = _TAG["think"].search(self.text)
        return match and match.group(1)

    @property
    def answers(self) -> list[str]:
        """Contents of all <answer> parts after the last </think>."""
        return _TAG["answer"].findall(self.text.rsplit("</think>", 1)[-1])


END = -1
"""The place of a reward for a whole completion: its last token."""


@dataclass(frozen=True)
class Scores:
    rule_PG: dict[str, Tensor]
    """Raw score per rule, before weighting; NaN where a rule does not apply."""
    total_PG: Tensor
    """Weighted sum over the rules that apply."""
    right_PG: Tensor
    """Bool: the accuracy rule gave 1 or above."""
    steps_B: list[list[tuple[int, float]]]
    """Weighted step rewards of each completion, groups in order: (end in the text, reward). Process rules give one per step; all
    outcome rules together are one step at END."""
    not_applicable: dict[str, int]
    """Completions each rule did not apply to."""
    errors: dict[str, int]
    """Completions on which each rule failed; they have its on_error."""
    examples: dict[str, str]
    """What went wrong first, for each rule that failed."""
    stand_in_PG: Tensor
    """Bool: the total stands in for a verdict: a rule failed on the completion, or no rule with a weight applied to it."""


@dataclass
class Batch:
    """Prompts and completions side by side: prompts padded on the left, completions on the right."""

    group_B: Tensor
    """Number of the group of each row; the rows of a group stand side by side and have one prompt."""
    prompt_ids_BS: Tensor
    prompt_lengths_B: Tensor
    completion_ids_BT: Tensor
    completion_lengths_B: Tensor
    trained_B: Tensor
    """Bool: False takes a completion out of the loss (a masked truncation)."""
    sampled_logprobs_BT: Tensor
    """Recorded while sampling; 0 behind the end."""
    old_logprobs_BT: Tensor | None = None
    """Set by `annotate` for a KL in the reward: what the policy gives the tokens when scored as the reference is."""
    reference_logprobs_BT: Tensor | None = None
    """Set by `annotate` on steps that measure or penalise the KL."""
    reference_features_BTH: Tensor | None = None
    """Set by `annotate` for the exact KL: what the reference's head makes its whole next-token distributions from."""
    advantages_BT: Tensor | None = None
