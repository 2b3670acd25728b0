"""The ledger of a run: where every sampled completion went, with its tokens and the seconds they took. Knows nothing of models.

Each completion is in one part, the first of these that fits:

filtered   dropped by dynamic sampling, with its group
truncated  cut off at the limit and masked out of the loss
unscored   a rule failed on it or no rule with a weight applied to it: its reward, which may be trained on, stands in for a verdict
trained    in the loss, in a group whose rewards gave some token an advantage
all_right  in a group that they gave none, since all of it is right by the accuracy rule and paid alike
all_wrong  the same, but all wrong
tied       the same, but neither: what is right and what is wrong were paid alike

So a group of equal rewards under a baseline of the whole step (reinforce_pp) is trained, and one that only a KL moves is not. A step that
ends the run because dynamic sampling found nothing to train on is no step: it is in no total, as it is not in the run's tokens.
"""

from itertools import accumulate, pairwise
from pathlib import Path

from torch import Tensor

from grpo_cli.config import Reward
from grpo_cli.records import Scores
from grpo_cli.runtime import hydra_override

PARTS = ("trained", "all_right", "all_wrong", "tied", "truncated", "filtered", "unscored")
MEASURES = ("completions", "tokens", "rollout_s", "update_s")
LITTLE_WASTED = 0.75
"""Share of completions in the part trained from which on there is nothing to advise."""

Totals = dict[str, dict[str, float]]
"""Part -> measure -> sum over the steps so far."""


def opened() -> Totals:
    return {part: dict.fromkeys(MEASURES, 0) for part in PARTS}


def partition(scores: Scores, rewarded_BT: Tensor, trained_B: Tensor) -> list[str]:
    """The part of each of the B completions of a batch; `rewarded_BT` are the advantages that the rewards alone give (beta 0)."""
    P, G = scores.total_PG.shape
    signal_P = (rewarded_BT != 0).any(dim=1).view(P, G).any(dim=1)
    of_group = [
        "trained" if signal else "all_right" if all_right else "tied" if some_right else "all_wrong"
        for signal, all_right, some_right in zip(
            signal_P.tolist(), scores.right_PG.all(dim=1).tolist(), scores.right_PG.any(dim=1).tolist(), strict=True
        )
    ]
    return [
        "truncated" if not in_loss else "unscored" if stand_in else of_group[number // G]
        for number, (in_loss, stand_in) in enumerate(zip(trained_B.tolist(), scores.stand_in_PG.flatten().tolist(), strict=True))
    ]


def book(totals: Totals, parts_B: list[str], lengths_B: list[int], filtered: list[int], seconds: dict[str, float]) -> dict[str, float]:
    """Add a step to the totals and return its metrics; `filtered` has the lengths of what dynamic sampling dropped.

    The step's seconds are shared out by tokens. What was filtered took no update.
    """
    kept, sampled = sum(lengths_B), sum(lengths_B) + sum(filtered)
    entries = [*zip(parts_B, lengths_B, strict=True), *(("filtered", length) for length in filtered)]
    for part, length in entries:
        total = totals[part]
        total["completions"] += 1
        total["tokens"] += length
        total["rollout_s"] += seconds["rollout"] * length / sampled
        total["update_s"] += 0 if part == "filtered" else seconds["update"] * length / kept
    metrics = {f"ledger/{measure}/{part}": totals[part][measure] for measure in MEASURES for part in PARTS}
    return {"reward/signal_frac": parts_B.count("trained") / len(entries), **metrics}


def sentence(rows: list[dict], folder: Path, reward: Reward, G: int, max_new_tokens: int) -> str:
    """What became of the completions of the run in `folder` and what to change, from its rows of metrics.jsonl: one at least."""
    counts = {part: [b - a for a, b in pairwise([0, *(row[f"ledger/completions/{part}"] for row in rows)])] for part in PARTS}
    sampled = [sum(of_step) for of_step in zip(*counts.values(), strict=True)]
    shares = {part: sum(counts[part]) / sum(sampled) for part in PARTS}
    if shares["trained"] >= LITTLE_WASTED:
        return f"little was wasted: {_percent(shares['trained'])} of completions gave a reward gradient"
    lost = sorted(PARTS[1:], key=shares.get, reverse=True)
    start, share = _majority(counts[lost[0]], sampled)
    since = None if start is None else rows[start]["step"]
    texts = [f"{_percent(shares[part])} {part.replace('_', ' ')}" for part in lost if shares[part] >= 0.005]
    if since:
        texts[0] += f" ({_percent(share)} from step {since} on)"
    sound = "sound " if shares["unscored"] >= 0.005 else ""
    advice = _advice(lost[0], since, folder, reward, G, max_new_tokens)
    return f"{_percent(1 - shares['trained'])} of completions gave no {sound}reward gradient: {', '.join(texts)}; {advice}"


def _advice(part: str, since: int | None, folder: Path, reward: Reward, G: int, max_new_tokens: int) -> str:
    band = f"'data.difficulty=[0.2,0.8]' {hydra_override('data.difficulty_map', folder)}"
    weight = reward.rules[reward.accuracy].weight
    return {
        "all_right": f"raise the difficulty ({band}) or stop earlier ({f'steps={since}' if since else 'stop.patience=2'})",
        "all_wrong": f"lower the difficulty ({band}) or try each problem more often (group_size.samples_per_prompt={2 * G})",
        "tied": f"let the right answer weigh more beside the other rules (reward.rules.{reward.accuracy}.weight={2 * weight or 1:g})",
        "truncated": f"leave them room to end (rollout.max_new_tokens={2 * max_new_tokens})",
        "filtered": f"pass such problems over before they are sampled ({band})",
        "unscored": "mend the rules that reward/errors and reward/not_applicable count, or stop at the first (reward.max_error_frac=0)",
    }[part]


def _majority(part_S: list[int], sampled_S: list[int]) -> tuple[int | None, float]:
    """(where it begins, the part's share in it) of the stretch to the end of the run in which the part most exceeds half.

    It begins at None when there is no such stretch, when it is the whole run or less than a tenth, or when the part's share before it was
    less than 25 points lower.
    """
    excess = list(accumulate(part - sampled / 2 for part, sampled in zip(reversed(part_S), reversed(sampled_S), strict=True)))
    start = len(excess) - 1 - max(range(len(excess)), key=excess.__getitem__)
    share, before = (sum(part_S[cut]) / max(1, sum(sampled_S[cut])) for cut in (slice(start, None), slice(0, start)))
    clear = start > 0 and share > 0.5 and share - before >= 0.25 and len(part_S) - start >= len(part_S) / 10
    return start if clear else None, share


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
