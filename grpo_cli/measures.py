"""What one step's groups, scores and update amount to: the metrics and the rows that are logged. Arithmetic and naming only."""

from torch import Tensor

from grpo_cli.advantages import all_equal, group_spread
from grpo_cli.config import Std
from grpo_cli.records import Ended, Group, Scores

SAMPLES_SHOWN = 4


def rollout_metrics(groups: list[Group], scores: Scores, std: Std) -> dict[str, float]:
    completions = [c for group in groups for c in group.completions]
    metrics = {
        "reward/mean": scores.total_PG.mean().item(),
        "reward/group_std": group_spread(scores.total_PG, std).mean().item(),
        "group/frac_zero_std": all_equal(scores.total_PG).float().mean().item(),
        "group/frac_all_right": scores.right_PG.all(dim=1).float().mean().item(),
        "group/frac_all_wrong": (~scores.right_PG).all(dim=1).float().mean().item(),
        "completion/tokens": sum(len(c.token_ids) for c in completions) / len(completions),
        "completion/truncated_frac": sum(c.ended is Ended.length for c in completions) / len(completions),
    }
    for name, rule_PG in scores.rule_PG.items():
        applied = rule_PG[~rule_PG.isnan()].double()
        metrics[f"reward/rule/{name}"] = applied.mean().item() if len(applied) else float("nan")
        metrics[f"reward/rule_std/{name}"] = applied.std(correction=0).item() if len(applied) else float("nan")
    metrics |= {f"reward/errors/{name}": count for name, count in scores.errors.items()}
    return metrics | {f"reward/not_applicable/{name}": count for name, count in scores.not_applicable.items() if count}


def group_rows(step: int, groups: list[Group], scores: Scores, kl_B: Tensor | None, std: Std) -> list[dict]:
    spread_P, equal_P = group_spread(scores.total_PG, std), all_equal(scores.total_PG)
    kl_P = None if kl_B is None else kl_B.view(len(groups), -1).mean(dim=1).tolist()
    return [
        {
            "step": step,
            "problem": group.encoded.problem.id,
            "rewards": scores.total_PG[p].tolist(),
            "reward_mean": scores.total_PG[p].mean().item(),
            "reward_std": spread_P[p].item(),
            "kl": None if kl_P is None else kl_P[p],
            "lengths": [len(c.token_ids) for c in group.completions],
            "verdict": _verdict(scores.right_PG[p], bool(equal_P[p])),
        }
        for p, group in enumerate(groups)
    ]


def _verdict(right_G: Tensor, equal: bool) -> str:
    if right_G.all():
        return "all_right"
    if not right_G.any():
        return "all_wrong"
    return "tied" if equal else "mixed"


def sample_rows(step: int, groups: list[Group], scores: Scores) -> list[dict]:
    """The first completion of the first few groups."""
    return [
        {
            "step": step,
            "problem": group.encoded.problem.id,
            "prompt": group.encoded.prompt_text,
            "completion": group.completions[0].text,
            "answer": group.encoded.problem.answer,
            "rewards": {name: rule_PG[p, 0].item() for name, rule_PG in scores.rule_PG.items()},
            "total": scores.total_PG[p, 0].item(),
            "tokens": len(group.completions[0].token_ids),
            "ended": group.completions[0].ended.name,
        }
        for p, group in enumerate(groups[:SAMPLES_SHOWN])
    ]
